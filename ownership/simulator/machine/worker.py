"""A simulated worker: an engine, its tiers, and the channels between them and to its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.checkpoints import CheckpointRates, CheckpointSizes, policy_named
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.planner import Mode
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from ownership.scheduling.fleet import Link, Role, WorkerLoad, WorkerView
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.admission import RequestAdmission
from ownership.simulator.machine.channel import Channel, Flow, transfer_between
from ownership.simulator.machine.engine import (
    BatchEngine,
    EngineLimits,
    EngineTotals,
    StepTimes,
)
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.roofline import Roofline, RooflineTimes
from ownership.simulator.state.checkpoints import CheckpointKeeper, Retention
from ownership.simulator.state.chunks import ShortChunk
from ownership.simulator.state.memory import TierBytes, WorkerMemory
from ownership.simulator.state.owners import ChunkOwners
from ownership.simulator.state.restoring import Restore, Restorer, StoredChunkTable
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(frozen=True)
class WorkerSpec:
    """One worker of a fleet."""

    name: str
    costs: CostModel
    capacity: TierBytes
    role: Role = Role.BOTH
    roofline: Roofline | None = None
    """The seconds of its steps; None: those of the cost model."""
    measured_model: str = ""
    """The model that its profile was measured on; "": it has none."""

    def step_times(self) -> StepTimes:
        """Return how long its engine's steps take."""
        return RooflineTimes(self.costs, self.roofline) if self.roofline else StepTimes(self.costs)


class CachePolicy(NamedTuple):
    """The cache policies of every worker."""

    checkpoints: str = "adaptive"
    eviction: EvictionName = "leaf_lru"
    restores: Mode = "cost"


@dataclass
class Flows:
    """Everything that was moved at one worker."""

    sealed: Flow = field(default_factory=Flow)
    written: Flow = field(default_factory=Flow)
    """To SSD."""
    staged: Flow = field(default_factory=Flow)
    """From SSD."""
    fetched: Flow = field(default_factory=Flow)
    """From peers."""
    loaded: Flow = field(default_factory=Flow)
    """From DRAM to pages."""

    def since(self, before: Flows) -> Flows:
        """Return what was moved after a copy was made."""
        return Flows(*(getattr(self, x.name).since(getattr(before, x.name)) for x in fields(Flows)))


@dataclass
class WorkerTotals:
    """Sums over what one worker did."""

    engine: EngineTotals
    flows: Flows

    def since(self, before: WorkerTotals) -> WorkerTotals:
        """Return what was done after a copy was made."""
        return WorkerTotals(self.engine.since(before.engine), self.flows.since(before.flows))


