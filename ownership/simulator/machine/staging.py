"""Reads from a worker's SSD into its DRAM, and the requests that wait for them.

As in the engine's store, the room of a read is taken when it begins and what it reads is there when
it has ended. A request that wants what is being read waits for the same read. A read keeps what it
continues in DRAM, and what it reads on the SSD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ownership.scheduling.footprint import TierPace
from ownership.simulator.machine.channel import Channel, Flow
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.state.memory import WorkerMemory
from ownership.simulator.state.restoring import Restore
from ownership.simulator.state.runs import Match, Run
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(slots=True, eq=False)
class SsdRead:
    """One read. The chunks that it continues are in DRAM, or in reads that end before it."""

    chain: BlockRuns
    """The chunks up to the last one that is read."""
    first: int
    """Number of chunks before those that are new in DRAM. Of these, what its request has in pages
    is added without a read."""
    chunks: int
    """Number of chunks that are read: the last ones."""
    checkpoints: Sequence[int]
    """Boundaries whose checkpoint is read."""
    end_s: float
    seconds: float
    """Duration without the reads before it."""
    reserved_bytes: int
    """Room taken in DRAM: less than what is read if there was no more."""
    continues: Run
    """A pinned run in DRAM."""
    origin: Run
    """A pinned run on the SSD."""
    waiters: list[LiveRequest] = field(default_factory=list)
    """In the order in which they came."""


class SsdReads:
    """The reads of one worker that are under way."""

    def __init__(self, memory: WorkerMemory, channel: Channel, flow: Flow, pace: TierPace) -> None:
        """`flow`: counts what is read."""
        self._memory, self._channel, self._flow, self._pace = memory, channel, flow, pace
        self._reads: list[SsdRead] = []

    def ahead_s(self, chain: BlockRuns, now_s: float) -> float:
        """Return the seconds until the SSD could read for a request with this chain.

        As in an engine, what is being read of the chain itself is no queue: it would be shared.
        """
        ahead_s = self._channel.pending_s(now_s)
        for read in self._reads:
            end = read.chain.shared_with(chain)
            chunks = max(0, end - (read.chain.num_blocks - read.chunks))
            checkpoints = sum(boundary <= end for boundary in read.checkpoints)
            if chunks or checkpoints:
                left_s = min(read.seconds, read.end_s - now_s)
                ahead_s -= min(self._seconds(chunks, checkpoints), left_s)
        return max(0.0, ahead_s)

    def wait(
        self, request: LiveRequest, restore: Restore, in_dram: Match, on_ssd: Match,
        local_chunks: int, now_s: float, begin: Callable[[SsdRead], None],
    ) -> None:  # fmt: skip
        """Let a request wait for what its restore needs from the SSD.

        `in_dram`, `on_ssd`: its prompt there. `begin` is called with a read of what no other read
        brings; `end` has to be called when that has ended.
        """
        last, boundary = restore.stored_chunks, restore.boundary_chunks
        first, lacks_checkpoint = in_dram.chunks, restore.ssd_checkpoints > 0
        joined: list[SsdRead] = []
        for read in self._reads:
            end = min(read.chain.shared_with(request.chain), last)
            brings = end > max(read.first, in_dram.chunks)
            if brings:
                first = max(first, end)
            has_checkpoint = lacks_checkpoint and end >= boundary and boundary in read.checkpoints
            if has_checkpoint or (brings and end > local_chunks):
                joined.append(read)
                lacks_checkpoint = lacks_checkpoint and not has_checkpoint
        chunks = max(0, last - max(first, local_chunks))
        if chunks or lacks_checkpoint:
            checkpoints = [boundary] if lacks_checkpoint else []
            read = self._started(request.chain.head(last), chunks, min(first, last), checkpoints,
                                 in_dram, on_ssd, now_s)  # fmt: skip
            joined.append(read)
            begin(read)
        read = max(joined, key=lambda read: read.end_s)
        read.waiters.append(request)
        request.was_staged, request.staged_chunks = True, restore.ssd_chunks
        request.waited_s += now_s - request.queued_s
        request.staged_s += read.end_s - now_s

    def end(self, read: SsdRead) -> list[LiveRequest]:
        """Add to DRAM what was read; return the requests that have waited for it."""
        dram, ssd = self._memory.dram, self._memory.ssd
        self._reads.remove(read)
        dram.release(read.reserved_bytes)
        if dram.match(read.chain).chunks >= read.first:
            chunks, tick = read.chain.num_blocks, self._memory.next_tick()
            dram.add(read.chain, chunks, read.checkpoints, tick)
        for later in self._reads:
            if later.first > read.first and later.chain.shared_with(read.chain) > read.first:
                before, later.continues = later.continues, self._pinned(later.chain, later.first)
                dram.unpin(before)
        dram.unpin(read.continues)
        ssd.unpin(read.origin)
        return read.waiters

    def _started(
        self, chain: BlockRuns, chunks: int, first: int, checkpoints: Sequence[int],
        in_dram: Match, on_ssd: Match, now_s: float,
    ) -> SsdRead:  # fmt: skip
        """Begin to read `chunks` chunks of a chain, and checkpoints."""
        memory, dram, ssd = self._memory, self._memory.dram, self._memory.ssd
        seconds = self._seconds(chunks, len(checkpoints))
        self._flow.add(chunks, checkpoints)
        continues = self._pinned(chain, min(first, in_dram.chunks))
        ssd.pin(origin := ssd.cut(on_ssd))
        new_bytes = memory.shape.moved_bytes(chain.num_blocks - first, len(checkpoints))
        read = SsdRead(
            chain, first, chunks, checkpoints, self._channel.start(now_s, seconds), seconds,
            dram.reserve_up_to(new_bytes), continues, origin,
        )  # fmt: skip
        self._reads.append(read)
        return read

    def _seconds(self, chunks: int, checkpoints: int) -> float:
        """Return the seconds of a read by itself."""
        pace = self._pace
        seconds = pace.latency_s + chunks * self._memory.shape.chunk_tokens * pace.token_s
        return seconds + checkpoints * pace.checkpoint_s

    def _pinned(self, chain: BlockRuns, chunks: int) -> Run:
        """Pin a chain's first `chunks` chunks in DRAM, as far as they are there."""
        run = self._memory.dram.cut(self._memory.dram.match(chain.head(chunks)))
        self._memory.dram.pin(run)
        return run
