"""One simulation: sessions, a fleet and a scheduling policy on a virtual clock."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial

from ownership.scheduling.step import Step
from ownership.simulator.clock import EventLoop
from ownership.simulator.figures import ChunkSet, Objectives, Tally
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.worker import Worker, WorkerTotals
from ownership.simulator.policies import PolicySpec, have_dram
from ownership.simulator.recording import Recording
from ownership.simulator.routers import Routers
from ownership.simulator.sessions import LiveSession, Population, Sessions, instant_s
from ownership.simulator.state.chunks import ShortChunk, short_chunk
from ownership.simulator.state.owners import ChunkOwners, ChunkRanges
from ownership.simulator.state.restoring import StoredChunkTable
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session
from ownership.simulator.workload import WHOLE, Window

_SAMPLE_EVERY = 512
"""Answers between two samples of the duplicate factor."""


class FleetSimulation:
    """A fleet that serves sessions. Call `run` once; then read `tally`, `workers`, `sessions`."""

    def __init__(
        self,
        fleet: FleetSpec,
        policy: PolicySpec,
        shape: StateShape,
        sessions: Iterator[Session],
        block_tokens: int,
        seed: int,
        on_answer: Callable[[], None] | None = None,
        recording: Recording | None = None,
        objectives: Objectives | None = None,
        window: Window = WHOLE,
        population: int | None = None,
    ) -> None:
        """`on_answer` is called after every answer.

        `population`: sessions of each worker that are under way at all times.
        """
        self.window = window
        self._num_due = 0
        """Requests of the window without an answer."""
        self._totals_at: dict[float, list[WorkerTotals]] = {}
        """Copies of the workers' sums at the begin and the end of the window."""
        self.loop, self.tally = EventLoop(), Tally(objectives or Objectives())
        self.shape, self._report_answer = shape, on_answer
        table, owners = StoredChunkTable(shape), ChunkOwners(self._owned)
        specs = policy.workers(fleet.workers)
        self.workers = {
            spec.name: Worker(
                spec, self.loop, shape, policy.cache, fleet.limits, table, owners,
                self._on_finished, self._on_prefilled,
            )
            for spec in specs
        }  # fmt: skip
        self._recording = recording
        if recording is not None:
            for worker in self.workers.values():
                recording.watch(worker)
        self._times = next(iter(self.workers.values())).engine.times
        """The step times by which slowdowns are computed."""
        self.ended_s = 0.0
        """Time of the last answer."""
        self._links = fleet.links
        self.routers = Routers(
            self.loop, self.workers, shape.footprint, fleet.links, policy.knowledge,
            partial(policy.scheduler, can_hand_off=have_dram(specs)),
            seed, lambda: self.sessions.are_over,
        )  # fmt: skip
        self._keeps_answers = policy.answers == "kept"
        self._hands_off_short = policy.handoffs == "tokens"
        self._num_short = 0
        self._block_tokens = block_tokens
        self._is_population = population is not None
        self.sessions = Sessions(
            self.loop, sessions, shape.chunk_tokens // block_tokens, self._send, self._close,
            block_tokens=block_tokens, keep_answers=self._keeps_answers,
            population=None if population is None else Population(
                population * len(self.workers), window.begin_s / 2.0
            ),
        )  # fmt: skip
        self._decoders: dict[LiveRequest, Worker] = {}
        """The decoders of remote prefills."""

    def run(self) -> None:
        """Simulate until the last answer of the window."""
        self.sessions.start()
        self.routers.start()
        for at_s in (self.window.begin_s, self.window.end_s):
            if 0.0 < at_s < math.inf:
                self.loop.at(self.sessions.first_start_s + at_s, self._copy_totals, at_s)
        self.loop.run()
        assert not self._num_due, "a request was never served"

    @property
    def span_s(self) -> float:
        """Virtual time from the window's begin to its end, or to the last answer."""
        elapsed_s = self.ended_s - self.sessions.first_start_s
        return max(0.0, min(self.window.end_s, elapsed_s) - self.window.begin_s)

    def totals(self) -> list[WorkerTotals]:
        """Return what each worker did in the window."""
        found = [worker.totals() for worker in self.workers.values()]
        found = self._totals_at.get(self.window.end_s, found)
        if before := self._totals_at.get(self.window.begin_s):
            found = [sums.since(at_begin) for sums, at_begin in zip(found, before, strict=True)]
        return found

    def _copy_totals(self, at_s: float) -> None:
        self._totals_at[at_s] = [deepcopy(worker.totals()) for worker in self.workers.values()]

    def _counts(self, time_s: float) -> bool:
        return self.window.has(time_s - self.sessions.first_start_s)

    def _stop_if_done(self) -> None:
        """End the simulation if nothing that is under way has a figure."""
        has_ended = self.loop.now_s >= self.sessions.first_start_s + self.window.end_s
        if has_ended and not self._num_due:
            live = self.sessions.live.values()
            if not any(self._counts_task(session) for session in live):
                self.loop.stop()

    def _counts_task(self, live: LiveSession) -> bool:
        """Return True if a session that ends now has figures: with a population, those that end in
        the window, else those that start in it."""
        at_s = self.loop.now_s if self._is_population else live.started_s
        return self._counts(at_s)

    def duplicate_factor(self) -> float:
        """Return chunks in all workers' memory over distinct ones.

        The memory is DRAM, or pages at workers without DRAM.
        """
        memories = [worker.memory for worker in self.workers.values()]
        tiers = (m.dram if m.dram.capacity_bytes else m.hbm for m in memories)
        return ChunkSet.of(tiers).duplicate_factor()

    def _send(self, live: LiveSession, request: LiveRequest) -> None:
        """Decide where a request that has arrived runs, and bring it there."""
        tally, counts = self.tally, self._counts(request.arrived_s)
        self._num_due += counts
        router = self.routers.arrive(request)
        step = router.step(live, request.index, self._step(live, request))
        begun = time.perf_counter()
        decision = router.decide(step)
        route = decision.route
        tally.decision_s.append(time.perf_counter() - begun)
        decoder = self.workers[decision.names[route.decode]]
        prefiller = self.workers[decision.names[route.prefill]]
        needed = self.shape.request_bytes(request.prompt_tokens + request.output_tokens)
        room = min(decoder.spec.capacity.hbm, prefiller.spec.capacity.hbm)
        if decision.refusal is not None or needed > room:
            tally.refused += counts
            self._num_due -= counts
            self.routers.on_refused(request)
            self.sessions.on_refused(request)
            self._stop_if_done()
            return
        if live.owner is not None and counts:
            tally.owned_turns += 1
            tally.owner_hits += prefiller.name == live.owner
            tally.moved_sessions += decoder.name != live.owner
        live.owner = decoder.name
        self.routers.on_sent(live, request, step, decision.placement)
        if prefiller is not decoder:
            if self._hands_off_short:
                self._make_short_chunk(live, request)
            request.decodes_elsewhere = True
            self._decoders[request] = decoder
        request.short_chunks = self._short_chunks_of(live, request)
        chain = request.chain.head((request.prompt_tokens - 1) // self.shape.chunk_tokens)
        prefix = prefiller.memory.worker_prefix(chain, sees_pages=True)
        local_tokens = prefix.local_tokens if prefix else 0
        request.expected_tokens = max(1, request.prompt_tokens - local_tokens)
        if route.source is not None:
            self._fetch(request, self.workers[decision.names[route.source]], prefiller)
        else:
            self._fetch_from_any(request, prefiller)

    def _step(self, live: LiveSession, request: LiveRequest) -> Step:
        """Return the request as it is, without what a router has to know of its session."""
        chain = request.chain.head((request.prompt_tokens - 1) // self.shape.chunk_tokens)
        boundary_tokens = live.boundary_tokens(request.index, self._block_tokens)
        request.alone_s = live.alone_s[request.index] = self._times.alone_s(
            request.prompt_tokens, boundary_tokens, request.output_tokens
        )
        return Step(
            request.prompt_tokens,
            self.routers.prefixes(chain, self.shape.chunk_tokens),
            live.session.id if live.session.is_named else "",
            boundary_tokens=boundary_tokens,
        )

    def _make_short_chunk(self, live: LiveSession, request: LiveRequest) -> None:
        """Make the short chunk at which the prompt is handed off, if it needs one."""
        self._num_short += 2  # ids of which none follows another
        short = short_chunk(self.shape, request.prompt_tokens, -self._num_short)
        if short is not None:
            live.short_chunks[request.index] = request.handoff_chunk = short

    def _short_chunks_of(self, live: LiveSession, request: LiveRequest) -> list[ShortChunk]:
        """Return the short chunks that a prompt is known to contain."""
        if not live.short_chunks:
            return []
        known = [request.index]
        if self._keeps_answers:
            known += live.begins_with(request.index, self._block_tokens)
        return [live.short_chunks[index] for index in known if index in live.short_chunks]

    def _owned(self, name: str, chain: BlockRuns) -> ChunkRanges:
        return self.workers[name].memory.owned(chain)

    def _fetch_from_any(self, request: LiveRequest, target: Worker) -> None:
        """Read from the peer of which the target's planner wants most, then queue the request."""
        peers = [worker for worker in self.workers.values() if worker is not target]
        plans = [(peer, target.plan_with(peer, request)) for peer in peers]
        wanted = [(peer, plan.boundary_chunks) for peer, plan in plans if plan is not None]
        if wanted:
            peer, limit = max(wanted, key=lambda pair: pair[1])
            self._fetch(request, peer, target, limit)
        else:
            target.submit(request)

    def _fetch(
        self, request: LiveRequest, source: Worker, target: Worker, limit: int | None = None
    ) -> None:
        """Read what the target's DRAM lacks of the prompt, then queue the request.

        `limit`: read up to so many chunks; None: as far as the request can resume.
        """
        target.expect(request)
        chain, short = request.chain, None
        if limit is None:
            limit = (request.prompt_tokens - 1) // self.shape.chunk_tokens
            short = request.handoff_chunk if request.is_handed_off else None
            if short is not None:
                chain, limit = short.appended_to(chain), short.before + 1
        request.own_chunks = target.memory.dram.match(request.chain).chunks
        link = self._links.get((source.name, target.name)) if self._links else None
        on_read = partial(self._on_fetched, request, target, self.loop.now_s)
        if not target.read_from(source, chain, limit, link, on_read, short):
            on_read(0)

    def _on_fetched(
        self, request: LiveRequest, target: Worker, begun_s: float, chunks: int
    ) -> None:
        request.network_s += self.loop.now_s - begun_s
        request.peer_chunks = chunks
        target.submit(request)

    def _on_prefilled(self, request: LiveRequest) -> None:
        if not request.decodes_elsewhere and request.first_token_s < 0.0:
            request.first_token_s = self.loop.now_s
            self.routers.on_first_token(request)

    def _on_finished(self, worker: Worker, request: LiveRequest) -> None:
        if self._recording is not None:
            self._recording.add_request(worker.name, request, self.loop.now_s)
        if request.decodes_elsewhere:
            self._hand_off(worker, request)
            return
        self.ended_s = self.loop.now_s
        if self._counts(request.arrived_s):
            self._num_due -= 1
            self.tally.on_answered(request, self.ended_s)
            if len(self.tally.step_s) % _SAMPLE_EVERY == 0 and len(self.workers) > 1:
                self.tally.duplicates.append(self.duplicate_factor())
        self.routers.on_answered(request)
        self.sessions.on_answered(request)
        if self._report_answer is not None:
            self._report_answer()
        self._stop_if_done()

    def _hand_off(self, worker: Worker, request: LiveRequest) -> None:
        """Bring a prompt that was prefilled to its decoder."""
        request.hand_off()
        self.routers.on_handed_off(request)
        request.expected_tokens = self.shape.chunk_tokens
        decoder = self._decoders.pop(request)
        delay_s = decoder.spec.costs.handoff.delay_s(request.prompt_tokens)
        if delay_s:
            self.loop.at(self.loop.now_s + delay_s, self._fetch, request, worker, decoder)
        else:
            self._fetch(request, worker, decoder)

    def _close(self, live: LiveSession) -> None:
        """Count a session whose last request was answered or refused; as a task if all were
        answered."""
        self.routers.on_closed(live)
        if self._counts_task(live) and not live.was_refused:
            task_s, requests = self.loop.now_s - live.started_s, live.session.requests
            alone_s = instant_s(requests, defaultdict(float, live.alone_s)) - live.instant_s
            self.tally.on_task_ended(live.number, task_s, live.instant_s, alone_s)
