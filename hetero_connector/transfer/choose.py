"""Chooses this machine's `FileTransfer`: NIXL if it works on the directory, else preadv."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreError, TransferError
from hetero_connector.transfer.base import (
    BLOCK_BYTES,
    Direction,
    Extent,
    FileTransfer,
    OpenFile,
    open_direct,
    wait_for,
)
from hetero_connector.transfer.nixl_files import NixlFiles
from hetero_connector.transfer.pread_files import PreadFiles

Bytes = npt.NDArray[np.uint8]
Build = Callable[[Bytes, Sequence[OpenFile]], FileTransfer]
QUEUES = ("uring", "aio")
_PROBE_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ChosenTransfer:
    """The transfer to use and, for the log, the reason for it."""

    transfer: FileTransfer
    reason: str


def choose_file_transfer(
    memory: Bytes, files: Sequence[OpenFile], probe_dir: Path
) -> ChosenTransfer:
    """Choose NIXL (io_uring, then AIO) if it writes and reads 4 KiB in `probe_dir`, else preadv."""
    problems = []
    for queue in QUEUES:
        try:
            probe(probe_dir, lambda m, f, queue=queue: NixlFiles(m, f, queue))  # type: ignore[misc]
            return ChosenTransfer(NixlFiles(memory, files, queue), f"NIXL ({queue}) works")
        except StoreError as e:
            problems.append(str(e))
        except TransferError as e:
            problems.append(f"NIXL ({queue}) cannot write and read in {probe_dir}: {e}")
    why = "; ".join(dict.fromkeys(problems))
    return ChosenTransfer(PreadFiles(memory, files), f"preadv instead of NIXL: {why}")


def probe(directory: Path, build: Build) -> None:
    """Write 4 KiB to a scratch file in `directory` and read them back through `build(...)`.

    Raises StoreError if it cannot be built, TransferError if the bytes cannot be read back.
    """
    memory = np.frombuffer(mmap.mmap(-1, 2 * BLOCK_BYTES), np.uint8)
    memory[:BLOCK_BYTES] = np.arange(BLOCK_BYTES) % 251
    fd = open_scratch(directory)
    try:
        os.ftruncate(fd, BLOCK_BYTES)
        transfer = build(memory, [OpenFile(fd, BLOCK_BYTES)])
        try:
            for direction, at in ((Direction.WRITE, 0), (Direction.READ, BLOCK_BYTES)):
                moving = transfer.submit(direction, [Extent(0, 0, at, BLOCK_BYTES)])
                wait_for(moving, _PROBE_TIMEOUT_S)
        finally:
            transfer.close(_PROBE_TIMEOUT_S)
    finally:
        os.close(fd)
    if not np.array_equal(memory[:BLOCK_BYTES], memory[BLOCK_BYTES:]):
        raise TransferError("the bytes read differ from the bytes written")


def open_scratch(directory: Path) -> int:
    """Open an unnamed file in `directory`, with O_DIRECT if the filesystem supports it."""
    fd, path = tempfile.mkstemp(prefix=".heterocache-probe-", dir=directory)
    try:
        return open_direct(path, os.O_RDWR)
    finally:
        os.close(fd)
        os.unlink(path)
