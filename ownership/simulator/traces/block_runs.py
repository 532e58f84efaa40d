"""The block ids of a prompt, run-length coded.

A prompt of 100,000 tokens has 1,500 blocks but rarely more than a few runs of consecutive ids.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class BlockRuns:
    """Ids of a prompt's blocks in order, as `(first id, number of ids)` runs.

    An id names a prefix: two prompts of a trace have the same id at a place if and only if all
    their blocks up to there are equal (the readers ensure it). No run is empty, and none continues
    the run before it; so equal prompts have equal runs.
    """

    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_runs(cls, runs: Iterable[tuple[int, int]]) -> BlockRuns:
        """Make it from runs that may be empty or continue each other."""
        merged: list[tuple[int, int]] = []
        for first, count in runs:
            if merged and merged[-1][0] + merged[-1][1] == first:
                merged[-1] = (merged[-1][0], merged[-1][1] + count)
            elif count:
                merged.append((first, count))
        return cls(tuple(merged))

    @classmethod
    def of_ids(cls, ids: Iterable[int]) -> BlockRuns:
        """Make it from single ids, none of which is negative."""
        runs, first, last = [], 0, -2
        for block in ids:
            if block != last + 1:
                if last >= 0:
                    runs.append((first, last + 1 - first))
                first = block
            last = block
        if last >= 0:
            runs.append((first, last + 1 - first))
        return cls(tuple(runs))

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        blocks = 0
        for _, count in self.runs:  # a loop is faster than a sum of so few
            blocks += count
        return blocks

    def ids(self) -> npt.NDArray[np.int64]:
        """Return every id (`[num_blocks] int64`), in a new array."""
        if not self.runs:
            return np.empty(0, dtype=np.int64)
        runs = np.asarray(self.runs, dtype=np.int64)
        ends = np.cumsum(runs[:, 1])
        ids = np.arange(ends[-1], dtype=np.int64)
        ids += np.repeat(runs[:, 0] - (ends - runs[:, 1]), runs[:, 1])
        return ids

    def shared_with(self, other: BlockRuns) -> int:
        """Return the number of leading blocks that both prompts share."""
        shared = 0
        for (first, count), (other_first, other_count) in zip(self.runs, other.runs, strict=False):
            if first != other_first:
                break
            shared += min(count, other_count)
            if count != other_count:
                break
        return shared

    def head(self, num_blocks: int) -> BlockRuns:
        """Return the first `num_blocks` blocks, or all if there are fewer."""
        kept: list[tuple[int, int]] = []
        for first, count in self.runs:
            if count >= num_blocks:
                if num_blocks > 0:
                    kept.append((first, num_blocks))
                break
            kept.append((first, count))
            num_blocks -= count
        return BlockRuns(tuple(kept))

    def tail(self, skipped_blocks: int) -> BlockRuns:
        """Return the blocks after the first `skipped_blocks`."""
        for at, (first, count) in enumerate(self.runs):
            if skipped_blocks < count:
                cut = (first + skipped_blocks, count - skipped_blocks)
                return BlockRuns((cut, *self.runs[at + 1 :]))
            skipped_blocks -= count
        return BlockRuns()

    def shifted(self, by: int) -> BlockRuns:
        """Return blocks with ids that are greater by `by`."""
        return BlockRuns(tuple((first + by, count) for first, count in self.runs))