class Worker:
    """One worker of the fleet."""

    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        shape: StateShape,
        policy: CachePolicy,
        limits: EngineLimits,
        table: StoredChunkTable,
        owners: ChunkOwners,
        on_finished: Callable[[Worker, LiveRequest], None],
        on_prefilled: Callable[[LiveRequest], None],
    ) -> None:
        """`on_finished(worker, request)` is called for every request that ends here."""
        self.spec, self.name, self.shape = spec, spec.name, shape
        self.on_stored: Callable[[BlockRuns, int], None] | None = None
        """Called with a chain and the first of its chunks that are new here."""
        self.flows = Flows()
        self.ssd_reads, self.incoming, self.outgoing = Channel(), Channel(), Channel()
        self._loop = loop
        costs = spec.costs
        self._overhead = costs.overhead
        self._arriving: dict[LiveRequest, None] = {}
        """Requests that are here and not in the engine's queue yet."""
        saved_s = SecondsSaved(costs.compute.predict)
        self.memory = WorkerMemory(
            spec.name, shape, spec.capacity, policy.eviction, saved_s, owners
        )
        self._restorer = Restorer(shape, costs, policy.restores, table)
        retention = Retention(shape.chunk_tokens, limits.retention_interval, shape.window_chunks)
        admission = RequestAdmission(
            self.memory, self._restorer, costs, self.ssd_reads, self.flows.staged, retention
        )
        self.engine = BatchEngine(
            loop, spec.step_times(), self.memory, admission, limits,
            self._on_prefilled, self._on_finished,
        )  # fmt: skip
        rates = CheckpointRates.learned(costs, has_ssd=spec.capacity.ssd > 0)
        sizes = CheckpointSizes.of(shape.layout)
        self._keeper = CheckpointKeeper(policy_named(policy.checkpoints, sizes, lambda: rates))
        self._report_prefilled, self._report_finished = on_prefilled, on_finished
        self._peer_pace = shape.footprint.pace(costs.load.rates(Tier.PEER))
        self._ssd_ahead = costs.load.rates(Tier.SSD).ahead_s_per_byte

    def expect(self, request: LiveRequest) -> None:
        """Let a request wait here until state has been read from a peer; `submit` follows."""
        self._arriving[request] = None

    def submit(self, request: LiveRequest) -> None:
        """Send a request through the front end to the engine's queue."""
        self._arriving[request] = None
        delay_s = self._overhead.delay_s(request.prompt_tokens)
        if delay_s:
            self._loop.at(self._loop.now_s + delay_s, self._leave_front_end, request)
        else:
            self._leave_front_end(request)

    def view(self) -> WorkerView:
        """Return the worker as a scheduler sees it."""
        spec = self.spec
        size = spec.capacity
        return WorkerView(spec.name, spec.costs, size.hbm, spec.role, self.load(), size.dram)

    def load(self) -> WorkerLoad:
        """Return its present load."""
        engine, now_s = self.engine, self._loop.now_s
        peer_s, ssd_s = self.incoming.pending_s(now_s), self.ssd_reads.pending_s(now_s)
        peer_ahead = self._peer_pace.ahead_s_per_byte
        running = engine.running_decodes + len(engine.prefilling)
        tokens = engine.context_tokens
        for request in engine.prefilling:
            tokens += request.total
        used_bytes = tokens * self.shape.page_bytes_per_token
        used_bytes += running * self.shape.pages.checkpoint_bytes
        arriving_tokens = sum(r.expected_tokens for r in self._arriving)
        return WorkerLoad(
            queued_tokens=max(0, engine.queued_tokens) + arriving_tokens,
            waiting_requests=len(engine.waiting) + engine.staging + len(self._arriving),
            running_requests=running,
            context_tokens=tokens,
            hbm_used_bytes=min(used_bytes, self.spec.capacity.hbm),
            residence_s=engine.residence_s,
            peer_bytes=int(peer_s / peer_ahead) if peer_s and peer_ahead else 0,
            ssd_bytes=int(ssd_s / self._ssd_ahead) if ssd_s and self._ssd_ahead else 0,
            outgoing_bytes=int(self.outgoing.pending_s(now_s) / peer_ahead) if peer_ahead else 0,
        )

    def totals(self) -> WorkerTotals:
        """Return the sums up to now; they go on to grow."""
        return WorkerTotals(self.engine.totals, self.flows)

    def plan_with(self, peer: Worker, request: LiveRequest) -> Restore | None:
        """Plan a restore that reads from a peer; None if the planner wants nothing of it."""
        if not self.spec.capacity.dram:
            return None
        memory, tokens = self.memory, request.prompt_tokens
        limit = (tokens - 1) // self.shape.chunk_tokens
        local = memory.resumable(memory.hbm.match(request.chain), limit)
        engine = self.engine
        load = EngineLoad(0, engine.running_decodes, decoded_context=engine.context_tokens)
        at_peer = peer.memory.dram.match(request.chain)
        restore = self._restorer.plan(*memory.stored(request.chain), tokens, local, load, at_peer)
        return restore if restore is not None and restore.from_peer else None

    def read_from(
        self,
        source: Worker,
        chain: BlockRuns,
        limit: int,
        link: Link | None,
        on_read: Callable[[int], None],
        short: ShortChunk | None = None,
    ) -> bool:
        """Read what DRAM lacks of a chain's first `limit` chunks from another worker's DRAM.

        Returns False if there is nothing to read. Otherwise `on_read(chunks)` is called when DRAM
        has the chain up to there. `short`: the last chunk, if it is a short one. `link`: the
        network between both, if it is slower than this worker's own.
        """
        if not self.spec.capacity.dram:
            return False
        there, here = source.memory.dram.match(chain), self.memory.dram.match(chain)
        boundary = source.memory.resumable(there, limit)
        if boundary <= self.memory.resumable(here, limit):
            return False
        shape = self.shape
        checkpoints = [boundary] if shape.has_checkpoints else []
        chunks = max(0, boundary - here.chunks)
        if short is not None and boundary <= short.before:
            short = None
        short_tokens = short.end - short.start if short else 0
        tokens = chunks * shape.chunk_tokens
        if short_tokens and chunks:
            tokens += short_tokens - shape.chunk_tokens
        pace = self._peer_pace
        seconds = pace.latency_s + tokens * pace.token_s + len(checkpoints) * pace.checkpoint_s
        if link is not None:
            size_bytes = shape.moved_bytes(chunks, len(checkpoints), short_tokens)
            seconds = max(seconds, link.latency_s + size_bytes * link.seconds_per_byte)
        end_s = transfer_between(source.outgoing, self.incoming, self._loop.now_s, seconds)
        spans = source.memory.owners_of(chain, boundary)
        pinned = self.memory.pin_match(self.memory.dram.match(chain.head(boundary)))

        def on_arrival() -> None:
            self.flows.fetched.add(chunks, checkpoints, short)
            self.memory.dram.unpin(pinned)
            self.memory.add_read(chain, spans, checkpoints)
            if self.on_stored is not None:
                self.on_stored(chain.head(boundary), here.chunks)
            on_read(boundary)

        self._loop.at(end_s, on_arrival)
        return True

    def _leave_front_end(self, request: LiveRequest) -> None:
        del self._arriving[request]
        self.engine.submit(request)

    def _on_prefilled(self, request: LiveRequest) -> None:
        """Count what was loaded, and seal the prompt."""
        checkpoints: list[int] = []
        restore = request.restore
        if restore is not None:
            kept, short = restore.dram_checkpoints + restore.ssd_checkpoints, restore.short
            chunks, more = restore.dram_chunks + restore.ssd_chunks, int(short is not None)
            boundaries = [restore.boundary_chunks + more] * kept
            self.flows.loaded.add(chunks + more, boundaries, short)
        if self.shape.has_checkpoints:
            checkpoints, reuse = self._keeper.prompt(
                request.chain, request.prompt_tokens, self.shape.chunk_tokens,
                stored=request.stored_chunks, local=request.local_chunks,
                resumed=request.resumed_chunks, fetched=request.peer_chunks,
            )  # fmt: skip
            request.reuse = request.reuse or reuse
        self._seal(request.chain, checkpoints)
        self._report_prefilled(request)

    def _on_finished(self, request: LiveRequest) -> None:
        """Seal the chunks that the answer filled, and the end of the request."""
        chain, checkpoints = request.answered_chain, []
        decoded_tokens = request.output_tokens - 1
        if request.decodes_elsewhere:
            chain, decoded_tokens = None, 0
        if request.reuse is not None:
            checkpoints = self._keeper.answer(
                chain,
                request.prompt_tokens // self.shape.chunk_tokens,
                (request.prompt_tokens + decoded_tokens) // self.shape.chunk_tokens,
                request.reuse,
            )
            request.reuse = None
        if chain is not None:
            self._seal(chain, checkpoints)
        if request.decodes_elsewhere and request.handoff_chunk is not None:
            self._seal_short(request.handoff_chunk, request.chain)
        self._report_finished(self, request)

    def _seal_short(self, short: ShortChunk, prompt: BlockRuns) -> None:
        """Seal the end of a prompt that is handed off, if the chunks before it are here."""
        if self.memory.dram.match(prompt).chunks >= short.before:
            checkpoints = [short.before + 1] if self.shape.has_checkpoints else []
            self._seal(short.appended_to(prompt), checkpoints, short)

    def _seal(
        self, chain: BlockRuns, checkpoints: Sequence[int], short: ShortChunk | None = None
    ) -> None:
        """Add a chain to the tiers. `short`: its last chunk, if it is a short one."""
        sealed = self.memory.seal(chain, checkpoints)
        if self.on_stored is not None and sealed.dram.chunks:
            self.on_stored(chain, sealed.dram.end - sealed.dram.chunks)
        written = ((self.flows.written, added) for added in sealed.ssd)
        for flow, added in ((self.flows.sealed, sealed.dram), *written):
            is_short = short is not None and added.end > short.before
            flow.add(added.chunks, added.checkpoints, short if is_short else None)
