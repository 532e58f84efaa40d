"""Views of the engine's KV pages, and copies on a CPU between them and the arena.

A layer's pages are `[num_blocks, ...]`, with strides that the engine chooses. Padding of a page is
never read or written.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetero_connector.artifacts.tensor_parallel import PageRun
from hetero_connector.engine.worker.copy_plan import IndexArray
from hetero_connector.errors import ConfigError, UnsupportedModelError
from hetero_connector.spec import LayerSpec

ByteArray = npt.NDArray[np.uint8]

_KERNEL_BLOCK_DIMS = 5
"""`[block, kernel block, head, token, content]`"""
_GATHER_BELOW_BYTES = 4096
"""Smaller pages are saved by one indexed copy, because one copy per page would cost more."""


class ArenaRows(NamedTuple):
    """Rows of page bytes in the arena: `pages` pages of each of some artifacts.

    Page `j` of artifact `i` starts at byte `offset + i * stride + j * pitch`.
    """

    offset: int
    stride: int
    artifacts: int
    pages: int
    pitch: int
    """Bytes of a whole page. A rank may copy only its part of it."""


BlockIds = slice | IndexArray
"""The engine's block of each page of some rows; a slice if they are consecutive, so that one copy
replaces many."""


def as_slice(ids: IndexArray) -> BlockIds:
    """Return the ids, at least one, as a slice if they are consecutive.

    Descending ids are as common as ascending ones: vLLM frees a request's blocks last to first.
    """
    first, last = int(ids[0]), int(ids[-1])
    step = 1 if last >= first else -1
    if (last - first) * step != len(ids) - 1 or not (ids[1:] - ids[:-1] == step).all():
        return ids
    stop = last + step
    return slice(first, stop if stop >= 0 else None, step)


def page_view(spec: LayerSpec, cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Return `cache` as `[num_blocks, ...] uint8`, sharing its memory.

    Raises UnsupportedModelError if a page has other bytes than the spec says: then this package
    misunderstands the layer.
    """
    if cache.shape[0] != num_blocks:
        # Kernel blocks subdivide a manager block (vLLM's group_kernel_blocks).
        cache = cache.unflatten(0, (num_blocks, -1))
    view = cache.view(torch.uint8) if cache.dtype != torch.uint8 else cache
    page_bytes = view[0].numel()
    if page_bytes != spec.page_bytes:
        raise UnsupportedModelError(
            f"layer {spec.layer!r}: a page holds {page_bytes} bytes where its spec says "
            f"{spec.page_bytes}; please report this model and vLLM version"
        )
    return view


def check_cut_by_heads(spec: LayerSpec, view: torch.Tensor) -> None:
    """Raise ConfigError if pages do not have their KV heads outermost, as `LayerSpec.runs` says.

    That is the case if vLLM divides a block into kernel blocks, each of which has all heads.
    """
    divided = view.dim() == _KERNEL_BLOCK_DIMS and view.shape[1] > 1 and view.shape[2] > 1
    if spec.runs and divided:
        raise ConfigError(
            "tp_sizes",
            f"'any' needs blocks that are not divided, but the attention backend of layer "
            f"{spec.layer!r} divides each into {view.shape[1]}; set --block-size to the block "
            "size of the backend, or tp_sizes to 'own'",
        )


def run_views(
    spec: LayerSpec, view: torch.Tensor, runs: Sequence[PageRun]
) -> Iterator[torch.Tensor]:
    """Yield `[num_blocks, ...] uint8` for each run of the pages in `view`, sharing its memory.

    Raises UnsupportedModelError if there are several runs and the pages are not contiguous.
    """
    if len(runs) == 1:
        yield view
        return
    if not view[0].is_contiguous():
        raise UnsupportedModelError(
            f"layer {spec.layer!r}: its pages are strided, so its state cannot be cut by heads; "
            "set tp_sizes to 'own'"
        )
    for run in runs:
        yield view.flatten(1)[:, run.start : run.start + run.size_bytes]


class HostPages:
    """Pages in host memory, or one run of each. Block ids are the engine's.

    It copies with numpy, which releases the GIL, so that a second thread can run ahead of the
    forward pass.
    """

    def __init__(self, view: torch.Tensor) -> None:
        pages: ByteArray = view.numpy()
        page_shape = pages.shape[1:]
        dense = pages[0].flags.c_contiguous
        if dense:
            size = int(np.prod(page_shape))
            pages = np.lib.stride_tricks.as_strided(
                pages, (pages.shape[0], size), (pages.strides[0], 1)
            )
        self._pages = _widest(pages) if dense else pages
        self._page_shape = self._pages.shape[1:]
        self._dtype = self._pages.dtype
        self._page_bytes = int(np.prod(page_shape))
        self._page_strides = np.empty(self._page_shape, self._dtype).strides

    def load(self, arena: ByteArray, rows: ArenaRows, blocks: BlockIds) -> None:
        """Copy from the arena to pages."""
        source = self._arena_view(arena, rows)
        if isinstance(blocks, slice):
            target = self._pages[blocks]
            target.reshape(rows.artifacts, rows.pages, *self._page_shape)[...] = source
        else:
            self._pages[blocks.reshape(rows.artifacts, rows.pages)] = source

    def save(self, arena: ByteArray, rows: ArenaRows, blocks: BlockIds) -> None:
        """Copy from pages to the arena."""
        target = self._arena_view(arena, rows)
        if isinstance(blocks, slice):
            source = self._pages[blocks]
            target[...] = source.reshape(rows.artifacts, rows.pages, *self._page_shape)
        elif self._page_bytes < _GATHER_BELOW_BYTES:
            target[...] = self._pages[blocks.reshape(rows.artifacts, rows.pages)]
        else:
            # Indexing with an array would copy twice: into a temporary array, then to the arena.
            for index, block_id in enumerate(blocks.tolist()):
                target[index // rows.pages, index % rows.pages] = self._pages[block_id]

    def clear(self, block_ids: IndexArray) -> None:
        """Fill pages with zeros."""
        self._pages[block_ids] = 0

    def _arena_view(self, arena: ByteArray, rows: ArenaRows) -> npt.NDArray[np.generic]:
        """Return the rows as `[artifacts, pages, *page]`, sharing the arena's memory."""
        return np.ndarray(
            (rows.artifacts, rows.pages, *self._page_shape),
            self._dtype,
            arena,
            rows.offset,
            (rows.stride, rows.pitch, *self._page_strides),
        )


def _widest(pages: ByteArray) -> npt.NDArray[np.generic]:
    """Return the same rows as the widest integers that fit: indexed copies are faster with them."""
    stride, size = pages.strides[0], pages.shape[1]
    address = pages.__array_interface__["data"][0]
    for dtype in (np.uint64, np.uint32, np.uint16):
        width = np.dtype(dtype).itemsize
        if not (stride % width or size % width or address % width):
            return pages.view(dtype)
    return pages
