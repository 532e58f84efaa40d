"""The place of a layer's pages in memory, and of their bytes in an artifact."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd, prod

import torch

WIDEST_ACCESS = 16
"""Bytes that one thread can load or store at a time."""
_ROW_DIMS = 3


@dataclass(frozen=True)
class PageLayout:
    """The pages of a layer, one per block, in any order of bytes that strides can express.

    The logical bytes of a page are its rows one after the other. Rows are numbered by three
    dimensions, the first outermost. A page that is contiguous in memory is a single row.
    """

    address: int
    """The address of block 0."""
    block_stride: int
    """Bytes from one block to the next."""
    rows: tuple[int, int, int]
    strides: tuple[int, int, int]
    """Bytes between rows, by dimension."""
    row_bytes: int

    @property
    def num_rows(self) -> int:
        return prod(self.rows)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that are moved; padding is not."""
        return self.num_rows * self.row_bytes

    @property
    def alignment(self) -> int:
        """The largest power of two up to 16 that divides each address and size, in bytes."""
        used = [s for s, n in zip(self.strides, self.rows, strict=True) if n > 1]
        return gcd(WIDEST_ACCESS, self.address, self.block_stride, self.row_bytes, *used)

    @classmethod
    def of(cls, pages: torch.Tensor) -> PageLayout:
        """Describe `[num_blocks, ...] uint8` in any memory order.

        Raises ValueError if the order needs more than three dimensions of rows.
        """
        if pages.dtype != torch.uint8:
            raise ValueError(f"pages must be viewed as uint8, not {pages.dtype}")
        dims: list[tuple[int, int]] = []
        for size, stride in zip(pages.shape[1:], pages.stride()[1:], strict=True):
            if size == 1:
                continue
            if dims and dims[-1][1] == size * stride:  # the outer dimension continues this one
                dims[-1] = (dims[-1][0] * size, stride)
            else:
                dims.append((size, stride))
        row_bytes = dims.pop()[0] if dims and dims[-1][1] == 1 else 1
        if len(dims) > _ROW_DIMS:
            raise ValueError(
                f"pages of shape {tuple(pages.shape[1:])} with strides {pages.stride()[1:]} have "
                f"{len(dims)} dimensions of rows, and at most {_ROW_DIMS} can be moved"
            )
        dims = [(1, 0)] * (_ROW_DIMS - len(dims)) + dims
        (a, b, c), (x, y, z) = zip(*dims, strict=True)
        return cls(pages.data_ptr(), pages.stride(0), (a, b, c), (x, y, z), row_bytes)

    def part(self, start: int, size_bytes: int) -> PageLayout:
        """Return the layout of bytes [start, start + size_bytes) of each page.

        Raises ValueError if pages are not contiguous.
        """
        if self.num_rows != 1:
            raise ValueError("only contiguous pages can be cut by bytes")
        return replace(self, address=self.address + start, row_bytes=size_bytes)
