"""A search for better placements than a policy's, with knowledge of all requests to come.

The placements that a policy made are simulated again with a few of them changed, and a change is
kept if tasks wait less. The result is a schedule of the same engines, so the best placement is as
good or better; how much better is unknown, because the search ends after a number of tries. It
knows the future, so a policy may never reach it.

Changes are random, but not uniform: a request is drawn with the weight of its waiting, and the
change is to its own placement or to one of the requests that shared its worker.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from random import Random
from typing import NamedTuple

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing
from ownership.simulator.figures import Tally, mean
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.policies import PolicySpec
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

_NEAR = 12
"""A request is exchanged with one of so many before or after it."""
_MEANWHILE = 50
"""Requests at the same worker are searched among so many before and after."""
_WINDOWS_S = (1.0, 3.0, 10.0, 30.0)


class Turn(NamedTuple):
    """A request by its session and its place in it: the n-th that is placed."""

    session_id: str
    number: int


class Served(NamedTuple):
    """The times of a request."""

    turn: Turn
    arrived_s: float
    answered_s: float
    waited_s: float
    """Seconds that it took longer than decoding alone."""


class Changes:
    """Draws changes to one schedule on at least two workers."""

    def __init__(
        self, placed: Mapping[Turn, Route], served: Sequence[Served], workers: int, rng: Random
    ) -> None:
        """`served`: in the order of arrivals."""
        self._placed, self._served, self._workers, self._rng = placed, served, workers, rng
        self._waited_s = list(accumulate(one.waited_s for one in served))

    def draw(self) -> tuple[str, dict[Turn, Route]]:
        """Draw a kind of change, and the placements that it changes."""
        at = self._drawn()
        kind = self._rng.choices(
            ("one", "exchange", "window", "few", "session"), (46, 20, 12, 14, 8)
        )[0]
        match kind:
            case "one":
                changed = self._few([self._neighbour(at)])
            case "exchange":
                changed = self._exchange(self._neighbour(at))
            case "window":
                changed = self._window(self._served[at].arrived_s)
            case "session":
                changed = self._session(self._served[at].turn)
            case _:
                near = self._near(self._neighbour(at))
                changed = self._few(
                    self._rng.sample(near, min(len(near), self._rng.choice((2, 3))))
                )
        return kind, changed

    def _drawn(self) -> int:
        """Draw a request with the weight of its waiting."""
        drawn = self._rng.random() * self._waited_s[-1]
        return min(bisect(self._waited_s, drawn), len(self._served) - 1)

    def _neighbour(self, at: int) -> int:
        """Draw the request itself, or one that was at its workers at the same time."""
        if self._rng.random() < 0.5:
            return at
        one, route = self._served[at], self._placed[self._served[at].turn]
        first = max(0, at - _MEANWHILE)
        others = [
            first + i
            for i, other in enumerate(self._served[first : at + _MEANWHILE])
            if other.answered_s > one.arrived_s
            and other.arrived_s < one.answered_s
            and self._placed[other.turn].prefill in (route.prefill, route.decode)
        ]
        return self._rng.choice(others or [at])

    def _near(self, at: int) -> range:
        return range(max(0, at - _NEAR), min(len(self._served), at + _NEAR + 1))

    def _few(self, requests: Sequence[int]) -> dict[Turn, Route]:
        turns = [self._served[i].turn for i in requests]
        return {turn: self._elsewhere(self._placed[turn]) for turn in turns}

    def _elsewhere(self, route: Route) -> Route:
        """Draw another route, most often one without the network."""
        rng, all_workers = self._rng, range(self._workers)
        other, second = rng.sample(all_workers, 2)
        if other == route.decode:
            other, second = second, other
        kind = rng.choices(("local", "remote", "prefill", "fetch", "source"), (11, 3, 3, 2, 1))[0]
        match kind:
            case "remote":
                return Route(other, second)
            case "prefill":
                return Route(route.decode, other)
            case "fetch":
                return Route(other, other, second)
            case "source":
                return Route(route.decode, route.decode, other)
        return Route(other, other)

    def _exchange(self, at: int) -> dict[Turn, Route]:
        """Exchange the routes of two requests that arrived at about the same time."""
        turn = self._served[at].turn
        route = self._placed[turn]
        others = [self._served[i].turn for i in self._near(at)]
        others = [other for other in others if self._placed[other] != route]
        if not others:
            return self._few([at])
        other = self._rng.choice(others)
        return {turn: self._placed[other], other: route}

    def _window(self, begun_s: float) -> dict[Turn, Route]:
        """Exchange two workers for all requests that arrived within a short time."""
        until_s = begun_s + self._rng.choice(_WINDOWS_S)
        workers = list(range(self._workers))
        first, second = self._rng.sample(workers, 2)
        workers[first], workers[second] = second, first
        turns = [x.turn for x in self._served if begun_s <= x.arrived_s <= until_s]
        return {turn: _renamed(self._placed[turn], workers) for turn in turns}

    def _session(self, turn: Turn) -> dict[Turn, Route]:
        """Move a session with its state, from one of its turns on."""
        route = self._elsewhere(self._placed[turn])
        source = self._placed[turn].decode
        changed = {turn: route._replace(source=None if source == route.prefill else source)}
        for other in self._served:
            if other.turn.session_id == turn.session_id and other.turn.number > turn.number:
                changed[other.turn] = Route(route.decode, route.decode)
        return changed


def _renamed(route: Route, workers: Sequence[int]) -> Route:
    source = None if route.source is None else workers[route.source]
    return Route(workers[route.decode], workers[route.prefill], source)


Placements = Mapping[Turn, Route]


class Outcome(NamedTuple):
    """The outcome of placements."""

    wait_s: float
    """Mean waiting of a task; infinite if a request was refused."""
    ttft_s: float
    late_share: float
    """Share of the decodes' time that prefills in the same steps added."""
    placed: Placements
    """All placements."""
    served: tuple[Served, ...]
    """All requests in the order of arrivals."""


