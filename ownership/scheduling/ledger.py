"""The fleet as one router knows it: by what it sent, by first tokens, and by ends.

A report is old when it arrives, and until the next one every decision sees the same idle worker.
So a router counts its own requests at once, and reports only correct the ledger: by the requests
that others sent.

Pure: no I/O, no clock, no threads. Times are seconds of one clock, and passed in.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Set
from dataclasses import dataclass
from typing import NamedTuple

from hetero_connector.planner.sessions import ThinkTimes
from ownership.scheduling.decision import Placement
from ownership.scheduling.fleet import FleetView, WorkerLoad
from ownership.scheduling.roles import PrefillDemand
from ownership.scheduling.session_table import SessionTable
from ownership.scheduling.step import Step, WorkerPrefix

_NO_PREFIX = WorkerPrefix()
_OUTPUT_WEIGHT = 0.01
_RESIDENCE_WEIGHT = 0.05
"""Weights of the newest value in moving means."""
_HISTORY = 512
"""Changes of a worker's load that are remembered until a report of that time has come."""


@dataclass(frozen=True)
class LedgerLimits:
    """The times after which a ledger no longer trusts what it knows, and its size."""

    trust_s: float = 10.0
    """Seconds for which a report says what others sent. Then nothing is known of them."""
    lost_s: float = 1800.0
    """Seconds after which a request is given up whose end never came."""
    max_requests: int = 65_536
    """In flight at once. Then the oldest are given up."""
    max_sessions: int = 65_536

    def __post_init__(self) -> None:
        limits = (self.trust_s, self.lost_s, self.max_requests, self.max_sessions)
        if not all(x > 0.0 for x in limits):
            raise ValueError(f"limits are above 0: {self}")


class Work(NamedTuple):
    """The work of one request, as routers tell each other."""

    prefill_worker: str
    decode_worker: str
    """Another one for a remote prefill, which ends with `handed_off`."""
    prompt_tokens: int
    new_tokens: int
    """Prompt tokens that the prefill worker computes."""
    session_id: str = ""
    """"" if it belongs to no session."""
    boundary_tokens: int = 0
    other_tokens: int = 0
    """Prompt tokens of the request's other prompts, which no later turn continues."""

    @classmethod
    def of(cls, step: Step, placement: Placement) -> Work:
        """Return the work of a step that is sent where it was placed."""
        prefixes = step.prefixes
        resumed = prefixes.get(placement.prefill_worker, _NO_PREFIX).local_tokens
        if placement.source_worker is not None:
            source = prefixes.get(placement.source_worker, _NO_PREFIX)
            resumed = max(resumed, source.dram_tokens)
        return cls(
            placement.prefill_worker,
            placement.decode_worker,
            step.prompt_tokens,
            max(1, step.prompt_tokens - resumed),
            step.session_id,
            step.boundary_tokens,
        )


class Share(NamedTuple):
    """A part of a worker's load."""

    new_tokens: int = 0
    """Prompt tokens of requests without a first token that are to be computed."""
    prefilling: int = 0
    """Requests without a first token."""
    decoding: int = 0
    prompt_tokens: int = 0
    """Prompt tokens of all of them."""

    def plus(self, change: Share) -> Share:
        """Return the sum of both."""
        tokens, prefilling, decoding, prompts = self
        more_tokens, more_prefilling, more_decoding, more_prompts = change
        return Share(
            tokens + more_tokens,
            prefilling + more_prefilling,
            decoding + more_decoding,
            prompts + more_prompts,
        )


class OthersShare(NamedTuple):
    """The part of a reported load that this router did not cause."""

    queued_tokens: int = 0
    waiting_requests: int = 0
    running_requests: int = 0
    context_tokens: int = 0


NO_OTHERS = OthersShare()


@dataclass(slots=True)
class _InFlight:
    work: Work
    sent_s: float
    at: str
    """The worker that has it now."""
    since_s: float
    """Time when it was sent there."""
    new_tokens: int
    """Left to compute there; 0 after the first token."""
    compute_s: float
    """Seconds of its prefill, as they were added to the demand."""
    expected_by: _Worker | None = None
    """The worker that will decode it, until it is handed off; None if it is not elsewhere."""


