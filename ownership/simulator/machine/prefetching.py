"""Bringing a session's state from SSD to DRAM before it is due back, at one worker.

The planner's think times say when a session is due, the store's schedule whose turn it is, and its
weighing what may leave for it. As in the store one batch is in flight at a time, and only while no
restore reads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from hetero_connector.artifacts.record import ROOT, ChunkRange, SlotRef, Tier
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.sessions import ThinkTimes
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.prefetch_schedule import (
    BATCH_BYTES,
    ExpectedReturn,
    PrefetchCosts,
    PrefetchSchedule,
    PrefetchWorth,
    staging_start_s,
)
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from hetero_connector.store.catalog.tick_times import TickTimes
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.channel import Channel
from ownership.simulator.state.memory import WorkerMemory
from ownership.simulator.state.runs import Found, Run
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(eq=False)
class _Job:
    """One session's chain, up to where it can resume."""

    expected: ExpectedReturn
    chain: BlockRuns
    gain_s: float
    """Expected of a chunk, on average over the chain."""
    reached: int = 0
    """Chunks that were in DRAM after the last batch."""
    ended: bool = False


@dataclass(frozen=True)
class _Batch:
    """What is under way."""

    upto: int
    """Chunks of the chain that are in DRAM when it is there."""
    chunks: int
    checkpoints: Sequence[int]
    size_bytes: int
    above: Run
    """What it continues, pinned."""


