"""A worker's writes to SSD, one after the other. What is not down when it dies was never there."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ownership.simulator.machine.channel import Channel
from ownership.simulator.state.gapped import GappedChunks
from ownership.simulator.traces.block_runs import BlockRuns


class _Write(NamedTuple):
    """New chunks of a chain, behind `first` others, and checkpoints on the way."""

    begin_s: float
    end_s: float
    chain: BlockRuns
    first: int
    chunks: int
    checkpoints: Sequence[int]

    def down(self, now_s: float) -> tuple[int, Sequence[int]]:
        """The chain's chunks on SSD by now, and the checkpoints that are not."""
        down = self.first
        if now_s > self.begin_s:
            share = (now_s - self.begin_s) / (self.end_s - self.begin_s)
            down += int(self.chunks * share)
        if not self.chunks:
            return down, self.checkpoints
        return down, [boundary for boundary in self.checkpoints if boundary > down]


class SsdWrites:
    """Writes under way. A tier holds what is written to it from the start: its slot is taken."""

    def __init__(self, bandwidth: float) -> None:
        """`bandwidth`: bytes per second."""
        self._bandwidth = bandwidth
        self._channel = Channel()
        self._under_way: deque[_Write] = deque()

    def start(
        self, now_s: float, size_bytes: int, chain: BlockRuns, first: int, chunks: int,
        checkpoints: Sequence[int],
    ) -> None:  # fmt: skip
        """Write `chunks` chunks of a chain behind its first ones, and those checkpoints."""
        under_way = self._under_way
        while under_way and under_way[0].end_s <= now_s:
            under_way.popleft()
        begin_s = now_s + self._channel.pending_s(now_s)
        end_s = self._channel.start(now_s, size_bytes / self._bandwidth, size_bytes)
        if end_s > now_s:
            under_way.append(_Write(begin_s, end_s, chain, first, chunks, checkpoints))

    def lose(self, now_s: float, ssd: GappedChunks) -> None:
        """The process dies: what is not down is not found on SSD afterwards."""
        for write in self._under_way:
            if write.end_s > now_s:
                ssd.forget(write.chain, *write.down(now_s))
        self._under_way.clear()
        self._channel.cut(now_s)
