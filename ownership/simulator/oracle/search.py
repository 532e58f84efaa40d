"""The best of all placements of a few requests, found by trying every one.

A policy gives each request, in the order in which they come, a route: the worker that prefills, the
one that decodes, and perhaps one to read from. Every sequence of routes is simulated, so no policy
that refuses nothing ends better than the best of them: exact, and exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from random import Random
from typing import NamedTuple

from ownership.scheduling.baselines import Baseline
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import PolicySpec
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

_MOST_RUNS = 100_000


class BestPlacement(NamedTuple):
    """What the search found."""

    cost: float
    routes: tuple[Route, ...]
    tried: int


def best_placement(
    trace: Trace,
    fleet: FleetSpec,
    chunk_tokens: int,
    cost: Callable[[FleetSimulation], float],
) -> BestPlacement:
    """The routes of least `cost` of a simulation that has run; of equal ones the first.

    Raises ValueError where there are too many to try, or where workers die: a request that is sent
    again is placed once more.
    """
    if fleet.failures:
        raise ValueError(f"{len(fleet.failures)} failures: only fleets without them are searched")
    requests = sum(len(session.requests) for session in trace)
    routes = list(_routes(len(fleet.workers)))
    tried = len(routes) ** requests
    if tried > _MOST_RUNS:
        raise ValueError(f"{requests} requests on {len(fleet.workers)} workers: {tried} placements")
    shape = StateShape.of(fleet.model, chunk_tokens)

    def cost_of(script: Sequence[Route]) -> float:
        policy = ScriptedSpec("search", "search", routes=tuple(script))
        run = FleetSimulation(fleet, policy, shape, iter(trace), trace.block_tokens, 0)
        run.run()
        return cost(run)

    best = min(product(routes, repeat=requests), key=cost_of)
    return BestPlacement(cost_of(best), best, tried)


@dataclass
class Scripted:
    """Places the n-th step as the script's n-th route says."""

    routes: Iterator[Route]
    base: Baseline = field(default_factory=Baseline)
    name: str = "search"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Where the step runs."""
        route = next(self.routes)
        sources = () if route.source is None else (route.source,)
        return self.base.decision(step, fleet, self.base.pricing(step, fleet, sources), route)


@dataclass(frozen=True)
class ScriptedSpec(PolicySpec):
    """A policy that follows a script, everything else by default."""

    routes: tuple[Route, ...] = ()

    def scheduler(self, rng: Random) -> SchedulingPolicy:
        """A new scheduling policy."""
        return Scripted(iter(self.routes))


def _routes(workers: int) -> Iterator[Route]:
    """All there are: a fetch and a handoff together too."""
    for at in range(workers):
        yield Route(at, at)
    for decode, prefill in permutations(range(workers), 2):
        yield Route(decode, prefill)
    for prefill, source in permutations(range(workers), 2):
        yield from (Route(decode, prefill, source) for decode in range(workers))
