"""A simulated worker: an engine, its tiers, and the channels between them and to its peers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.checkpoints import (
    CheckpointPolicy,
    CheckpointRates,
    CheckpointSizes,
    policy_named,
)
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.planner import Mode
from hetero_connector.planner.pricing import EngineLoad
from hetero_connector.store.catalog.admission import Admission as SsdAdmission
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from hetero_connector.store.catalog.write_budget import WriteBudget
from ownership.scheduling.fleet import Role, WorkerLoad, WorkerView
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.admission import Admission
from ownership.simulator.machine.batching import BatchEngine, EngineLimits
from ownership.simulator.machine.channel import Channel, Flow
from ownership.simulator.machine.prefetching import Prefetching
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.ssd_writes import SsdWrites
from ownership.simulator.machine.steps import StepTimes
from ownership.simulator.state.gapped import Added
from ownership.simulator.state.memory import Eviction, TierBytes, WorkerMemory
from ownership.simulator.state.owners import Owners
from ownership.simulator.state.restoring import Restore, Restorer, StoredChunks
from ownership.simulator.state.retention import Retention
from ownership.simulator.state.sealing import Sealer
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.short_chunks import ShortChunk
from ownership.simulator.traces.block_runs import BlockRuns


@dataclass(frozen=True)
class WorkerSpec:
    """One worker as a fleet's file describes it, worked out."""

    name: str
    costs: CostModel
    capacity: TierBytes
    ssd_write_bandwidth: float
    """Bytes per second."""
    role: Role = Role.BOTH


class CachePolicy(NamedTuple):
    """What HeteroCache's side of a worker does."""

    checkpoints: str = "adaptive"
    eviction: Eviction = "leaf_lru"
    restores: Mode = "cost"
    replay: bool = False
    ssd_bytes_per_day: int | None = None
    """Written at most; None: all that there is."""
    prefetch: bool = False


@dataclass
class Flows:
    """What was moved at one worker."""

    sealed: Flow = field(default_factory=Flow)
    written: Flow = field(default_factory=Flow)
    """To SSD."""
    staged: Flow = field(default_factory=Flow)
    """From SSD."""
    fetched: Flow = field(default_factory=Flow)
    """From peers."""
    loaded: Flow = field(default_factory=Flow)
    """From DRAM to pages."""


