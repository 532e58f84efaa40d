"""Move pages by plain indexing on the CPU: what the kernel must do, byte for byte."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import Int64Array, Job, Mode


def move(mode: Mode, job: Job, block_ids: Int64Array, addresses: Sequence[int]) -> None:
    """Move the pages of one job. `block_ids` is `[artifacts, pages]`, id 0 is left alone."""
    for artifact, address in enumerate(addresses):
        for index, block in enumerate(block_ids[artifact].tolist()):
            if block:
                stored = address + job.offset + index * job.pitch
                _move_page(mode, job.pages, block, stored)


def _move_page(mode: Mode, pages: PageLayout, block: int, stored: int) -> None:
    for number, row in enumerate(row_addresses(pages, block)):
        in_page = memory(row, pages.row_bytes)
        if mode is Mode.CLEAR:
            in_page[:] = 0
            continue
        in_artifact = memory(stored + number * pages.row_bytes, pages.row_bytes)
        if mode is Mode.LOAD:
            in_page[:] = in_artifact
        else:
            in_artifact[:] = in_page


def row_addresses(pages: PageLayout, block: int) -> Iterator[int]:
    """Yield the addresses of a page's rows, in their logical order."""
    for index in np.ndindex(*pages.rows):
        inside = sum(i * stride for i, stride in zip(index, pages.strides, strict=True))
        yield pages.address + block * pages.block_stride + inside


def memory(address: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return host memory at an address."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * size_bytes).from_address(address))