class Found(NamedTuple):
    """The result of a search."""

    best: Outcome
    tried: Mapping[str, int]
    """Number of simulated changes by kind."""
    kept: Mapping[str, int]
    """Number of changes after which tasks waited less."""


class Hindsight:
    """Simulates one case many times."""

    def __init__(self, trace: Trace, fleet: FleetSpec, chunk_tokens: int) -> None:
        # Turns are told apart by the names of their sessions.
        self._sessions = [replace(session, is_named=True) for session in trace]
        self._fleet, self._block_tokens = fleet, trace.block_tokens
        self._shape = StateShape.of(fleet.model, chunk_tokens)
        times = fleet.workers[0].step_times()
        self._decoding_s = [
            [times.decode_s(1, r.input_tokens, r.output_tokens) for r in session.requests]
            for session in self._sessions
        ]

    def outcome(self, given: Placements, policy: SchedulingPolicy) -> Outcome:
        """Simulate given placements; the policy decides those that are not given."""
        following = Following(given, policy)
        spec = _Spec("hindsight", "hindsight", follows=following)
        sessions = iter(self._sessions)
        run = FleetSimulation(self._fleet, spec, self._shape, sessions, self._block_tokens, 0)
        run.tally = tally = _Tally()
        run.run()
        served = [
            Served(
                Turn(self._sessions[request.session].id, request.index),
                request.arrived_s,
                answered_s,
                max(0.0, answered_s - request.arrived_s - self._alone_s(request)),
            )
            for request, answered_s in tally.answers
        ]
        wait_s = float("inf") if tally.refused else mean(tally.task_wait_s)
        totals = [worker.engine.totals for worker in run.workers.values()]
        late_share = sum(x.late_s for x in totals) / max(1e-9, sum(x.decode_s for x in totals))
        came = tuple(sorted(served, key=lambda one: one.arrived_s))
        return Outcome(wait_s, mean(tally.ttft_s), late_share, following.placed, came)

    def improved(self, start: Outcome, policy: SchedulingPolicy, tries: int, rng: Random) -> Found:
        """Try `tries` changes, each from the best outcome so far, which is `start` at first."""
        best, tried, kept = start, Counter[str](), Counter[str]()
        changes = Changes(best.placed, best.served, len(self._fleet.workers), rng)
        for _ in range(tries):
            kind, changed = changes.draw()
            tried[kind] += 1
            found = self.outcome({**best.placed, **changed}, policy)
            if found.wait_s < best.wait_s:
                best = found
                kept[kind] += 1
                changes = Changes(best.placed, best.served, len(self._fleet.workers), rng)
        return Found(best, tried, kept)

    def _alone_s(self, request: LiveRequest) -> float:
        return self._decoding_s[request.session][request.index]


@dataclass
class Following:
    """Places requests as given; another policy decides those that are not given."""

    given: Placements
    policy: SchedulingPolicy
    name: str = "hindsight"
    placed: dict[Turn, Route] = field(default_factory=dict)
    """All its decisions."""
    _turns: Counter[str] = field(default_factory=Counter)

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Decide where a step runs."""
        turn = Turn(step.session_id, self._turns[step.session_id])
        self._turns[step.session_id] += 1
        route = self.given.get(turn)
        if route is None:
            decision = self.policy.decide(step, fleet)
        else:
            sources = () if route.source is None else (route.source,)
            pricing = StepPricing(step, fleet, sources=sources)
            decision = PlacementDecision(step, route, fleet.names, pricing)
        self.placed[turn] = decision.route
        return decision


@dataclass(frozen=True)
class _Spec(PolicySpec):
    """A policy with the defaults of everything else."""

    follows: SchedulingPolicy = field(kw_only=True)

    def scheduler(self, rng: Random, can_hand_off: bool = True) -> SchedulingPolicy:
        return self.follows


class _Tally(Tally):
    """Keeps the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[LiveRequest, float]] = []

    def on_answered(self, request: LiveRequest, now_s: float) -> None:
        super().on_answered(request, now_s)
        self.answers.append((request, now_s))
