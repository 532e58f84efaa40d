"""The contract of a scheduling policy, and what every policy shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetero_connector.errors import NoWorkerError
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import StepPricing


class SchedulingPolicy(Protocol):
    """Decides where a step runs. Deterministic given its seed and the order of its calls.

    A policy reads the fleet and changes nothing but its own counters; whoever calls it carries
    the decision out and tells the fleet's figures anew. Raises NoWorkerError when no worker
    accepts requests.
    """

    @property
    def name(self) -> str:
        """As a configuration names it."""
        ...

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Where the step runs."""
        ...


def holders(step: Step, fleet: FleetView) -> list[int]:
    """Workers that others can read some of the prompt from, those with most first."""
    found = [
        (-prefix.dram_tokens, fleet.index[name])
        for name, prefix in step.prefixes.items()
        if prefix.dram_tokens > 0 and name in fleet.index
    ]
    return [worker for _, worker in sorted(found)]


def accepting_workers(pricing: StepPricing, pool: Sequence[int]) -> list[int]:
    """Those of the pool that accept requests; of the whole fleet where none of the pool does.

    Raises NoWorkerError where no worker does.
    """
    accepting = pricing.table.accepting
    found = [i for i in pool if accepting[i]]
    found = found or [i for i, x in enumerate(accepting.tolist()) if x]
    if not found:
        raise NoWorkerError
    return found
