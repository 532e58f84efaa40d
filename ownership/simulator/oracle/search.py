"""The best of all placements of a few requests, found by trying every one.

A policy's part in a simulation is a way (where to prefill, where to decode, whom to read from) for
each request in the order in which they come. Every sequence of ways is simulated, so no policy
that refuses nothing ends better than the best of them: exact, and exponential.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from random import Random
from typing import NamedTuple

from ownership.scheduling.baselines import Baseline
from ownership.scheduling.decision import Decision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import SchedulingPolicy
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Way
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import PolicySpec
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace

_MOST_RUNS = 100_000


class BestPlacement(NamedTuple):
    """What the search found."""

    cost: float
    ways: tuple[Way, ...]
    tried: int


def best_placement(
    trace: Trace,
    fleet: FleetSpec,
    chunk_tokens: int,
    cost: Callable[[FleetSimulation], float],
) -> BestPlacement:
    """The ways of least `cost` of a simulation that has run; of equal ones the first.

    Raises ValueError where there are too many to try, or where workers die: a request that is sent
    again is placed once more.
    """
    if fleet.failures:
        raise ValueError(f"{len(fleet.failures)} failures: only fleets without them are searched")
    requests = sum(len(session.requests) for session in trace)
    ways = list(_ways(len(fleet.workers)))
    tried = len(ways) ** requests
    if tried > _MOST_RUNS:
        raise ValueError(f"{requests} requests on {len(fleet.workers)} workers: {tried} placements")
    shape = StateShape.of(fleet.model, chunk_tokens)

    def cost_of(script: Sequence[Way]) -> float:
        policy = ScriptedSpec("search", "search", ways=tuple(script))
        run = FleetSimulation(fleet, policy, shape, iter(trace), trace.block_tokens, 0)
        run.run()
        return cost(run)

    best = min(product(ways, repeat=requests), key=cost_of)
    return BestPlacement(cost_of(best), best, tried)


@dataclass
class Scripted:
    """Places the n-th step as the script's n-th way says."""

    ways: Iterator[Way]
    base: Baseline = field(default_factory=Baseline)
    name: str = "search"

    def decide(self, step: Step, fleet: FleetView) -> Decision:
        """Where the step runs."""
        way = next(self.ways)
        sources = () if way.source is None else (way.source,)
        return self.base.chosen(step, fleet, self.base.start(step, fleet, sources), way)


@dataclass(frozen=True)
class ScriptedSpec(PolicySpec):
    """A policy that follows a script, everything else by default."""

    ways: tuple[Way, ...] = ()

    def scheduler(self, rng: Random) -> SchedulingPolicy:
        """A new scheduling policy."""
        return Scripted(iter(self.ways))


def _ways(workers: int) -> Iterator[Way]:
    """All there are: a fetch and a handoff together too."""
    for at in range(workers):
        yield Way(at, at)
    for decode, prefill in permutations(range(workers), 2):
        yield Way(decode, prefill)
    for prefill, source in permutations(range(workers), 2):
        yield from (Way(decode, prefill, source) for decode in range(workers))
