"""Move many layers' pages by one launch.

A *job* is the pages of one layer in artifacts of one shape. The jobs of a step, the block ids and
the artifacts' addresses reach the device by one copy; each launch then takes a range of jobs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from math import gcd
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton.language as tl

from heterocache_cuda import kernels
from heterocache_cuda.layout import PageLayout

Int64Array = npt.NDArray[np.int64]

FIELDS = int(kernels.FIELDS.value)
TILE_WORDS = 1024
_MOST_JOBS = 65_535
UPLOADS = {1 << n: min(32, max(2, 1 << 20 >> n)) for n in range(7, 21)}
"""Uploads that may be under way at a time, by their bytes, which torch rounds up to powers of two.
Small ones are a save of eight layers each, in several steps; the largest has the block ids of two
million tokens."""
ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@dataclass(frozen=True)
class LaunchSizes:
    """The share of the GPU that a launch takes. A benchmark compares others with these."""

    programs: int = 32
    """Programs of a launch, if it has fewer jobs. Each has one tile of 8 KiB under way, about 2.5
    GB/s, and a link of 50 GB/s needs twenty. More would take multiprocessors from the model."""
    most_programs_per_job: int = 16
    num_warps: int = 8
    """Warps of each program."""
    max_registers: int = 128
    """Registers of a thread. Without a limit ptxas aims at more programs on a multiprocessor than
    there are, and spills registers for it."""

    def programs_per_job(self, num_jobs: int) -> int:
        """Return the first dimension of the grid."""
        return max(1, min(self.most_programs_per_job, self.programs // num_jobs))

    @property
    def options(self) -> dict[str, int]:
        """Options of Triton that belong to the variant of a kernel."""
        return {"num_warps": self.num_warps, "maxnreg": self.max_registers}


LAUNCH_SIZES = LaunchSizes()


class Mode(IntEnum):
    """The direction of a move."""

    LOAD = kernels.LOAD.value
    SAVE = kernels.SAVE.value
    CLEAR = kernels.CLEAR.value


class Tile(NamedTuple):
    """The variant of the kernel: the bytes that a program moves at a time."""

    alignment: int
    """Bytes that divide all addresses; 16 where possible."""
    rows: int
    words: int
    """Elements of `min(8, alignment)` bytes in a row."""

    @property
    def element_bytes(self) -> int:
        """Bytes of an element. Two neighbours make an access of 16 bytes."""
        return min(8, self.alignment)

    @classmethod
    def of(cls, row_bytes: int, alignment: int, num_words: int = TILE_WORDS) -> Tile:
        """Return the variant for such rows. `num_words`: elements of the tile."""
        words = min(num_words, _power_of_two(row_bytes // min(8, alignment)))
        return cls(alignment, num_words // words, words)


@dataclass(frozen=True)
class Job:
    """The pages of one layer, or a part of each, in artifacts of one shape."""

    pages: PageLayout
    offset: int
    """Bytes from an artifact's start to the first page's part."""
    pitch: int
    """Bytes from one page to the next in an artifact."""
    artifact_pages: int
    """Pages in each artifact."""

    def tile(self, addresses_alignment: int) -> Tile:
        """Return the variant, for artifacts at addresses of this alignment."""
        alignment = gcd(self.pages.alignment, self.offset, self.pitch, addresses_alignment)
        return Tile.of(self.pages.row_bytes, alignment)

    def row(self) -> list[int]:
        """Return the job's values for the kernel, without its place in the index arrays."""
        pages = self.pages
        place = [0, 0, 0]
        return [
            *(pages.address, pages.block_stride, self.offset, self.pitch, *place),
            *(self.artifact_pages, pages.row_bytes, pages.num_rows, *pages.rows[1:]),
            *(*pages.strides, 0),
        ]


class Field(IntEnum):
    """The place of a value in `Job.row` that is read or set outside the kernel."""

    ADDRESS = 0
    BLOCK_STRIDE = 1
    OFFSET = 2
    PITCH = 3
    FIRST_ID = 4
    FIRST_ARTIFACT = 5
    NUM_PAGES = 6
    ARTIFACT_PAGES = 7
    ROW_BYTES = 8
    NUM_ROWS = 9


class Part(NamedTuple):
    """Jobs that share artifacts, with their pages."""

    rows: Int64Array
    """`[jobs, FIELDS]`, from `Job.row`."""
    tiles: Sequence[Tile]
    """One for each job."""
    ids_of_job: Int64Array
    """`[jobs]`: index in `block_ids`."""
    block_ids: Sequence[Int64Array]
    """Each `[artifacts, pages]`; id 0 leaves the page alone. Jobs of one group share an array."""
    addresses: Int64Array
    """`[artifacts]`: addresses of the artifacts."""
    batch_of_job: Int64Array
    """`[jobs]`: the number of the batch that moves it, from 0."""


class Launch(NamedTuple):
    """A range of jobs with one variant of the kernel."""

    tile: Tile
    first: int
    stop: int


class Moves(NamedTuple):
    """Everything that the launches of one step need, in host memory."""

    data: Int64Array
    """The jobs, the block ids and the addresses, one after the other."""
    ids_at: int
    addresses_at: int
    batches: list[list[Launch]]