class Worker:
    """One worker of the fleet. `served(worker, request)` hears of every request that ends here."""

    def __init__(
        self,
        spec: WorkerSpec,
        loop: EventLoop,
        shape: StateShape,
        policy: CachePolicy,
        limits: EngineLimits,
        known: StoredChunks,
        owners: Owners,
        served: Callable[[Worker, LiveRequest], None],
        prefilled: Callable[[LiveRequest], None],
    ) -> None:
        self.spec, self.name, self.shape = spec, spec.name, shape
        self.flows = Flows()
        self.ssd_reads = Channel()
        self.incoming, self.outgoing = Channel(), Channel()
        self.idle_sessions = 0
        """Sessions that decode here and wait for a tool."""
        self.up = True
        self.sessions = 0
        """Sessions that decode here."""
        self.idle_s = self.busy_while_idle_s = 0.0
        self._idle_since_s = 0.0
        self._loop = loop
        costs = spec.costs
        self._overhead = costs.overhead
        self._arriving: dict[LiveRequest, float] = {}
        """At the front end, in order; until when."""
        saved_s = SecondsSaved(costs.compute.predict)
        self.budget = self._budget(policy.ssd_bytes_per_day)
        ssd_admission = None
        if self.budget is not None:
            ssd_admission = SsdAdmission(self.budget, saved_s.in_prefills)
        self.memory = WorkerMemory(
            spec.name, shape, spec.capacity, policy.eviction, saved_s, owners, ssd_admission
        )
        self._writes = SsdWrites(spec.ssd_write_bandwidth)
        self._restorer = restorer = Restorer(
            shape, costs, policy.restores, replay=policy.replay, known=known
        )
        self._admission = admission = Admission(
            self.memory, restorer, costs, self.ssd_reads, self.flows.staged,
            Retention(shape.chunk_tokens, limits.retention_interval, shape.window_chunks),
        )  # fmt: skip
        self.engine = BatchEngine(
            loop, StepTimes(costs), self.memory, admission, limits,
            self._prefilled, self._finished, self._worked,
        )  # fmt: skip
        self._sealer = Sealer(self._checkpoint_policy(policy.checkpoints, costs))
        self._told_prefilled, self._served = prefilled, served
        self._saved_s = saved_s
        self.prefetched_bytes = 0
        """Of what was staged: ahead of its session."""
        self._prefetching = self._new_prefetching() if policy.prefetch else None
        footprint = shape.footprint
        self._peer_pace = footprint.pace(costs.load.rates(Tier.PEER))
        self._ssd_ahead = costs.load.rates(Tier.SSD).ahead_s_per_byte

    def submit(self, request: LiveRequest) -> None:
        """Queue a request once the front end has taken it in."""
        if self._prefetching is not None:
            self._prefetching.began(request.session)
        delay_s = self._overhead.delay_s(request.prompt_tokens)
        if not delay_s:
            self.engine.submit(request)
            return
        self._arriving[request] = end_s = self._loop.now_s + delay_s
        self._loop.at(end_s, self._taken_in, request, end_s)

    def view(self) -> WorkerView:
        """As a scheduler sees it."""
        spec = self.spec
        return WorkerView(spec.name, spec.costs, spec.capacity.hbm, spec.role, self.load())

    def load(self) -> WorkerLoad:
        """What it is busy with at this moment."""
        engine, now_s = self.engine, self._loop.now_s
        peer_s, ssd_s = self.incoming.pending_s(now_s), self.ssd_reads.pending_s(now_s)
        peer_ahead = self._peer_pace.ahead_s_per_byte
        running = engine.running_decodes + len(engine.prefilling)
        pages = engine.context_tokens
        for request in engine.prefilling:
            pages += request.total
        used_bytes = pages * self.shape.page_bytes_per_token
        used_bytes += running * self.shape.pages.checkpoint_bytes
        return WorkerLoad(
            max(0, engine.queued_tokens) + sum(r.expected_tokens for r in self._arriving),
            len(engine.waiting) + len(self._arriving),
            running,
            pages,
            min(used_bytes, self.spec.capacity.hbm),
            engine.residence_s,
            int(peer_s / peer_ahead) if peer_s and peer_ahead else 0,
            int(ssd_s / self._ssd_ahead) if ssd_s and self._ssd_ahead else 0,
            int(self.outgoing.pending_s(now_s) / peer_ahead) if peer_ahead else 0,
            self.up,
            self.sessions,
        )

    def reads_from(self, peer: Worker, request: LiveRequest) -> Restore | None:
        """What the planner here restores of a prompt with a peer's help; None: it needs none."""
        memory, chain, tokens = self.memory, request.chain, request.prompt_tokens
        local = memory.resumable(memory.hbm.find(chain), (tokens - 1) // self.shape.chunk_tokens)
        load = EngineLoad(0, self.engine.running_decodes)
        in_dram, at_peer = memory.dram.find(chain), peer.memory.dram.find(chain)
        restore = self._restorer.plan(
            in_dram, memory.ssd.reached(chain, max(in_dram.chunks, at_peer.chunks)), tokens, local,
            load, at_peer,
        )  # fmt: skip
        return restore if restore is not None and restore.from_peer else None

    def read_ssd(self, request: LiveRequest, restore: Restore) -> float:
        """Begin to read what such a plan takes from the SSD here; when it is in DRAM, if what it
        continues is."""
        if not restore.staged:
            return self._loop.now_s
        if not restore.ssd_stretches:
            self._admission.hold_staged(request, restore)
        return self._admission.read_ssd(request, restore, self._loop.now_s)

    def peer_seconds(self, tokens: int, checkpoints: int) -> float:
        """Of reading so much from a peer, nothing else being read."""
        pace = self._peer_pace
        return pace.latency_s + tokens * pace.token_s + checkpoints * pace.checkpoint_s

    @property
    def has_transfers(self) -> bool:
        """Whether bytes are under way to or from it."""
        now_s, ssd_until_s = self._loop.now_s, self.ssd_reads.busy_until_s
        return max(self.incoming.busy_until_s, self.outgoing.busy_until_s, ssd_until_s) > now_s

    def crash(self) -> list[LiveRequest]:
        """It is gone until `up` is set again; the requests it had."""
        self.up, now_s = False, self._loop.now_s
        self.ssd_reads.cut(now_s)
        self._writes.lose(now_s, self.memory.ssd)
        self.memory.lose()
        if self._prefetching is not None:
            self._prefetching.stop()
            self._prefetching = self._new_prefetching()
        lost = [*self._arriving, *self.engine.crash()]
        self._arriving.clear()
        return lost

    def session_waits(self, change: int) -> None:
        """A session that decodes here begins (1) or ends (-1) to wait for a tool."""
        now_s = self._loop.now_s
        if self.idle_sessions:
            self.idle_s += now_s - self._idle_since_s
        self._idle_since_s = now_s
        self.idle_sessions += change

    def _taken_in(self, request: LiveRequest, end_s: float) -> None:
        if self._arriving.get(request) == end_s:  # else it was lost meanwhile
            del self._arriving[request]
            self.engine.submit(request)

    def _worked(self, seconds: float) -> None:
        if self.idle_sessions:
            self.busy_while_idle_s += seconds

    def _prefilled(self, request: LiveRequest) -> None:
        """Seal the prompt, and write what is new to SSD."""
        size = self.shape.chunk_tokens
        checkpoints: list[int] = []
        restore = request.restore
        if restore is not None:
            kept, short = restore.dram_checkpoints + restore.ssd_checkpoints, restore.short
            chunks, more = restore.dram_chunks + restore.ssd_chunks, int(short is not None)
            boundaries = [restore.boundary_chunks + more] * kept
            self.flows.loaded.add(chunks + more, boundaries, short)
        if self.shape.has_checkpoints:
            checkpoints, reuse = self._sealer.prompt(
                request.chain, request.prompt_tokens, size,
                stored=request.stored_chunks, local=request.local_chunks,
                resumed=request.resumed_chunks,
                fetched=request.peer_chunks if request.peer_checkpoint else 0,
            )  # fmt: skip
            request.reuse = request.reuse or reuse
        self._seal(request.chain, checkpoints)
        self._told_prefilled(request)

    def _finished(self, request: LiveRequest) -> None:
        """Seal what the answer filled, and the request's end."""
        chain, checkpoints = request.answered_chain, []
        decoded_tokens = request.output_tokens - 1
        if request.decodes_elsewhere:
            chain, decoded_tokens = None, 0
        if request.reuse is not None:
            checkpoints = self._sealer.ended(
                chain,
                request.prompt_tokens // self.shape.chunk_tokens,
                (request.prompt_tokens + decoded_tokens) // self.shape.chunk_tokens,
                request.reuse,
            )
            request.reuse = None
        if chain is not None:
            self._seal(chain, checkpoints)
        if request.decodes_elsewhere and request.short is not None:
            self._seal_short(request.short, request.chain)
        if self._prefetching is not None:
            self._prefetching.ended(request.session, chain or request.chain)
        self._served(self, request)

    def _new_prefetching(self) -> Prefetching:
        return Prefetching(
            self._loop, self.memory, self.spec.costs, self._saved_s, self.ssd_reads,
            self._prefetched,
        )  # fmt: skip

    def _prefetched(self, chunks: int, checkpoints: Sequence[int]) -> None:
        self.flows.staged.add(chunks, checkpoints)
        self.prefetched_bytes += self.shape.moved_bytes(chunks, len(checkpoints))

    def _seal_short(self, short: ShortChunk, prompt: BlockRuns) -> None:
        """Return the token at which the prompt is handed off, if what it continues is here."""
        if self.memory.dram.find(prompt).chunks >= short.before:
            checkpoints = [short.before + 1] if self.shape.has_checkpoints else []
            self._seal(short.behind(prompt), checkpoints, short)

    def _seal(
        self, chain: BlockRuns, checkpoints: Sequence[int], short: ShortChunk | None = None
    ) -> None:
        """`short`: the chain's last chunk, if it is no full one."""
        sealed = self.memory.seal(chain, checkpoints)
        chunks, boundaries, new = _with_short(sealed.dram, short)
        self.flows.sealed.add(chunks, boundaries, new)
        for added in sealed.ssd:
            chunks, boundaries, new = _with_short(added, short)
            if chunks or boundaries:
                self.flows.written.add(chunks, boundaries, new)
                short_tokens = new.end - new.start if new else 0
                size_bytes = self.shape.moved_bytes(chunks, len(boundaries), short_tokens)
                head, first = chain.head(added.end), added.end - chunks
                self._writes.start(self._loop.now_s, size_bytes, head, first, chunks, boundaries)

    def _budget(self, bytes_per_day: int | None) -> WriteBudget | None:
        """A journal keeps it over a death."""
        if bytes_per_day is None:
            return None
        return WriteBudget(bytes_per_day, self._now_s, self._now_s)

    def _now_s(self) -> float:
        return self._loop.now_s

    def _checkpoint_policy(self, name: str, costs: CostModel) -> CheckpointPolicy:
        rates = CheckpointRates.learned(costs, has_ssd=self.spec.capacity.ssd > 0)
        return policy_named(name, CheckpointSizes.of(self.shape.layout), lambda: rates)


def _with_short(
    added: Added, short: ShortChunk | None
) -> tuple[int, Sequence[int], ShortChunk | None]:
    """Chunks, boundaries, and the last of the chunks if it is the short one."""
    return added.chunks, added.checkpoints, short if short and added.end > short.before else None
