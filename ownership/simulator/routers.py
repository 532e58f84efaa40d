"""The routers of a simulated fleet, and what each of them knows.

By default a router knows what it sent and saw, and what workers report (`Ledger`), and at once what
they have stored. Two other views are there to compare with: loads as last reported, and an exact
one that no router can have. What workers have stored may be known late, or wrong.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import NamedTuple

from ownership.scheduling.decision import Placement, PlacementDecision
from ownership.scheduling.fleet import FleetView, Link, WorkerLoad
from ownership.scheduling.footprint import StateFootprint
from ownership.scheduling.ledger import Ledger, Work
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.worker import Worker
from ownership.simulator.sessions import LiveSession
from ownership.simulator.traces.block_runs import BlockRuns

VIEWS = ("ledger", "reports", "exact")


class Knowledge(NamedTuple):
    """The knowledge of a fleet's routers."""

    view: str = "ledger"
    """`ledger`: what a router sent and saw, corrected by reports; `reports`: loads as last
    reported; `exact`: loads of this moment, which sessions have ended, and which will fork."""
    reports: float | None = None
    """Seconds between two reports of a worker; None: there are none."""
    report_lag: float = 0.0
    """Seconds until a report has come."""
    lost_reports: float = 0.0
    """Share of the reports that are lost."""
    routers: int = 1
    """Each request arrives at one of them, drawn at random."""
    deltas: float | None = None
    """Seconds until a router knows what another has sent and seen; None: it never does."""
    prefix_lag: float = 0.0
    """Seconds until routers know what a worker has stored."""
    wrong_prefixes: float = 0.0
    """Share of the prefixes that workers hold of which routers believe another length, drawn evenly
    up to the prompt's."""


class _News(NamedTuple):
    """Chunks that a worker has just stored."""

    told_s: float
    """Time from which routers know it."""
    chain: BlockRuns
    begin: int
    """The first new chunk."""


class Router:
    """A router by its ledger: what it sent and saw, corrected by reports."""

    def __init__(self, policy: SchedulingPolicy, fleet: FleetView) -> None:
        self._policy, self._fleet = policy, fleet
        self.ledger = Ledger(fleet)

    def step(self, live: LiveSession, index: int, step: Step) -> Step:
        """Return a step with what the router knows of the session."""
        ledger = self.ledger
        return replace(
            step,
            owner=ledger.sessions.owner(step.session_id),
            output_tokens=ledger.output_tokens,
            forked=ledger.sessions.has_sibling(step.session_id, step.boundary_tokens),
        )

    def update(self, now_s: float) -> None:
        """Bring the loads up to date."""
        self.ledger.view(now_s)

    def decide(self, step: Step) -> PlacementDecision:
        """Return where a step runs, by the last update."""
        return self._policy.decide(step, self._fleet)

    def on_placed(self, live: LiveSession, worker: str) -> None:
        """A turn of a session was sent to the worker that will decode it."""

    def on_closed(self, live: LiveSession) -> None:
        """A session has ended. A real router is not told."""

    def on_report(self, worker: str, load: WorkerLoad, at_s: float) -> None:
        """A report of the load as of `at_s` has come."""
        self.ledger.reported(worker, load, at_s)


class ReportsRouter(Router):
    """A router that knows loads as last reported."""

    def __init__(self, policy: SchedulingPolicy, fleet: FleetView, own: FleetView) -> None:
        """`own`: a table for its ledger, which knows the sessions."""
        super().__init__(policy, fleet)
        self.ledger = Ledger(own)
        self._loads: dict[str, WorkerLoad] = {}

    def update(self, now_s: float) -> None:
        known = self.ledger.view(now_s)
        for name, load in self._loads.items():
            returning = self.ledger.sessions.returning(name)
            tokens = self.ledger.sessions.returning_tokens(name)
            self._fleet.set_load(name, load._replace(returning=returning, returning_tokens=tokens))
        self._fleet.prefill_demand = known.prefill_demand

    def on_report(self, worker: str, load: WorkerLoad, at_s: float) -> None:
        self._loads[worker] = load


class ExactRouter(Router):
    """A router that sees into the workers, and knows which sessions go on."""

    def __init__(
        self,
        policy: SchedulingPolicy,
        fleet: FleetView,
        own: FleetView,
        workers: Mapping[str, Worker],
    ) -> None:
        """`own`: a table for its ledger, which knows the length of answers."""
        super().__init__(policy, fleet)
        self.ledger, self._workers = Ledger(own), workers
        self._sessions = Counter[str]()
        self._owners: dict[int, str] = {}

    def step(self, live: LiveSession, index: int, step: Step) -> Step:
        known = super().step(live, index, step)
        return replace(known, owner=live.owner, forked=live.is_fork(index))

    def update(self, now_s: float) -> None:
        known = self.ledger.view(now_s)
        for name, worker in self._workers.items():
            load = worker.load()
            idle = max(0, self._sessions[name] - load.running_requests)
            tokens = self.ledger.sessions.returning_tokens(name)
            self._fleet.set_load(
                name, load._replace(returning=float(idle), returning_tokens=tokens)
            )
        self._fleet.prefill_demand = known.prefill_demand

    def on_placed(self, live: LiveSession, worker: str) -> None:
        self._sessions[worker] += 1
        self.on_closed(live)
        self._owners[live.number] = worker

    def on_closed(self, live: LiveSession) -> None:
        owner = self._owners.pop(live.number, None)
        if owner is not None:
            self._sessions[owner] -= 1


