"""The contract of a scheduling policy, and helpers that every policy shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hetero_connector.errors import NoWorkerError
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import StepPricing


class SchedulingPolicy(Protocol):
    """Decides where a step runs. Deterministic for a given seed and order of calls.

    A policy reads the fleet and changes only its own counters. The caller carries out the decision
    and updates the fleet's figures.
    """

    @property
    def name(self) -> str:
        """The policy's name in a configuration."""
        ...

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        """Return where the step runs. Raises NoWorkerError if no worker accepts requests."""
        ...


def holders(step: Step, fleet: FleetView) -> list[int]:
    """Return the workers that others can read a part of the prompt from, longest prefix first."""
    found = [
        (-prefix.dram_tokens, fleet.index[name])
        for name, prefix in step.prefixes.items()
        if prefix.dram_tokens > 0 and name in fleet.index
    ]
    return [worker for _, worker in sorted(found)]


def accepting_workers(pricing: StepPricing, pool: Sequence[int]) -> list[int]:
    """Return the workers of the pool that accept requests; of the whole fleet if none does.

    Raises NoWorkerError if no worker accepts requests.
    """
    accepting = pricing.table.accepting
    found = [i for i in pool if accepting[i]]
    found = found or [i for i, x in enumerate(accepting.tolist()) if x]
    if not found:
        raise NoWorkerError
    return found
