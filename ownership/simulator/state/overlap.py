"""How much of what is held is held twice."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.traces.block_runs import BlockRuns


class ChunkSet:
    """Chunks as runs of ids, 16 bytes each; counted when asked."""

    def __init__(self) -> None:
        self._firsts, self._counts = array("q"), array("q")

    def add(self, chain: BlockRuns) -> None:
        """A prompt's chunks."""
        for first, count in chain.runs:
            self._firsts.append(first)
            self._counts.append(count)

    @classmethod
    def of(cls, tiers: Iterable[ResidentChunks]) -> ChunkSet:
        """What tiers hold."""
        chunks = cls()
        for tier in tiers:
            for run in tier.runs():
                chunks._firsts.append(run.first)
                chunks._counts.append(run.count)
        return chunks

    @property
    def total(self) -> int:
        """Each as often as it was added."""
        return sum(self._counts)

    def distinct(self) -> int:
        """Each once. O(n log n) in the number of runs."""
        if not self._firsts:
            return 0
        firsts = np.frombuffer(self._firsts, np.int64)
        ends = firsts + np.frombuffer(self._counts, np.int64)
        order = np.argsort(firsts, kind="stable")
        firsts, ends = firsts[order], ends[order]
        reached = np.maximum.accumulate(np.concatenate([firsts[:1], ends[:-1]]))
        return int(np.maximum(ends - np.maximum(firsts, reached), 0).sum())


def duplicate_factor(tiers: Iterable[ResidentChunks]) -> float:
    """Chunks held over distinct chunks held; 1 where nothing is."""
    held = ChunkSet.of(tiers)
    return held.total / held.distinct() if held.total else 1.0
