"""A schedule by one who knows what comes: a policy's placements, improved a few at a time.

The bound is below every schedule and `search` tries all placements of a few requests. Between them
is this: placements that a policy made are simulated again with a few of them changed, and the
changed ones kept where tasks wait less. What it finds is a schedule of the same engines, so the
best placement is as good or better; and it knew the future, so no policy need come as near. How far
it is from the best placement nobody knows: it ends where its tries do.
"""

from __future__ import annotations

from bisect import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from random import Random
from typing import NamedTuple

from ownership.scheduling.baselines import Baseline
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route
from ownership.simulator.figures import Tally, mean
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.engine import StepTimes
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.policies import PolicySpec
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

_NEAR = 12
"""Requests before and after one that it is exchanged with."""
_MEANWHILE = 50
"""Requests before and after one among which those at its worker are looked for."""
_WINDOWS_S = (1.0, 3.0, 10.0, 30.0)


class Turn(NamedTuple):
    """A request: the session's n-th that is placed. Where forks come together their order is
    that of the trace, so it is the request's place in the session."""

    session_id: str
    number: int


class Served(NamedTuple):
    """When a request was at the fleet."""

    turn: Turn
    arrived_s: float
    answered_s: float
    waited_s: float
    """Longer than it decodes alone."""


class Changes:
    """Of one schedule on at least two workers."""

    def __init__(
        self, placed: Mapping[Turn, Route], served: Sequence[Served], workers: int, rng: Random
    ) -> None:
        """`served`: in the order in which they came."""
        self._placed, self._served, self._workers, self._rng = placed, served, workers, rng
        self._waited_s = list(accumulate(one.waited_s for one in served))

    def draw(self) -> tuple[str, dict[Turn, Route]]:
        """A kind of change, and what is placed elsewhere by it."""
        at = self._drawn()
        kind = self._rng.choices(
            ("one", "exchange", "window", "few", "session"), (46, 20, 12, 14, 8)
        )[0]
        match kind:
            case "one":
                changed = self._few([self._beside(at)])
            case "exchange":
                changed = self._exchange(self._beside(at))
            case "window":
                changed = self._window(self._served[at].arrived_s)
            case "session":
                changed = self._session(self._served[at].turn)
            case _:
                near = self._near(self._beside(at))
                changed = self._few(
                    self._rng.sample(near, min(len(near), self._rng.choice((2, 3))))
                )
        return kind, changed

    def _drawn(self) -> int:
        """A request, by how long it waited."""
        drawn = self._rng.random() * self._waited_s[-1]
        return min(bisect(self._waited_s, drawn), len(self._served) - 1)

    def _beside(self, at: int) -> int:
        """The request itself, or one that was where it was prefilled or decoded meanwhile."""
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
        """Another route, most often without the network."""
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
        """The routes of two requests that came at about the same time."""
        turn = self._served[at].turn
        route = self._placed[turn]
        others = [self._served[i].turn for i in self._near(at)]
        others = [other for other in others if self._placed[other] != route]
        if not others:
            return self._few([at])
        other = self._rng.choice(others)
        return {turn: self._placed[other], other: route}

    def _window(self, begun_s: float) -> dict[Turn, Route]:
        """Two workers, for all that came within a while."""
        until_s = begun_s + self._rng.choice(_WINDOWS_S)
        workers = list(range(self._workers))
        first, second = self._rng.sample(workers, 2)
        workers[first], workers[second] = second, first
        turns = [x.turn for x in self._served if begun_s <= x.arrived_s <= until_s]
        return {turn: _renamed(self._placed[turn], workers) for turn in turns}

    def _session(self, turn: Turn) -> dict[Turn, Route]:
        """A session, from one of its turns on: it takes its state along."""
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
    """What came of placements."""

    wait_s: float
    """Of a task, on average; infinite where a request was refused."""
    ttft_s: float
    late_share: float
    """Of the time that tokens were decoded in: prefills in the same steps."""
    placed: Placements
    """All of them."""
    served: tuple[Served, ...]
    """In the order in which requests came."""


class Found(NamedTuple):
    """What a search did."""

    best: Outcome
    tried: Mapping[str, int]
    """Changes that were simulated, by their kind."""
    kept: Mapping[str, int]
    """Those that made tasks wait less."""


class Hindsight:
    """One case, simulated again and again."""

    def __init__(self, trace: Trace, fleet: FleetSpec, chunk_tokens: int) -> None:
        self._sessions = list(trace)
        self._fleet, self._block_tokens = fleet, trace.block_tokens
        self._shape = StateShape.of(fleet.model, chunk_tokens)
        times = StepTimes(fleet.workers[0].costs)
        self._decoding_s = [
            [times.decode_s(1, r.input_tokens, r.output_tokens) for r in session.requests]
            for session in self._sessions
        ]

    def outcome(self, told: Placements, policy: SchedulingPolicy) -> Outcome:
        """Of placing as told, and as the policy does what nothing was told about."""
        following = Following(told, policy)
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
        """The best of `tries` changes on changes, from `start` on."""
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
    """Places as it was told, as another policy does what it was not told about."""

    told: Placements
    policy: SchedulingPolicy
    base: Baseline = field(default_factory=Baseline)
    name: str = "hindsight"
    placed: dict[Turn, Route] = field(default_factory=dict)
    """What it has decided."""
    _turns: Counter[str] = field(default_factory=Counter)

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Where the step runs."""
        turn = Turn(step.session_id, self._turns[step.session_id])
        self._turns[step.session_id] += 1
        route = self.told.get(turn)
        if route is None:
            decision = self.policy.decide(step, fleet)
        else:
            sources = () if route.source is None else (route.source,)
            pricing = self.base.pricing(step, fleet, sources)
            decision = self.base.decision(step, fleet, pricing, route)
        self.placed[turn] = decision.route
        return decision


@dataclass(frozen=True)
class _Spec(PolicySpec):
    """Runs the policy that it was given, everything else by default."""

    follows: SchedulingPolicy = field(kw_only=True)

    def scheduler(self, rng: Random) -> SchedulingPolicy:
        return self.follows


class _Tally(Tally):
    """Keeps the requests, too."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[tuple[LiveRequest, float]] = []

    def on_answered(self, request: LiveRequest, now_s: float) -> None:
        super().on_answered(request, now_s)
        self.answers.append((request, now_s))