class Routers:
    """All routers of a fleet, and what they tell each other."""

    def __init__(
        self,
        loop: EventLoop,
        workers: Mapping[str, Worker],
        footprint: StateFootprint,
        links: Mapping[tuple[str, str], Link],
        knowledge: Knowledge,
        policy: Callable[[Random], SchedulingPolicy],
        seed: int,
        is_over: Callable[[], bool],
    ) -> None:
        """`policy` makes one for each router. Reports stop when `is_over`."""
        self._loop, self._workers, self._knowledge = loop, workers, knowledge
        self._is_over = is_over
        self._rng = Random(f"routers {seed}")
        self._at: dict[LiveRequest, int] = {}
        """The router of each request in flight."""

        def fleet() -> FleetView:
            return FleetView(footprint, [worker.view() for worker in workers.values()], links)

        def router(number: int) -> Router:
            chosen = policy(Random(seed) if not number else Random(f"{seed} {number}"))
            if knowledge.view == "exact":
                return ExactRouter(chosen, fleet(), fleet(), workers)
            if knowledge.view == "reports":
                return ReportsRouter(chosen, fleet(), fleet())
            return Router(chosen, fleet())

        self.routers: Sequence[Router] = [router(i) for i in range(knowledge.routers)]
        self._news: dict[str, deque[_News]] = {}
        """The chunks that each worker has stored in the last `prefix_lag` seconds."""
        if knowledge.prefix_lag:
            for name, worker in workers.items():
                news = self._news[name] = deque[_News]()
                worker.on_stored = partial(self._add_news, news)

    def start(self) -> None:
        """Announce the first reports; workers report one after the other."""
        interval_s = self._knowledge.reports
        if interval_s is not None:
            for number, worker in enumerate(self._workers.values()):
                first_s = interval_s * (number + 1) / len(self._workers)
                self._loop.at(first_s, self._report, worker, interval_s)

    def prefixes(self, chain: BlockRuns, chunk_tokens: int) -> dict[str, WorkerPrefix]:
        """Return how far each worker could resume a prompt, as routers know it, by name.

        A router knows of a worker what the directory records, which has no pages in HBM; of one
        without DRAM what stock engines publish, their pages. `chain`: the prompt up to the last
        boundary at which it could resume.
        """
        found, wrong_share = {}, self._knowledge.wrong_prefixes
        is_exact = self._knowledge.view == "exact"
        for name, worker in self._workers.items():
            known = chain.head(self._told(name, chain)) if self._news else chain
            sees_pages = is_exact or not worker.spec.capacity.dram
            prefix = worker.memory.worker_prefix(known, sees_pages=sees_pages)
            if prefix is None:
                continue
            if wrong_share and self._rng.random() < wrong_share:
                tokens = self._rng.randint(0, chain.num_blocks) * chunk_tokens
                prefix = WorkerPrefix(min(prefix.hbm_tokens, tokens), tokens, tokens)
            found[name] = prefix
        return found

    def arrive(self, request: LiveRequest) -> Router:
        """Return the router at which a request arrives, brought up to date."""
        number = self._rng.randrange(len(self.routers)) if len(self.routers) > 1 else 0
        self._at[request] = number
        router = self.routers[number]
        router.update(self._loop.now_s)
        return router

    def on_refused(self, request: LiveRequest) -> None:
        """A request was refused: it is sent nowhere."""
        del self._at[request]

    def on_sent(
        self, live: LiveSession, request: LiveRequest, step: Step, placement: Placement
    ) -> None:
        """A request was sent where it was placed."""
        work = Work.of(step, placement)
        self._tell(request, lambda router, now_s: router.ledger.sent(request, work, now_s))
        for router in self.routers:
            router.on_placed(live, placement.decode_worker)

    def on_handed_off(self, request: LiveRequest) -> None:
        """A remote prefill is done."""
        self._tell(request, lambda router, now_s: router.ledger.handed_off(request, now_s))

    def on_first_token(self, request: LiveRequest) -> None:
        """The first token of an answer has come."""
        self._tell(request, lambda router, now_s: router.ledger.first_token(request, now_s))

    def on_answered(self, request: LiveRequest) -> None:
        """An answer is complete."""
        tokens = request.output_tokens
        self._tell(request, lambda router, now_s: router.ledger.ended(request, tokens, now_s))
        del self._at[request]

    def on_closed(self, live: LiveSession) -> None:
        """A session has ended."""
        for router in self.routers:
            router.on_closed(live)

    def _add_news(self, news: deque[_News], chain: BlockRuns, begin: int) -> None:
        """A worker has stored a chain's chunks from `begin` on."""
        news.append(_News(self._loop.now_s + self._knowledge.prefix_lag, chain, begin))

    def _told(self, name: str, chain: BlockRuns) -> int:
        """Return the leading chunks of a prompt that a worker has not stored just now."""
        news, told = self._news[name], chain.num_blocks
        while news and news[0].told_s <= self._loop.now_s:
            news.popleft()
        for one in news:
            if one.chain.shared_with(chain) > one.begin:
                told = min(told, one.begin)
        return told

    def _tell(self, request: LiveRequest, event: Callable[[Router, float], None]) -> None:
        """Tell the router of a request at once, and the others later."""
        now_s, at, delay_s = self._loop.now_s, self._at[request], self._knowledge.deltas
        event(self.routers[at], now_s)
        if delay_s is not None:
            for number, router in enumerate(self.routers):
                if number != at:
                    self._loop.at(now_s + delay_s, event, router, now_s + delay_s)

    def _report(self, worker: Worker, interval_s: float) -> None:
        knowledge, now_s, load = self._knowledge, self._loop.now_s, worker.load()
        come_s = now_s + knowledge.report_lag
        for router in self.routers:
            if self._rng.random() >= knowledge.lost_reports:
                self._loop.at(come_s, router.on_report, worker.name, load, now_s)
        if not self._is_over():
            self._loop.at(now_s + interval_s, self._report, worker, interval_s)
