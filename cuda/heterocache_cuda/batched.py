"""Copy contiguous pages by the GPU's copy engines, which leave its processors to the model.

The driver takes two addresses and a size for each page, on the CPU, so few large pages pay and many
small ones do not: a `CopyTable` says which. It is measured, because links and drivers differ. Not
for a stream that is being captured into a graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from heterocache_cuda.driver import Driver
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import (
    Field,
    Int64Array,
    Job,
    Mode,
    PageMover,
    Part,
    alignment_of,
    plan_moves,
)
from heterocache_cuda.pinned import PIECE_BYTES

PAGE_SIZES = tuple(1 << n for n in range(12, 21))
"""4 KiB to 1 MiB: what `measure_copy_table` tries."""
_TOTAL_BYTES = 64 << 20
_LAYERS = 8
_ROUNDS = 5


class Copies(NamedTuple):
    """Pieces of memory, `[n]` each: addresses on the device and in the arena, and bytes."""

    in_pages: Int64Array
    in_artifacts: Int64Array
    sizes: Int64Array


class BatchCopier(Protocol):
    """The call that copies many pieces: that of `Driver`."""

    def copy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        sizes: Int64Array,
        stream: int,
        *,
        is_source_stable: bool,
    ) -> None:
        """Order copies on a stream. Raises CudaError."""
        ...


CopyTable = Mapping[Mode, int]
"""The smallest pages, in bytes, that the copy engines move faster than the kernel does. In a
direction that is not in it the kernel moves all pages."""


def split(table: CopyTable, mode: Mode, part: Part) -> tuple[Part, Part]:
    """Return the part for the kernel and the part for the copy engines, which may have no jobs."""
    is_copied = part.rows[:, Field.NUM_ROWS] == 1
    is_copied &= part.rows[:, Field.ROW_BYTES] >= table.get(mode, math.inf)
    return _of_jobs(part, ~is_copied), _of_jobs(part, is_copied)


def plan_copies(
    parts: Iterable[Part], arena_address: int, num_batches: int = 1, cut_bytes: int = PIECE_BYTES
) -> list[Copies]:
    """Return the copies of each batch.

    A copy must lie in one pinned piece of the arena: it is cut where one ends, at multiples of
    `cut_bytes` from `arena_address`. Raises ValueError if pages are not contiguous.
    """
    batches: list[list[Copies]] = [[] for _ in range(num_batches)]
    for part in parts:
        for batch, copies in _copies(part):
            batches[batch].append(_cut(copies, arena_address, cut_bytes))
    return [Copies(*map(np.concatenate, zip(_NONE, *x, strict=True))) for x in batches]


def copy_pages(copier: BatchCopier, mode: Mode, copies: Copies, stream: int) -> None:
    """Order copies on a stream, which is not the default one. Raises CudaError."""
    if mode is Mode.LOAD:  # a sealed artifact does not change any more
        targets, sources = copies.in_pages, copies.in_artifacts
    else:
        targets, sources = copies.in_artifacts, copies.in_pages
    is_stable = mode is Mode.LOAD
    copier.copy_batch(targets, sources, copies.sizes, stream, is_source_stable=is_stable)


def measure_copy_table(device: torch.device) -> CopyTable:
    """Measure the table of a CUDA device; takes about a second and 128 MiB there.

    It is empty if the driver copies no batches. Raises RuntimeError, as CUDA's calls do.
    """
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    driver = Driver.open(torch.cuda.current_device() if device.index is None else device.index)
    if not driver.can_copy_batches:
        return {}
    with torch.cuda.stream(stream):
        return compare(PageMover(device), driver, device, stream.cuda_stream, stream.synchronize)


def compare(
    mover: PageMover,
    copier: BatchCopier,
    device: torch.device,
    stream: int,
    finish: Callable[[], None],
    *,
    page_sizes: Sequence[int] = PAGE_SIZES,
    total_bytes: int = _TOTAL_BYTES,
    clock: Callable[[], float] = time.perf_counter,
) -> CopyTable:
    """Move pages of several sizes in both ways and return from which size on copies are faster.

    `stream`: torch's current one; `finish` waits for it. A time is the best of a few rounds, with
    the CPU time to order the copies.
    """
    arena = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    memory = torch.zeros(2 * total_bytes, dtype=torch.uint8, device=device)

    def seconds(move: Callable[[], None]) -> float:
        times = []
        for _ in range(_ROUNDS):
            finish()
            started_s = clock()
            move()
            finish()
            times.append(clock() - started_s)
        return min(times)

    def is_copy_faster(mode: Mode, page_bytes: int) -> bool:
        part = _scattered(memory, arena, page_bytes)

        def by_kernel() -> None:
            moves = plan_moves([part])
            mover.launch(mode, moves, mover.upload(moves))

        def by_copies() -> None:
            (copies,) = plan_copies([part], arena.data_ptr())
            copy_pages(copier, mode, copies, stream)

        return seconds(by_copies) < seconds(by_kernel)

    table: dict[Mode, int] = {}
    for mode in (Mode.LOAD, Mode.SAVE):
        for page_bytes in sorted(page_sizes, reverse=True):
            if not is_copy_faster(mode, page_bytes):
                break
            table[mode] = page_bytes
    return table


_NONE = Copies(*(np.empty(0, np.int64) for _ in Copies._fields))


def _of_jobs(part: Part, is_wanted: npt.NDArray[np.bool_]) -> Part:
    tiles = [tile for tile, wanted in zip(part.tiles, is_wanted, strict=True) if wanted]
    return part._replace(
        rows=part.rows[is_wanted],
        tiles=tiles,
        ids_of_job=part.ids_of_job[is_wanted],
        batch_of_job=part.batch_of_job[is_wanted],
    )


def _copies(part: Part) -> Iterator[tuple[int, Copies]]:
    """Yield the copies of jobs that have the batch and the block ids in common."""
    if (part.rows[:, Field.NUM_ROWS] != 1).any():
        raise ValueError("only contiguous pages can be copied in one piece each")
    alike = np.stack([part.batch_of_job, part.ids_of_job])
    for batch, group in np.unique(alike, axis=1).T.tolist():
        rows = part.rows[(alike == [[batch], [group]]).all(0)].T[:, :, None]
        ids = part.block_ids[group]
        artifact, page = np.nonzero(ids)
        in_pages = rows[Field.ADDRESS] + rows[Field.BLOCK_STRIDE] * ids[artifact, page]
        in_artifacts = rows[Field.OFFSET] + rows[Field.PITCH] * page + part.addresses[artifact]
        sizes = np.repeat(rows[Field.ROW_BYTES], len(page))
        yield batch, Copies(in_pages.reshape(-1), in_artifacts.reshape(-1), sizes)


def _cut(copies: Copies, arena_address: int, cut_bytes: int) -> Copies:
    """Cut copies where a pinned piece ends."""
    room = cut_bytes - (copies.in_artifacts - arena_address) % cut_bytes
    crosses = room < copies.sizes
    if not crosses.any():
        return copies
    firsts = copies._replace(sizes=np.minimum(copies.sizes, room))
    rests = Copies(copies.in_pages + room, copies.in_artifacts + room, copies.sizes - room)
    rests = Copies(*(column[crosses] for column in rests))
    return Copies(
        *map(np.concatenate, zip(firsts, _cut(rests, arena_address, cut_bytes), strict=True))
    )


def _scattered(memory: torch.Tensor, arena: torch.Tensor, page_bytes: int) -> Part:
    """Return a page of each layer for each artifact, in random order; half of `memory` is used.

    There are as many layers as one launch has while a forward runs: with fewer, the kernel has
    fewer programs.
    """
    num_layers = min(_LAYERS, arena.numel() // page_bytes)
    count = arena.numel() // page_bytes // num_layers
    layers = memory.view(num_layers, -1, page_bytes)
    ids = 1 + np.random.default_rng(0).permutation(layers.shape[1] - 1)[:count]
    addresses = arena.data_ptr() + num_layers * page_bytes * np.arange(count)
    jobs = [Job(PageLayout.of(x), n * page_bytes, page_bytes, 1) for n, x in enumerate(layers)]
    none = np.zeros(num_layers, np.int64)
    tiles = [job.tile(alignment_of(addresses)) for job in jobs]
    return Part(np.array([x.row() for x in jobs]), tiles, none, [ids[:, None]], addresses, none)
