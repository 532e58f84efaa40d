"""One simulation: a trace, a fleet and a policy on a virtual clock."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from functools import partial

from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.replication import HotSpotReplicas
from ownership.scheduling.step import Step
from ownership.simulator.clock import EventLoop
from ownership.simulator.fleet_file import Failure, FleetSpec
from ownership.simulator.machine.peer_reads import PeerReads
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.worker import Worker
from ownership.simulator.policies import PolicySpec
from ownership.simulator.replicating import Replicating
from ownership.simulator.results import Tally
from ownership.simulator.sessions import LiveSession, Sessions
from ownership.simulator.state.overlap import ChunkSet, duplicate_factor
from ownership.simulator.state.owners import Owners, Stretches
from ownership.simulator.state.restoring import Restore, StoredChunks
from ownership.simulator.state.shape import StateShape
from ownership.simulator.state.short_chunks import ShortChunk, short_chunk
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session, Trigger

_SAMPLE_EVERY = 512
"""Requests between two looks at what is held twice."""


class FleetSimulation:
    """A fleet that serves sessions. `run` once; then read `tally`, `workers` and `sessions`."""

    def __init__(
        self,
        fleet: FleetSpec,
        policy: PolicySpec,
        shape: StateShape,
        sessions: Iterator[Session],
        block_tokens: int,
        seed: int,
        timer: Callable[[], float] = time.perf_counter,
        served: Callable[[], None] | None = None,
    ) -> None:
        """`timer` times decisions. `served` is told of every request that was answered."""
        self.loop, self.tally = EventLoop(), Tally()
        self.shape, self._timer, self._told = shape, timer, served
        known, owners = StoredChunks(shape), Owners(self._owned)
        self._lease_s, self._lease_ends_s = fleet.lease_s, dict[str, float]()
        self.workers = {
            spec.name: Worker(
                spec, self.loop, shape, policy.cache, fleet.limits, known, owners,
                self._served, self._prefilled,
            )
            for spec in policy.limited(fleet.workers)
        }  # fmt: skip
        self._changed: set[str] = set()
        self._down = 0
        """Workers that are not up."""
        self._homeless: list[tuple[LiveSession, LiveRequest]] = []
        """Requests that came while no worker was up."""
        self.ended_s = 0.0
        """When the last answer was there."""
        for failure in fleet.failures:
            self.loop.at(failure.at_s, self._fails, failure)
        views = [worker.view() for worker in self.workers.values()]
        self._view = FleetView(shape.footprint, views, fleet.links)
        self._reads = PeerReads(self.loop, fleet.links)
        self.replicating: Replicating | None = None
        if policy.replicas == "hot":
            self.replicating = Replicating(HotSpotReplicas(), self.workers, self._reads)
        self._reads_peers = policy.peers == "any"
        self._keeps_answers = policy.answers == "kept"
        self._has_shorts, self._named = policy.handoffs == "tokens", 0
        self._policy: SchedulingPolicy = policy.scheduler(random.Random(seed))
        self._block_tokens = block_tokens
        per_chunk = shape.chunk_tokens // block_tokens
        self.sessions = Sessions(
            self.loop, sessions, per_chunk, self._send, self._close,
            block_tokens=block_tokens, keep_answers=self._keeps_answers,
        )  # fmt: skip
        self._output_tokens = 256.0
        self._decoders: dict[LiveRequest, Worker] = {}
        """Of remote prefills: where they decode."""
        self.asked_for = ChunkSet()
        """Of all prompts."""

    def run(self) -> None:
        """Until the last answer."""
        self.sessions.start()
        self.loop.run()
        assert not self.sessions.live, "a request was never served"

    def duplicate_factor(self) -> float:
        """Of what all workers' memory holds now: DRAM where there is any, else pages."""
        memories = [worker.memory for worker in self.workers.values()]
        return duplicate_factor(m.dram if m.dram.capacity_bytes else m.hbm for m in memories)

    def _send(self, live: LiveSession, request: LiveRequest) -> None:
        """A request has arrived: decide where it runs, and bring it there."""
        waited_at = live.waiting_for_tools.pop(request.index, None)
        if waited_at is not None:
            self.workers[waited_at].session_waits(-1)
        tally = self.tally
        if self._down == len(self.workers):
            self._homeless.append((live, request))
            return
        step = self._step(live, request)
        self._report_loads()
        if self.replicating is not None:
            self._replicate(self.replicating, live, request, step)
        request.was_decided = True
        begun = self._timer()
        decision = self._policy.decide(step, self._view)
        way = decision.route
        tally.decision_s.append(self._timer() - begun)
        decoder = self.workers[decision.names[way.decode]]
        prefiller = self.workers[decision.names[way.prefill]]
        needed = self.shape.request_bytes(request.prompt_tokens + request.output_tokens)
        room = min(decoder.spec.capacity.hbm, prefiller.spec.capacity.hbm)
        if decision.refusal is not None or needed > room:
            tally.refused += 1
            self.sessions.gave_up(request)
            return
        if live.owner is not None:
            tally.owned_turns += 1
            tally.owner_hits += prefiller.name == live.owner
            tally.moved_sessions += decoder.name != live.owner
        self._move_session(live, decoder.name)
        if prefiller is not decoder:
            if self._has_shorts:
                self._name_short(live, request)
            request.decodes_elsewhere = True
            self._decoders[request] = decoder
        request.shorts = self._known_shorts(live, request)
        resident = step.prefixes.get(prefiller.name)
        held = resident.local_tokens if resident else 0
        request.expected_tokens = max(1, request.prompt_tokens - held)
        if way.source is not None:
            self._fetch(request, self.workers[decision.names[way.source]], prefiller)
        elif self._reads_peers:
            self._fetch_by_need(request, prefiller)
        else:
            self._queue(request, prefiller)

    def _step(self, live: LiveSession, request: LiveRequest) -> Step:
        chain = request.chain.head((request.prompt_tokens - 1) // self.shape.chunk_tokens)
        held = {}
        for name, worker in self.workers.items():
            if not worker.up:
                continue
            prefix = worker.memory.held(chain)
            if prefix is not None:
                held[name] = prefix
        recorded = live.request(request.index)
        return Step(
            request.prompt_tokens,
            held,
            live.session.id,
            live.owner,
            live.boundary_tokens(request.index, self._block_tokens),
            self._output_tokens,
            recorded.trigger is Trigger.TOOL_RESULT,
            live.is_fork(request.index),
        )

    def _name_short(self, live: LiveSession, request: LiveRequest) -> None:
        """Say at which short chunk it will be handed off."""
        if request.index in live.shorts:
            return  # it is sent again
        self._named += 2  # none follows another
        name = -self._named
        short = short_chunk(self.shape, request.chain, request.prompt_tokens, name)
        if short is not None:
            live.shorts[request.index] = request.short = short

    def _known_shorts(self, live: LiveSession, request: LiveRequest) -> list[ShortChunk]:
        """Those that its prompt begins with, where that is known."""
        if not live.shorts:
            return []
        known = [request.index]
        if self._keeps_answers:
            known += live.begins_with(request.index, self._block_tokens)
        return [live.shorts[index] for index in known if index in live.shorts]

    def _replicate(
        self, replicating: Replicating, live: LiveSession, request: LiveRequest, step: Step
    ) -> None:
        size, now_s = self.shape.chunk_tokens, self.loop.now_s
        begins = live.request(request.index).parent is None or step.forked
        if begins and not request.was_decided:
            replicating.begins(step, request.chain, size, now_s)
        self._changed |= replicating.look(self._view, size, now_s)

    def _report_loads(self) -> None:
        for name in self._changed:
            worker = self.workers[name]
            self._view.set_load(name, worker.load())
        # Bytes under way shrink with time.
        self._changed = {name for name in self._changed if self.workers[name].has_transfers}

    def _fails(self, failure: Failure) -> None:
        """A worker dies: its sessions have no owner, its requests are sent again at once."""
        worker = self.workers[failure.worker]
        for live in self.sessions.live.values():
            if live.owner == worker.name:
                self._move_session(live, None)
            for index, name in list(live.waiting_for_tools.items()):
                if name == worker.name:
                    del live.waiting_for_tools[index]
                    worker.session_waits(-1)
        self._changed.add(worker.name)
        self._down += 1
        self._lease_ends_s[worker.name] = self.loop.now_s + self._lease_s
        lost = worker.crash()
        self._reads.cut_off(worker)
        for request in lost:
            self._send_again(request)
        self.loop.at(self.loop.now_s + failure.for_s, self._returns, worker)

    def _returns(self, worker: Worker) -> None:
        worker.up = True
        self._down -= 1
        self._changed.add(worker.name)
        waiting, self._homeless = self._homeless, []
        for live, request in waiting:
            self._send(live, request)

    def _send_again(self, request: LiveRequest) -> None:
        self.tally.resent += 1
        self._decoders.pop(request, None)
        request.start_over()
        self._send(self.sessions.live[request.session], request)

    def _owned(self, name: str, chain: BlockRuns) -> Stretches:
        if self.loop.now_s < self._lease_ends_s.get(name, 0.0):
            return [(0, chain.num_blocks)]  # what it had claimed, whether it is back or not
        worker = self.workers[name]
        return worker.memory.owned(chain) if worker.up else ()

    def _queue(self, request: LiveRequest, worker: Worker) -> None:
        if not worker.up:
            self._send_again(request)
            return
        self._changed.add(worker.name)
        worker.submit(request)

    def _fetch_by_need(self, request: LiveRequest, target: Worker) -> None:
        """Read what the target's planner wants of the peer that has most, then queue it."""
        peers = [w for w in self.workers.values() if w is not target and w.up]
        can_read = target.up and target.spec.capacity.dram
        plans = [(peer, target.reads_from(peer, request)) for peer in peers] if can_read else []
        wanted = [(peer, plan) for peer, plan in plans if plan is not None]
        if wanted:
            peer, plan = max(wanted, key=lambda one: one[1].boundary_chunks)
            self._fetch(request, peer, target, plan)
        else:
            self._queue(request, target)

    def _fetch(
        self, request: LiveRequest, source: Worker, target: Worker, plan: Restore | None = None
    ) -> None:
        """Read what the target lacks of the prompt from the source's DRAM, then queue it.

        `plan`: what is read, of that some from the target's own SSD meanwhile; None: all from the
        source, as far as the request can resume.
        """
        ssd_s, limit = 0.0, (request.prompt_tokens - 1) // self.shape.chunk_tokens
        short = request.short if request.handed_off else None
        chain = request.chain
        if short is not None:
            chain, limit = short.behind(chain), short.before + 1
        if plan is not None:
            ssd_s, limit = target.read_ssd(request, plan), plan.boundary_chunks
        request.own_chunks = target.memory.dram.find(request.chain).chunks
        request.peer_checkpoint = plan is None or plan.peer_checkpoints > 0
        if plan is not None and not plan.ssd_stretches:
            plan = None
        fetched = partial(self._fetched, request, target, self.loop.now_s, ssd_s, plan)
        if self._reads.begin(source, target, chain, limit, fetched, ssd_s, short, plan):
            self._changed |= {source.name, target.name}
        else:
            fetched(0)

    def _fetched(
        self, request: LiveRequest, target: Worker, begun_s: float, ssd_s: float,
        plan: Restore | None, chunks: int,
    ) -> None:  # fmt: skip
        if target.up and self.loop.now_s < ssd_s:  # cut off, but the SSD goes on
            self.loop.at(ssd_s, self._fetched, request, target, begun_s, ssd_s, plan, chunks)
            return
        request.network_s += self.loop.now_s - begun_s
        request.peer_chunks = chunks
        if plan is not None and not chunks:  # what the SSD had continues what did not come
            request.was_staged, request.staged_chunks, request.staged_stretches = False, 0, ()
        self._queue(request, target)

    def _prefilled(self, request: LiveRequest) -> None:
        if not request.decodes_elsewhere and request.first_token_s < 0.0:
            request.first_token_s = self.loop.now_s

    def _served(self, worker: Worker, request: LiveRequest) -> None:
        self._changed.add(worker.name)
        if request.decodes_elsewhere:
            request.hand_off()
            request.expected_tokens = self.shape.chunk_tokens
            decoder = self._decoders.pop(request)
            delay_s = decoder.spec.costs.handoff.delay_s(request.prompt_tokens)
            if delay_s:
                at_s = self.loop.now_s + delay_s
                self.loop.at(at_s, self._fetch, request, worker, decoder)
            else:
                self._fetch(request, worker, decoder)
            return
        self.ended_s = self.loop.now_s
        self.tally.served(request, self.ended_s)
        self._output_tokens += 0.01 * (request.output_tokens - self._output_tokens)
        live = self.sessions.answered(request)
        for index in live.followers.get(request.index, ()):
            waiting_at = live.waiting_for_tools.get(index)
            if waiting_at is not None:
                self.workers[waiting_at].session_waits(1)
        self.asked_for.add(request.chain)
        if len(self.tally.step_s) % _SAMPLE_EVERY == 0 and len(self.workers) > 1:
            self.tally.duplicates.append(self.duplicate_factor())
        if self._told is not None:
            self._told()

    def _move_session(self, live: LiveSession, owner: str | None) -> None:
        """Move the session to the worker that decodes it; None: the session has ended."""
        if live.owner == owner:
            return
        if live.owner is not None:
            self.workers[live.owner].sessions -= 1
            self._changed.add(live.owner)
        if owner is not None:
            self.workers[owner].sessions += 1
            self._changed.add(owner)
        live.owner = owner

    def _close(self, live: LiveSession) -> None:
        self._move_session(live, None)
        task_s = self.loop.now_s - live.started_s
        self.tally.task_s.append(task_s)
        self.tally.task_wait_s.append(max(0.0, task_s - live.instant_s))
