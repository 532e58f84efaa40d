"""SSD transfers by extent size, over an O_DIRECT dd: a part of `benchmarks.layerwise_transfer`."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.measure import MIB, DirectDisk, timed, touched
from hetero_connector.transfer.base import Direction, Extent, FileTransfer, OpenFile, TransferState
from hetero_connector.transfer.choose import choose_file_transfer

SSD_EXTENTS = [64 << 10, 256 << 10, MIB, 4 * MIB]
_BYTES = 192 * MIB


def measure_ssd(directory: Path, repeats: int) -> dict[str, list[tuple[int, float]]]:
    """Curve -> [(extent bytes, bandwidth over dd's)]."""
    curves: dict[str, list[tuple[int, float]]] = {}
    memory = touched(_BYTES)
    disk = DirectDisk(directory, _BYTES)
    try:
        with _direct_file(directory / "slab", memory) as file:
            for kind in ("nixl", "pread"):
                transfer = choose_file_transfer(memory, [file], directory, kind).transfer
                try:
                    for size in SSD_EXTENTS:
                        ratios = _ssd_ratios(transfer, disk, size, repeats)
                        for direction, ratio in ratios.items():
                            name = f"{transfer.name} {direction.value}"
                            curves.setdefault(name, []).append((size, ratio))
                finally:
                    transfer.close()
    finally:
        disk.close()
    return curves


def _ssd_ratios(
    transfer: FileTransfer, disk: DirectDisk, extent_bytes: int, repeats: int
) -> dict[Direction, float]:
    extents = [Extent(0, at, at, extent_bytes) for at in range(0, _BYTES, extent_bytes)]
    references: dict[Direction, Callable[[], float]] = {
        Direction.READ: disk.read_bandwidth,
        Direction.WRITE: disk.write_bandwidth,
    }
    ratios: dict[Direction, list[float]] = {direction: [] for direction in references}
    for _ in range(repeats):
        for direction, reference in references.items():
            seconds = timed(partial(_move, transfer, direction, extents))
            ratios[direction].append(_BYTES / seconds / reference())
    return {direction: statistics.median(values) for direction, values in ratios.items()}


def _move(transfer: FileTransfer, direction: Direction, extents: list[Extent]) -> None:
    moving = transfer.submit(direction, extents)
    while moving.poll() is TransferState.PENDING:
        time.sleep(100e-6)
    if moving.error is not None:
        raise moving.error


@contextmanager
def _direct_file(path: Path, memory: np.ndarray) -> Iterator[OpenFile]:
    path.write_bytes(os.urandom(len(memory)))
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    try:
        yield OpenFile(fd, len(memory))
    finally:
        os.close(fd)
        path.unlink()
