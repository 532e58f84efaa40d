"""NVIDIA Dynamo's KV router of today."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ownership.scheduling.baselines import Baseline
from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView, Floats, Role
from ownership.scheduling.policy import accepting_workers
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing


@dataclass
class Dynamo:
    """Take the worker of least cost; ties are drawn.

    cost = scale x max(0, active prefill + prompt - credits) + active decode + prompt, in tokens
    (Dynamo's in blocks, which only divides both). Credits: 1 for a token in HBM, 0.75 for one that
    only DRAM has, 0.25 for one that only the SSD has. Active prefill are prompts without a first
    token, active decode the tokens of running requests; both are the router's own account of what
    it sent, as far as the caller's `FleetView` is one.

    With a prefill and a decode pool, the decode worker is the one of least
    max(0, active decode + prompt - credits). It also prefills what is short there: less than
    2,048 tokens without credit, and less than 0.7 of the prompt (conditional disaggregation).
    Otherwise the prefill worker is the one of least max(0, active prefill + prompt - credits).

    Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs` (`worker_logit`,
    `minimum_cost_index`), defaults in `scheduling/config.rs`, and
    `lib/kv-router/src/conditional_disagg.rs` (`IslBoundingPolicy`); read in November 2026. Queues
    of policy classes, topology and output blocks (all off by default) are left out.
    """

    rng: random.Random
    """Draws among workers of equal cost."""
    prefill_scale: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    affinity: bool = False
    """True: a session stays at its worker while that accepts requests (`session_affinity`, mode
    hard, with a time to live that no session outlives)."""
    local_tokens: float = 2_048.0
    local_share: float = 0.7
    """A decode worker prefills what is below both."""
    base: Baseline = field(default_factory=Baseline)
    name: str = "dynamo"

    def __post_init__(self) -> None:
        if not 0.0 <= self.prefill_scale < np.inf:
            raise ValueError(f"prefill_scale is at least 0 and finite, got {self.prefill_scale}")

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = self.base.pricing(step, fleet)
        has_pools = {Role.PREFILL, Role.DECODE} <= set(fleet.roles)
        found = accepting_workers(pricing, fleet.decode_pool if has_pools else range(len(fleet)))
        credits = self.credits(step, fleet)
        owner = fleet.index.get(step.owner or "")
        if self.affinity and owner in found:
            at = owner
        elif has_pools:
            active = pricing.table.context_tokens + step.prompt_tokens
            at = self._least(np.maximum(active - credits, 0.0), found)
        else:
            at = self._least(self.costs(step, pricing, credits), found)
        prefill = self._prefill(step, fleet, pricing, credits, at) if has_pools else at
        return self.base.decision(step, fleet, pricing, Route(at, prefill))

    def credits(self, step: Step, fleet: FleetView) -> Floats:
        """Return `[workers]`: tokens of the prompt that need not be computed, weighted by tier."""
        credits = np.zeros(len(fleet))
        for name, (hbm, dram, ssd) in step.prefixes.items():
            if name in fleet.index:
                in_memory = max(hbm, dram)
                credit = hbm + self.host_credit * (in_memory - hbm)
                credit += self.disk_credit * max(ssd - in_memory, 0)
                credits[fleet.index[name]] = credit
        return credits

    def costs(self, step: Step, pricing: StepPricing, credits: Floats) -> Floats:
        """Return `[workers]`: the cost in tokens at workers that prefill and decode."""
        table = pricing.table
        prefill = np.maximum(table.queued_tokens + step.prompt_tokens - credits, 0.0)
        costs: Floats = self.prefill_scale * prefill + table.context_tokens + step.prompt_tokens
        return costs

    def _prefill(
        self, step: Step, fleet: FleetView, pricing: StepPricing, credits: Floats, decode: int
    ) -> int:
        """Return the worker that prefills for a decode worker: it itself or one of the pool."""
        rest = step.prompt_tokens - float(credits[decode])
        if rest < self.local_tokens and rest < self.local_share * step.prompt_tokens:
            return decode
        active = pricing.table.queued_tokens + step.prompt_tokens
        pool = accepting_workers(pricing, fleet.prefill_pool)
        return self._least(np.maximum(active - credits, 0.0), pool)

    def _least(self, costs: Floats, found: Sequence[int]) -> int:
        least = min(costs[i] for i in found)
        return self.rng.choice([i for i in found if costs[i] == least])
