"""A schedule by one who knows what comes: a policy's placements, improved a few at a time.

The bound is below every schedule and `search` tries all placements of a few requests. Between them
is this: placements that a policy made are simulated again with a few of them changed, and the
changed ones kept where tasks wait less. What it finds is a schedule of the same engines, so the
best placement is as good or better; and it knew the future, so no policy need come as near. How far
it is from the best placement nobody knows: it ends where its tries do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from ownership.scheduling.baselines import Baseline
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.steps import StepTimes
from ownership.simulator.oracle.changes import Changes, Served, Turn
from ownership.simulator.policies import PolicySpec
from ownership.simulator.results import Tally, mean
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

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
    """One case, simulated again and again. Fleets that lose no worker only."""

    def __init__(self, trace: Trace, fleet: FleetSpec, chunk_tokens: int) -> None:
        """Raises ValueError where workers die: a request that is sent again is placed twice."""
        if fleet.failures:
            raise ValueError(f"{len(fleet.failures)} failures: only fleets without are searched")
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

    def served(self, request: LiveRequest, now_s: float) -> None:
        super().served(request, now_s)
        self.answers.append((request, now_s))
