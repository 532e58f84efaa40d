"""Common parts of the checks: sizes, the pinned arena, movers, results, times on a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from heterocache_cuda import kernels
from heterocache_cuda.batched import BatchCopier
from heterocache_cuda.driver import CudaError
from heterocache_cuda.mover import LAUNCH_SIZES, LaunchSizes, PageMover
from heterocache_cuda.pinned import PIECE_BYTES, HostRegistration, PinnedArena

from benchmarks.measure import Samples
from hetero_connector.store.arena import Arena, ArenaHandle
from hetero_connector.units import GIB, MIB, size_text

KIB = 1 << 10


@dataclass(frozen=True)
class Sizes:
    """The bytes that a check copies, and the work that it computes."""

    copy_bytes: int
    """A measured copy: several times the cache of the GPU."""
    layers: int
    artifact_pages: int
    pieces: tuple[int, ...]
    """Bytes of a page."""
    engines_from: int
    """Pages from this size on are also moved by copy engines; smaller ones would be too many."""
    programs: tuple[int, ...]
    tile_words: tuple[int, ...]
    num_warps: tuple[int, ...]
    turns: int
    page: tuple[int, int, int, int]
    """Layers, blocks, heads and tokens of the exactness checks."""
    matrix: int
    """Rows and columns of the matrix product."""
    products: int
    """Matrix products in one measurement."""
    copies: int
    """Launches that together outlast these products."""
    replays: int
    """Replays of a captured graph."""
    spin_cycles: int
    pinned_bytes: tuple[int, ...]

    @property
    def arena_bytes(self) -> int:
        return 2 * self.copy_bytes


FULL = Sizes(
    copy_bytes=256 * MIB,
    layers=8,
    artifact_pages=16,
    pieces=(512, KIB, 2 * KIB, 4 * KIB, 8 * KIB, 16 * KIB, 32 * KIB, 64 * KIB, 256 * KIB),
    engines_from=4 * KIB,
    programs=(8, 24, 48, 96, 192, 384),
    tile_words=(512, 1024, 2048),
    num_warps=(4, 8, 16),
    turns=7,
    page=(3, 40, 4, 16),
    matrix=8192,
    products=8,
    copies=12,
    replays=50,
    spin_cycles=2_000_000_000,
    pinned_bytes=(256 * MIB, GIB, 4 * GIB),
)
SMALL = Sizes(
    copy_bytes=64 * KIB,
    layers=2,
    artifact_pages=2,
    pieces=(512, 16 * KIB),
    engines_from=16 * KIB,
    programs=(4, 96),
    tile_words=(1024,),
    num_warps=(8,),
    turns=2,
    page=(2, 6, 2, 4),
    matrix=16,
    products=2,
    copies=2,
    replays=3,
    spin_cycles=1_000_000,
    pinned_bytes=(2 * MIB,),
)
"""For the dry run, and for compute-sanitizer, which makes kernels much slower."""


class Verdict(StrEnum):
    """The end of a check."""

    PASS = "PASS"
    FAIL = "FAIL"
    NOT_RUN = "NOT RUN"


@dataclass(frozen=True)
class Result:
    """The findings of one check."""

    verdict: Verdict
    summary: str
    """One line."""
    tables: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


def verdict(passed: bool) -> Verdict:
    return Verdict.PASS if passed else Verdict.FAIL


class GpuDriver(BatchCopier, HostRegistration, Protocol):
    """The calls of `heterocache_cuda.driver.Driver`."""

    @property
    def can_copy_batches(self) -> bool: ...


class Setting:
    """One device and one pinned arena."""

    def __init__(
        self,
        device: torch.device,
        sizes: Sizes,
        arena: Arena,
        driver: GpuDriver,
        move_kernel: Any = kernels.move_pages,
    ) -> None:
        self.device = device
        self.sizes = sizes
        self.arena = arena
        self.driver = driver
        self._move_kernel = move_kernel

    def mover(self, sizes: LaunchSizes = LAUNCH_SIZES) -> PageMover:
        return PageMover(self.device, self._move_kernel, sizes)

    @property
    def host(self) -> torch.Tensor:
        """The arena, `[bytes] uint8`."""
        return torch.from_numpy(self.arena.view)

    def random_bytes(self, size_bytes: int, seed: int) -> torch.Tensor:
        """Return `[size_bytes] uint8` on the device."""
        return torch.from_numpy(random_bytes(size_bytes, seed)).to(self.device, copy=True)


def random_bytes(size_bytes: int, seed: int) -> npt.NDArray[np.uint8]:
    """Return random bytes, 0 not among them: a byte that was not written is noticed."""
    return np.random.default_rng(seed).integers(1, 256, size_bytes, np.uint8)


@contextmanager
def pinned_arena(
    size_bytes: int, driver: GpuDriver, handle: ArenaHandle | None = None
) -> Iterator[Arena]:
    """Make an arena, or attach the one of `handle`, and pin it. Raises CudaError."""
    arena = Arena.attach(handle) if handle else Arena.create(size_bytes)
    try:
        pinned = pin(arena, driver)
        yield arena
        torch.cuda.synchronize()
        pinned.close()
    finally:
        arena.close()


def pin(arena: Arena, driver: GpuDriver, piece_bytes: int = PIECE_BYTES) -> PinnedArena:
    """Pin an arena in pieces. Raises CudaError."""
    pinned = PinnedArena.pin(arena.view, driver, piece_bytes=piece_bytes)
    if not pinned.is_complete:
        raise CudaError(f"an arena of {size_text(arena.view.nbytes)} cannot be pinned")
    return pinned


def times_by_turns(
    jobs: Mapping[str, Callable[[], object]], turns: int, stream: torch.cuda.Stream
) -> Samples:
    """Return the seconds of each job on the stream, by turns, after one run of each unmeasured."""
    samples = Samples()
    for turn in range(turns + 1):
        for name, job in jobs.items():
            seconds = time_on(stream, job)
            if turn:
                samples.add(name, seconds)
    return samples


def time_on(stream: torch.cuda.Stream, job: Callable[[], object]) -> float:
    """Return the seconds of what the job issues on the stream. The device is idle before."""
    torch.cuda.synchronize()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.stream(stream):
        stream.record_event(first)
        job()
        stream.record_event(last)
    last.synchronize()
    return 1e-3 * float(first.elapsed_time(last))


def size_name(size_bytes: int) -> str:
    """Return `512B` or `16K`."""
    return f"{size_bytes // KIB}K" if size_bytes >= KIB else f"{size_bytes}B"
