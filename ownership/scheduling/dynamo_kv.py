"""NVIDIA Dynamo's KV router, as first documented."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView, Floats
from ownership.scheduling.policy import accepting_workers
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing


@dataclass
class DynamoKv:
    """Take the worker with the greatest logit, or draw one by softmax.

    logit = 2 x overlap - cache usage - normalised waiting. Overlap: matching share of the prompt.
    Cache usage: share of the KV cache in use. Waiting: waiting requests divided by the most that
    any worker has. Source: NVIDIA Dynamo documentation, "KV Router Performance Tuning", Cost
    Function Tuning. There a tie is drawn; here the first by name wins, so that runs can be
    repeated. With a temperature, logits are divided by their range before the softmax
    (lib/kv-router, `softmax_sample`). `dynamo` is what later releases do.
    """

    rng: random.Random
    """Used only with a temperature."""
    temperature: float = 0.0
    """0: greedy."""
    overlap_weight: float = 2.0
    name: str = "dynamo_kv"

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < np.inf:
            raise ValueError(f"temperature is at least 0 and finite, got {self.temperature}")

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        found = accepting_workers(pricing, range(len(fleet)))
        logits = self.logits(step, fleet, pricing)[found]
        at = found[self._draw(logits) if self.temperature else int(logits.argmax())]
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

    def _draw(self, logits: Floats) -> int:
        spread = float(np.ptp(logits)) or 1.0
        weights = np.exp((logits - logits.max()) / (spread * self.temperature))
        return self.rng.choices(range(len(weights)), weights.tolist())[0]
