"""NVIDIA Dynamo's KV router, as first documented."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView, Floats
from ownership.scheduling.policy import accepting_workers
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing


@dataclass(frozen=True)
class DynamoKv:
    """Take the worker with the greatest logit.

    logit = 2 x overlap - cache usage - normalised waiting. Overlap: matching share of the prompt.
    Cache usage: share of the KV cache in use. Waiting: waiting requests divided by the most that
    any worker has. Source: NVIDIA Dynamo documentation, "KV Router Performance Tuning", Cost
    Function Tuning. There a tie is drawn; here the first by name wins. Its softmax of a temperature
    above 0 is left out. `dynamo` is what later releases do.
    """

    overlap_weight: float = 2.0
    name: str = "dynamo_kv"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        found = accepting_workers(pricing, range(len(fleet)))
        at = found[int(self.logits(step, fleet, pricing)[found].argmax())]
        return PlacementDecision(step, Route(at, at), fleet.names, pricing)

    def logits(self, step: Step, fleet: FleetView, pricing: StepPricing) -> Floats:
        """Return `[workers]`; a higher value is better."""
        table = pricing.table
        overlap = np.zeros(len(fleet))
        for name, prefix in step.prefixes.items():
            if name in fleet.index:
                overlap[fleet.index[name]] = prefix.local_tokens / step.prompt_tokens
        usage = table.hbm_used / table.machine.hbm_bytes
        waiting = table.waiting / max(table.waiting.max(), 1.0)
        logits: Floats = self.overlap_weight * overlap - usage - waiting
        return logits