class _Worker:
    """The knowledge of one worker."""

    def __init__(self) -> None:
        self.own = Share()
        self.requests: dict[Hashable, _InFlight] = {}
        self.history: deque[tuple[float, Share]] = deque(maxlen=_HISTORY)
        """`own`, and since when; ascending."""
        self.expected = Share()
        """Decodes that other workers prefill. Apart from `own`: no report of this worker has
        them."""
        self.others = NO_OTHERS
        self.reported_s = -math.inf
        self.residence_s = 0.0
        self.accepting = True

    def change(self, change: Share, now_s: float) -> None:
        """Add a difference to this router's share."""
        self.own = self.own.plus(change)
        self.history.append((now_s, self.own))

    def own_at(self, time_s: float) -> Share | None:
        """Return this router's share then, and forget what was before. None: not known any more."""
        history = self.history
        if not history:
            return self.own
        if len(history) == history.maxlen and history[0][0] > time_s:
            return None
        before = Share()
        if history[0][0] <= time_s:
            while len(history) > 1 and history[1][0] <= time_s:
                history.popleft()
            before = history[0][1]
        return before


class Ledger:
    """Keeps a `FleetView` as current as one router can. Not thread-safe.

    O(log n) a call, amortised.
    """

    def __init__(self, fleet: FleetView, limits: LedgerLimits | None = None) -> None:
        """`fleet`: its costs are read, and its loads are written here only."""
        self._fleet, self.limits = fleet, limits or LedgerLimits()
        most = self.limits.max_sessions
        self.sessions = SessionTable(ThinkTimes(most), most)
        self.output_tokens = 256.0
        """Moving mean of the answers' tokens: the length that is expected of the next."""
        self.lost_requests = 0
        """Requests given up whose end never came."""
        self._in_flight: dict[Hashable, _InFlight] = {}
        """In the order in which they were sent."""
        self._workers = {name: _Worker() for name in fleet.names}
        self._demand = PrefillDemand()
        self._changed = set(fleet.names)
        self._trusted: dict[str, float] = {}
        """The workers that others use, and until when that is trusted; the oldest report first."""

    def __len__(self) -> int:
        """Return the number of requests in flight."""
        return len(self._in_flight)

    def __contains__(self, request: Hashable) -> bool:
        """Return True if the request is in flight."""
        return request in self._in_flight

    @property
    def workers(self) -> Set[str]:
        """The names of the workers."""
        return self._workers.keys()

    def sent(self, request: Hashable, work: Work, now_s: float) -> None:
        """A request is sent to its prefill worker. The one that decodes expects it from now on.

        Raises KeyError for an unknown worker, ValueError for a request that is in flight.
        """
        if request in self._in_flight:
            raise ValueError(f"request {request!r} is in flight: give each sending its own name")
        worker = self._workers[work.prefill_worker]
        compute_s = self._fleet.compute_s(work.prefill_worker, work.prompt_tokens, work.new_tokens)
        flight = _InFlight(work, now_s, work.prefill_worker, now_s, work.new_tokens, compute_s)
        self._in_flight[request] = worker.requests[request] = flight
        self._changed.add(flight.at)
        worker.change(Share(work.new_tokens, 1, 0, work.prompt_tokens), now_s)
        if work.decode_worker != work.prefill_worker:
            self._expect(flight)
        self._demand.add(compute_s, now_s)
        if work.session_id:
            self._changed |= self.sessions.on_turn_start(
                work.session_id, work.decode_worker, work.boundary_tokens, now_s, work.prompt_tokens
            )
        self._give_up_old(now_s)

    def handed_off(self, request: Hashable, now_s: float) -> None:
        """A remote prefill is done: the request is sent to the worker that decodes it."""
        flight = self._in_flight.get(request)
        if flight is None:
            return
        if flight.work.decode_worker not in self._workers:
            return self._remove(request, flight, now_s)
        self._take(request, flight, now_s)
        flight.at, flight.since_s, flight.new_tokens = flight.work.decode_worker, now_s, 1
        worker = self._workers[flight.at]
        worker.requests[request] = flight
        self._changed.add(flight.at)
        worker.change(Share(1, 1, 0, flight.work.prompt_tokens), now_s)

    def first_token(self, request: Hashable, now_s: float) -> None:
        """The first token of an answer has come."""
        flight = self._in_flight.get(request)
        if flight is None or not flight.new_tokens:
            return
        new_tokens, flight.new_tokens = flight.new_tokens, 0
        self._changed.add(flight.at)
        self._workers[flight.at].change(Share(-new_tokens, -1, 1, 0), now_s)

    def ended(self, request: Hashable, output_tokens: int, now_s: float) -> None:
        """An answer is complete, or its client has left after so many tokens; 0: not known."""
        flight = self._in_flight.get(request)
        if flight is None:
            return
        if not flight.new_tokens:  # one without a first token tells nothing of answers
            if output_tokens:
                self.output_tokens += _OUTPUT_WEIGHT * (output_tokens - self.output_tokens)
            work = flight.work
            computed = work.prompt_tokens - work.other_tokens + output_tokens
            self.sessions.on_computed(work.session_id, flight.at, computed)
            worker = self._workers[flight.at]
            worker.residence_s += _RESIDENCE_WEIGHT * (now_s - flight.since_s - worker.residence_s)
        self._remove(request, flight, now_s, is_answered=True)

    def failed(self, request: Hashable, now_s: float, *, was_computed: bool = False) -> None:
        """A request has ended without an answer: nothing is learned from it.

        Without a first token its prompt was not computed, unless `was_computed` says so. It may be
        sent again, and its prefill counts as often as it was computed.
        """
        flight = self._in_flight.get(request)
        if flight is None:
            return
        is_at_prefill = flight.new_tokens and flight.at == flight.work.prefill_worker
        if is_at_prefill and not was_computed:
            self._demand.take_back(flight.compute_s, flight.sent_s, now_s)
        self._remove(request, flight, now_s)

    def reported(self, worker: str, load: WorkerLoad, at_s: float) -> None:
        """A worker's own figures as of `at_s` have come. A report older than the last is ignored.

        Raises KeyError for an unknown worker.
        """
        found = self._workers[worker]
        if at_s <= found.reported_s:
            return
        found.reported_s, found.accepting = at_s, load.accepting
        own = found.own_at(at_s)
        if own is not None:
            found.others = self._others(load, own)
        self._changed.add(worker)
        self._trusted.pop(worker, None)
        if found.others != NO_OTHERS:
            self._trusted[worker] = at_s + self.limits.trust_s

    def accepts(self, worker: str, accepting: bool) -> None:
        """A worker accepts requests from now on, or none: it drains or does not answer."""
        self._workers[worker].accepting = accepting
        self._changed.add(worker)

    def set_fleet(self, fleet: FleetView, now_s: float) -> None:
        """Workers have come, or have ended with the requests and the sessions that they had."""
        for name in self._workers.keys() - fleet.index.keys():
            for request in list(self._workers[name].requests):
                self.failed(request, now_s)
            self.sessions.forget_worker(name)
            del self._workers[name]
        for name in fleet.names:
            self._workers.setdefault(name, _Worker())
        self._fleet, self._changed = fleet, set(fleet.names)

    def view(self, now_s: float) -> FleetView:
        """Return the fleet with its loads as of now."""
        self._changed |= self.sessions.expire(now_s)
        while self._trusted:
            name, until_s = next(iter(self._trusted.items()))
            if until_s > now_s:
                break
            del self._trusted[name]
            if name in self._workers:
                self._workers[name].others = NO_OTHERS
                self._changed.add(name)
        for name in self._changed & self._workers.keys():
            self._fleet.set_load(name, self.load(name))
        self._changed.clear()
        self._fleet.prefill_demand = self._demand.workers(now_s)
        return self._fleet

    def load(self, worker: str) -> WorkerLoad:
        """Return a worker's load. Bytes in flight are 0: they are moved before a report tells."""
        found = self._workers[worker]
        own, others = found.own, found.others
        running = own.decoding + min(own.prefilling, 1)  # an engine computes one long prompt first
        running += found.expected.decoding
        context_tokens = self._context_tokens(own.plus(found.expected)) + others.context_tokens
        used_bytes = context_tokens * self._fleet.footprint.page_bytes_per_token
        hbm_bytes = self._fleet.hbm_bytes(worker)
        return WorkerLoad(
            queued_tokens=own.new_tokens + others.queued_tokens,
            waiting_requests=max(0, own.prefilling - 1) + others.waiting_requests,
            running_requests=running + others.running_requests,
            context_tokens=context_tokens,
            hbm_used_bytes=min(int(used_bytes), hbm_bytes),
            residence_s=found.residence_s,
            accepting=found.accepting,
            returning=self.sessions.returning(worker),
            returning_tokens=self.sessions.returning_tokens(worker),
        )

    def report_age_s(self, worker: str, now_s: float) -> float:
        """Return the age of what is known of others' requests; infinite if nothing ever was.

        Everything else in `load` is this router's own, and of this moment.
        """
        return now_s - self._workers[worker].reported_s

    def changed_s(self, worker: str) -> float:
        """Return when the part that this router sent changed last; minus infinity: never."""
        history = self._workers[worker].history
        return history[-1][0] if history else -math.inf

    def own(self, worker: str) -> Share:
        """Return the part of a worker's load that this router sent."""
        return self._workers[worker].own

    def others(self, worker: str) -> OthersShare:
        """Return the part of a worker's load that others sent, as last reported."""
        return self._workers[worker].others

    def _context_tokens(self, share: Share) -> int:
        """Return the tokens that requests attend to: on average half of an answer is decoded."""
        return share.prompt_tokens + int(0.5 * self.output_tokens * share.decoding)

    def _others(self, load: WorkerLoad, own: Share) -> OthersShare:
        requests = load.waiting_requests + load.running_requests - own.prefilling - own.decoding
        if requests <= 0:
            return NO_OTHERS
        waiting = max(0, load.waiting_requests - max(0, own.prefilling - 1))
        waiting = min(requests, waiting)
        return OthersShare(
            max(0, load.queued_tokens - own.new_tokens),
            waiting,
            requests - waiting,
            max(0, load.context_tokens - self._context_tokens(own)),
        )

    def _expect(self, flight: _InFlight) -> None:
        """Let the worker that will decode a request expect it, if it is known."""
        name = flight.work.decode_worker
        flight.expected_by = worker = self._workers.get(name)
        if worker is not None:
            worker.expected = worker.expected.plus(Share(0, 0, 1, flight.work.prompt_tokens))
            self._changed.add(name)

    def _take(self, request: Hashable, flight: _InFlight, now_s: float) -> None:
        """Take a request from the worker that has it, and from the one that expects it."""
        expecting, flight.expected_by = flight.expected_by, None
        if expecting is not None:
            gone = Share(0, 0, -1, -flight.work.prompt_tokens)
            expecting.expected = expecting.expected.plus(gone)
            self._changed.add(flight.work.decode_worker)
        worker = self._workers[flight.at]
        del worker.requests[request]
        self._changed.add(flight.at)
        prefilling = int(flight.new_tokens > 0)
        worker.change(
            Share(-flight.new_tokens, -prefilling, prefilling - 1, -flight.work.prompt_tokens),
            now_s,
        )

    def _remove(
        self, request: Hashable, flight: _InFlight, now_s: float, *, is_answered: bool = False
    ) -> None:
        del self._in_flight[request]
        self._take(request, flight, now_s)
        session_id, boundary_tokens = flight.work.session_id, flight.work.boundary_tokens
        if session_id and is_answered:
            self._changed |= self.sessions.on_turn_end(session_id, boundary_tokens, now_s)
        elif session_id:
            self.sessions.on_turn_failed(session_id, boundary_tokens)

    def _give_up_old(self, now_s: float) -> None:
        while True:
            request, flight = next(iter(self._in_flight.items()))
            is_old = flight.sent_s + self.limits.lost_s < now_s
            if not is_old and len(self._in_flight) <= self.limits.max_requests:
                return
            self._give_up(request, flight, now_s)

    def _give_up(self, request: Hashable, flight: _InFlight, now_s: float) -> None:
        self.lost_requests += 1
        self._remove(request, flight, now_s)
