"""Gather rows of KV state by an index list on the device, from pinned host memory or the device.

A sparse-attention indexer selects the rows. Nothing is copied to the host and nothing waits, so
both functions may be captured in a CUDA graph, as long as the tensors stay where they are.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import torch

from heterocache_cuda import kernels
from heterocache_cuda.layout import WIDEST_ACCESS
from heterocache_cuda.mover import ELEMENTS, LAUNCH_SIZES, Tile

_INDEX_TYPES = (torch.int32, torch.int64)


def gather_rows(
    source: torch.Tensor,
    indices: torch.Tensor,
    target: torch.Tensor,
    *,
    kernel: Any = kernels.gather_rows,
) -> None:
    """Copy `source[indices[i]]` to `target[i]`, on torch's current stream.

    - `source`: `[rows, row]`, on the device or pinned host memory.
    - `indices`: `[n]` int32 or int64. For a negative index the row becomes zeros. Others must be
      less than `rows`, which is not checked.
    - `target`: `[n, row]`, of the source's type. It must not overlap the source.
    - `kernel`: another way to run it, such as Triton's interpreter.

    Raises ValueError if a tensor has another shape, type or place.
    """
    _check_shapes(source.dim() == 2 and indices.dim() == 1, source, indices, target)
    no_table = indices.unsqueeze(0)
    _launch(kernel, source.unsqueeze(0), indices, no_table, target, page_rows=0)


def gather_tokens(
    pages: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    target: torch.Tensor,
    *,
    kernel: Any = kernels.gather_rows,
) -> None:
    """Copy the rows of tokens out of the pages of their request, on torch's current stream.

    - `pages`: `[blocks, rows of a page, row]`, on the device or pinned host memory.
    - `positions`: `[requests, n]` int32 or int64. For a negative position the row becomes zeros.
    - `block_table`: `[requests, most pages]` int32 or int64. Page `p` of request `r` is block
      `block_table[r, p]`. Positions and blocks must exist, which is not checked.
    - `target`: `[requests, n, row]`, of the pages' type, its first two dimensions evenly spaced.
    - `kernel`: another way to run it, such as Triton's interpreter.

    Raises ValueError if a tensor has another shape, type or place.
    """
    _check_shapes(pages.dim() == 3 and positions.dim() == 2, pages, positions, target)
    if block_table.dim() != 2 or len(block_table) != len(positions):
        raise ValueError(
            f"block_table must have a row for each of the {len(positions)} requests, "
            f"not shape {tuple(block_table.shape)}"
        )
    flat = target.view(-1, target.shape[-1])
    _launch(kernel, pages, positions, block_table, flat, page_rows=pages.shape[1])


def _launch(
    kernel: Any,
    pages: torch.Tensor,
    indices: torch.Tensor,
    block_table: torch.Tensor,
    target: torch.Tensor,
    page_rows: int,
) -> None:
    """`pages`: `[pages, rows, row]`; `target`: `[n, row]`."""
    _check_places(pages, indices, block_table, target)
    if target.numel() == 0:
        return
    size = target.element_size()
    row_bytes = target.shape[-1] * size
    page_stride, row_stride, target_stride = (
        stride * size for stride in (pages.stride(0), pages.stride(1), target.stride(0))
    )
    used = [pages.data_ptr(), target.data_ptr(), row_bytes, row_stride, target_stride]
    alignment = gcd(WIDEST_ACCESS, *used, *([page_stride] if page_rows else []))
    tile = Tile.of(row_bytes, alignment)
    kernel[(-(-len(target) // tile.rows),)](
        pages.data_ptr(),
        page_stride,
        row_stride,
        indices,
        block_table,
        block_table.stride(0),
        target.data_ptr(),
        target_stride,
        len(target),
        indices.shape[-1],
        row_bytes,
        PAGE_ROWS=page_rows,
        ELEMENT=ELEMENTS[tile.element_bytes],
        ALIGNMENT=alignment,
        ROWS=tile.rows,
        WORDS=tile.words,
        **LAUNCH_SIZES.options,
    )


def _check_shapes(
    dims: bool, source: torch.Tensor, indices: torch.Tensor, target: torch.Tensor
) -> None:
    expected = (*indices.shape, source.shape[-1])
    if not dims or target.shape != expected or target.dtype != source.dtype:
        raise ValueError(
            f"a source {tuple(source.shape)} of {source.dtype} with indices "
            f"{tuple(indices.shape)} fills a target {expected} of that type, not "
            f"{tuple(target.shape)} of {target.dtype}"
        )


def _check_places(
    pages: torch.Tensor, indices: torch.Tensor, block_table: torch.Tensor, target: torch.Tensor
) -> None:
    for name, rows in (("source", pages), ("target", target)):
        if rows.stride(-1) != 1:
            raise ValueError(f"each row of the {name} must be contiguous")
    for name, numbers in (("indices", indices), ("block_table", block_table)):
        if numbers.dtype not in _INDEX_TYPES:
            raise ValueError(f"{name} must be int32 or int64, not {numbers.dtype}")
        if numbers.device != target.device:
            raise ValueError(f"{name} must be on {target.device}, not {numbers.device}")
    if not indices.is_contiguous() or block_table.stride(-1) != 1:
        raise ValueError("indices, and each row of block_table, must be contiguous")
    if pages.device != target.device and not pages.is_pinned():
        raise ValueError("the source must be on the target's device or in pinned host memory")