def plan_moves(parts: Iterable[Part], num_batches: int = 1) -> Moves:
    """Join parts into moves: within a batch, jobs with the same variant are one launch."""
    rows: list[Int64Array] = []
    ids: list[Int64Array] = []
    addresses: list[Int64Array] = []
    order: list[tuple[int, Tile]] = []
    """The batch and the variant of each job."""
    first_id = first_address = 0
    for part in parts:
        starts = first_id + np.cumsum([0] + [x.size for x in part.block_ids], dtype=np.int64)
        own = part.rows.copy()
        own[:, Field.FIRST_ID] = starts[part.ids_of_job]
        own[:, Field.FIRST_ARTIFACT] = first_address
        sizes = np.array([x.size for x in part.block_ids], dtype=np.int64)
        own[:, Field.NUM_PAGES] = sizes[part.ids_of_job]
        rows.append(own)
        order += zip(part.batch_of_job.tolist(), part.tiles, strict=True)
        ids += [x.reshape(-1) for x in part.block_ids]
        addresses.append(part.addresses)
        first_id, first_address = int(starts[-1]), first_address + len(part.addresses)
    batches: list[list[Launch]] = [[] for _ in range(num_batches)]
    by_launch = sorted(range(len(order)), key=order.__getitem__)
    for (batch, tile), group in groupby(enumerate(by_launch), lambda x: order[x[1]]):
        places = [place for place, _ in group]
        batches[batch].append(Launch(tile, places[0], places[-1] + 1))
    table = np.concatenate(rows)[by_launch] if rows else np.empty((0, FIELDS), np.int64)
    sections = [table.reshape(-1), _padded(ids), _padded(addresses)]
    ids_at = len(sections[0])
    return Moves(np.concatenate(sections), ids_at, ids_at + len(sections[1]), batches)


class PageMover:
    """Launches moves on one device, on torch's current stream."""

    def __init__(
        self,
        device: torch.device,
        kernel: Any = kernels.move_pages,
        sizes: LaunchSizes = LAUNCH_SIZES,
    ) -> None:
        """`kernel`: another way to run it, such as Triton's interpreter."""
        self._device = device
        self._kernel = kernel
        self._sizes = sizes

    def warm_up(self, tiles: Iterable[Tile]) -> None:
        """Compile the variants of these tiles by launches without pages. It takes seconds.

        Else the first request with such pages would wait for the compiler.
        """
        no_pages = torch.zeros(FIELDS, dtype=torch.int64, device=self._device)
        for tile in set(tiles):
            for mode in Mode:
                self._run((1, 1), no_pages, no_pages, no_pages, mode, tile)

    def reserve_uploads(self) -> None:
        """Reserve memory for uploads on the current stream: 8 MiB here and on the device.

        Torch would ask the driver for it at the first upload of each size, which may wait for the
        device. It keeps what is released here.
        """
        if self._device.type == "cpu":
            return
        sizes = [size for size, count in UPLOADS.items() for _ in range(count)]
        places: list[dict[str, Any]] = [{"pin_memory": True}, {"device": self._device}]
        for place in places:
            # All at a time, so that each is memory of its own.
            _ = [torch.empty(size, dtype=torch.uint8, **place) for size in sizes]

    def upload(self, moves: Moves) -> torch.Tensor:
        """Copy the moves' data to the device, without waiting."""
        data = torch.from_numpy(moves.data)
        if self._device.type == "cpu":
            return data
        return data.pin_memory().to(self._device, non_blocking=True)

    def launch(self, mode: Mode, moves: Moves, data: torch.Tensor, batch: int = 0) -> None:
        """Issue the launches of one batch. `data` is what `upload` returned."""
        for tile, first, stop in _within_a_grid(moves.batches[batch]):
            self._run(
                (self._sizes.programs_per_job(stop - first), stop - first),
                data[first * FIELDS :],
                data[moves.ids_at :],
                data[moves.addresses_at :],
                mode,
                tile,
            )

    def _run(
        self,
        grid: tuple[int, int],
        jobs: torch.Tensor,
        block_ids: torch.Tensor,
        addresses: torch.Tensor,
        mode: Mode,
        tile: Tile,
    ) -> None:
        self._kernel[grid](
            jobs,
            block_ids,
            addresses,
            MODE=int(mode),
            ELEMENT=ELEMENTS[tile.element_bytes],
            ALIGNMENT=tile.alignment,
            ROWS=tile.rows,
            WORDS=tile.words,
            **self._sizes.options,
        )


def _within_a_grid(launches: Iterable[Launch]) -> Iterator[Launch]:
    """Yield the launches, cut where they have more jobs than a grid's second dimension."""
    for tile, first, stop in launches:
        for start in range(first, stop, _MOST_JOBS):
            yield Launch(tile, start, min(stop, start + _MOST_JOBS))


def alignment_of(addresses: Int64Array) -> int:
    """Return the largest power of two up to 16 that divides all addresses."""
    return gcd(16, int(np.bitwise_or.reduce(addresses, initial=0)))


def _padded(arrays: Sequence[Int64Array]) -> Int64Array:
    """Join arrays to one of even length: Triton compiles another variant for odd addresses."""
    total = sum(map(len, arrays))
    fill = np.zeros(total % 2, np.int64)
    return np.concatenate([*arrays, fill])


def _power_of_two(number: int) -> int:
    return 1 << (max(1, number) - 1).bit_length()