class Prefetching:
    """Hears of a worker's requests as they begin and end, and stages what is due."""

    def __init__(
        self, loop: EventLoop, memory: WorkerMemory, costs: CostModel, seconds_saved: SecondsSaved,
        ssd: Channel, staged: Callable[[int, Sequence[int]], None],
    ) -> None:  # fmt: skip
        """`staged` is told of chunks, and of boundaries with a checkpoint, that were read."""
        self._loop, self._memory, self._ssd, self._staged = loop, memory, ssd, staged
        shape = memory.shape
        self._pace = shape.footprint.pace(costs.load.rates(Tier.SSD))
        self._batch_chunks = max(1, BATCH_BYTES // max(1, shape.stored.chunk_bytes))
        self._think_times, self._schedule = ThinkTimes(), PrefetchSchedule()
        self._tick_times = TickTimes(loop.now_s)
        chunk_s = shape.chunk_tokens * self._pace.token_s
        prices = PrefetchCosts(lambda _: chunk_s, self._think_times.return_probability)
        self._worth = PrefetchWorth(prices, seconds_saved)
        self._chains: dict[int, BlockRuns] = {}
        """Of the sessions that are expected."""
        self._job: _Job | None = None
        self._noted = 0
        """The last tick whose time is known."""

    def began(self, session: int) -> None:
        """A turn has arrived: what is still on SSD its own restore reads."""
        self._think_times.on_turn_start(session, self._loop.now_s)
        self._schedule.cancel(session)
        self._chains.pop(session, None)
        if self._job is not None and self._job.expected.session == session:
            self._job.ended = True

    def ended(self, session: int, chain: BlockRuns) -> None:
        """A turn is over, with those chunks."""
        now_s, chunks = self._loop.now_s, chain.num_blocks
        if self._memory.now > self._noted:
            self._noted = self._memory.now
            self._tick_times.note(self._noted, now_s)
        expected = self._think_times.on_turn_end(session, now_s)
        if expected is None or not chunks:
            return
        start_s = staging_start_s(expected.earliest_s, self._stage_s(chunks, checkpoints=1))
        self._chains[session] = chain
        self._schedule.expect(
            ExpectedReturn(session, (), start_s, expected.latest_s, expected.probability)
        )
        self._loop.at(max(now_s, start_s), self._next)

    def stop(self) -> None:
        """The worker has died."""
        self._schedule.clear()
        self._job = None

    def _next(self) -> None:
        """Begin with the next session that is due, unless one is being staged."""
        while self._job is None:
            expected = self._schedule.take_due(self._loop.now_s)
            if expected is None:
                return
            assert isinstance(expected.session, int)
            self._job = self._open(expected, self._chains.pop(expected.session))
            if self._job is not None:
                self._advance(self._job)

    def _open(self, expected: ExpectedReturn, chain: BlockRuns) -> _Job | None:
        memory = self._memory
        in_dram, on_ssd = memory.stored(chain)
        deepest = max(in_dram.chunks, on_ssd.chunks)
        boundary = max(memory.resumable(found, deepest) for found in (in_dram, on_ssd))
        if memory.resumable(in_dram, boundary) == boundary:
            return None
        at_stake_s = fmean(
            self._worth.at_stake_s(self._chunk(number, number <= on_ssd.chunks))
            for number in range(1, boundary + 1)
        )
        return _Job(expected, chain.head(boundary), expected.probability * at_stake_s)

    def _go_on(self, job: _Job) -> None:
        """With the job, unless the worker has died; where that is over with the next."""
        if job is self._job:
            self._advance(job)
            self._next()

    def _advance(self, job: _Job) -> None:
        """Start the next batch, or have no job any more."""
        now_s, memory = self._loop.now_s, self._memory
        busy_s = self._ssd.pending_s(now_s)
        if busy_s and not job.ended:
            self._loop.at(now_s + busy_s, self._go_on, job)
            return
        (in_dram, on_ssd), boundary = memory.stored(job.chain), job.chain.num_blocks
        upto = min(boundary, in_dram.chunks + self._batch_chunks)
        checkpoints: list[int] = []
        if upto == boundary and memory.shape.has_checkpoints:
            checkpoints = [] if boundary in in_dram.checkpoints() else [boundary]
        chunks = upto - in_dram.chunks
        size_bytes = memory.shape.moved_bytes(chunks, len(checkpoints))
        late = job.ended or now_s >= job.expected.latest_s
        gone = in_dram.chunks < job.reached or on_ssd.chunks < upto
        if late or gone or not size_bytes or not self._makes_room(in_dram, size_bytes):
            self._job = None
            return
        above = memory.hold(in_dram)
        end_s = self._ssd.start(now_s, self._stage_s(chunks, len(checkpoints)), size_bytes)
        batch = _Batch(upto, chunks, checkpoints, size_bytes, above)
        self._loop.at(end_s, self._arrived, job, batch)

    def _arrived(self, job: _Job, batch: _Batch) -> None:
        if job is not self._job:
            return  # the worker died, and what was reserved and pinned with it
        memory, upto = self._memory, batch.upto
        memory.dram.release(batch.size_bytes)
        memory.dram.unpin(batch.above)
        run, *_ = memory.dram.add(job.chain.head(upto), upto, batch.checkpoints, memory.tick())
        job.reached = run.end
        self._staged(batch.chunks, batch.checkpoints)
        self._go_on(job)

    def _makes_room(self, in_dram: Found, size_bytes: int) -> bool:
        """Take room in DRAM from what is worth less; the chain's own state makes none for it."""
        dram = self._memory.dram
        held = self._memory.hold(in_dram)
        taken = dram.reserve(size_bytes, self._is_dearer)
        dram.unpin(held)
        return taken

    def _is_dearer(self, run: Run) -> bool:
        """Whether the next to leave DRAM is worth more than what would come."""
        assert self._job is not None
        now_s, memory = self._loop.now_s, self._memory
        on_ssd = memory.ssd.has(run.chain())
        idle_s = now_s - self._tick_times.time_s(run.last_used)
        within_s = self._job.expected.latest_s - now_s
        loss_s = self._worth.loss_s(self._chunk(run.end, on_ssd), idle_s, within_s)
        return loss_s >= self._job.gain_s

    def _chunk(self, number: int, on_ssd: bool) -> Artifact:
        """A prompt's chunk by its number, as the weighing sees it: all its state together."""
        memory = self._memory
        size = memory.shape.chunk_tokens
        node = Node(ChunkRange(ROOT, ROOT, (number - 1) * size, number * size), None)
        artifact = Artifact(node, memory.state_type, memory.shape.stored.chunk_bytes)
        if on_ssd:
            artifact.ssd = SlotRef(Tier.SSD, memory.state_type, 0, 0)
        return artifact

    def _stage_s(self, chunks: int, checkpoints: int) -> float:
        pace, tokens = self._pace, chunks * self._memory.shape.chunk_tokens
        return pace.latency_s + tokens * pace.token_s + checkpoints * pace.checkpoint_s
