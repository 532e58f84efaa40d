"""Move pages by way of a small pinned buffer, where the arena could not be pinned."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from heterocache_cuda.layout import WIDEST_ACCESS
from heterocache_cuda.mover import Field, Int64Array, Mode, PageMover, Part, plan_moves

BUFFER_BYTES = 64 << 20


class BounceBuffer:
    """Moves pages through a buffer that the device can read; each call waits for the device.

    The host copies just the bytes of this rank, so the buffer holds them without gaps.
    """

    def __init__(
        self,
        mover: PageMover,
        arena: npt.NDArray[np.uint8],
        buffer: torch.Tensor,
        finish: Callable[[], None],
    ) -> None:
        """`arena`, `buffer`: `[size_bytes] uint8`. `finish`: wait for the current stream."""
        self._mover = mover
        self._arena = arena
        self._buffer = buffer
        self._bytes = buffer.numpy()
        self._finish = finish

    @classmethod
    def open(
        cls, mover: PageMover, arena: npt.NDArray[np.uint8], largest_artifact_bytes: int
    ) -> BounceBuffer:
        """Make one for the current CUDA device. RuntimeError if not even this can be pinned."""
        size = max(BUFFER_BYTES, 2 * largest_artifact_bytes)
        buffer = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return cls(mover, arena, buffer, lambda: torch.cuda.current_stream().synchronize())

    def move(self, mode: Mode, part: Part) -> None:
        """Move the pages of a part on the current stream; they are moved when this returns.

        Raises ValueError if the part of one artifact is larger than the buffer.
        """
        rows, artifact_bytes = _packed(part.rows)
        at_a_time = len(self._bytes) // artifact_bytes
        if not at_a_time:
            raise ValueError(
                f"{artifact_bytes} bytes of an artifact do not go through a buffer of "
                f"{len(self._bytes)} bytes"
            )
        for first in range(0, len(part.addresses), at_a_time):
            group = part._replace(
                block_ids=[ids[first : first + at_a_time] for ids in part.block_ids],
                addresses=part.addresses[first : first + at_a_time],
                batch_of_job=np.zeros_like(part.batch_of_job),
            )
            places = artifact_bytes * np.arange(len(group.addresses), dtype=np.int64)
            inside = group._replace(rows=rows, addresses=self._buffer.data_ptr() + places)
            if mode is Mode.LOAD:
                self._copy(mode, group, rows, places)
            moves = plan_moves([inside])
            self._mover.launch(mode, moves, self._mover.upload(moves))
            self._finish()
            if mode is Mode.SAVE:
                self._copy(mode, group, rows, places)

    def _copy(self, mode: Mode, group: Part, rows: Int64Array, places: Int64Array) -> None:
        """Copy between the arena and the buffer. Bytes of pages with id 0 are not saved."""
        starts = group.addresses - self._arena.ctypes.data
        for job, (row, in_buffer) in enumerate(zip(group.rows, rows, strict=True)):
            ids = group.block_ids[group.ids_of_job[job]]
            for number, (start, place) in enumerate(zip(starts, places, strict=True)):
                there = _pages(self._arena, start, row)
                here = _pages(self._bytes, place, in_buffer)
                if mode is Mode.LOAD:
                    here[:] = there
                else:
                    is_saved = ids[number] != 0
                    there[is_saved] = here[is_saved]


def _packed(rows: Int64Array) -> tuple[Int64Array, int]:
    """Return the jobs of artifacts that have no other bytes, and the size of such an artifact."""
    page_bytes = rows[:, Field.ROW_BYTES] * rows[:, Field.NUM_ROWS]
    sizes = rows[:, Field.ARTIFACT_PAGES] * page_bytes
    ends = np.cumsum(-(-sizes // WIDEST_ACCESS) * WIDEST_ACCESS)
    packed = rows.copy()
    packed[:, Field.OFFSET] = np.concatenate([[0], ends[:-1]])
    packed[:, Field.PITCH] = page_bytes
    return packed, int(ends[-1])


def _pages(memory: npt.NDArray[np.uint8], start: int, row: Int64Array) -> npt.NDArray[np.uint8]:
    """Return a job's pages in the artifact at `start`: `[pages, page_bytes]`, not copied."""
    pages, pitch = row[Field.ARTIFACT_PAGES], row[Field.PITCH]
    page_bytes = row[Field.ROW_BYTES] * row[Field.NUM_ROWS]
    first = start + row[Field.OFFSET]
    whole = memory[first : first + (pages - 1) * pitch + page_bytes]
    return np.lib.stride_tricks.as_strided(whole, (pages, page_bytes), (pitch, 1))
