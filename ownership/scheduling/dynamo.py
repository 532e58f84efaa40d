"""NVIDIA Dynamo's KV router of today."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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

    With a prefill and a decode pool, the prefill worker is the one of least
    max(0, active prefill + prompt - credits), and the decode worker that of least active decode:
    what it has of the prompt does not count there.

    Dynamo counts a block once that several requests at a worker share. Here each counts it: a
    router does not keep the chains of what is under way. So with long common prompts this policy
    spreads more than Dynamo's.

    Source: ai-dynamo/dynamo, `lib/kv-router/src/scheduling/selector/default.rs` (`worker_logit`,
    `minimum_cost_index`), defaults in `scheduling/config.rs`, and `build_decode_router_override`
    of its prefill router for pools; read in November 2026. Left out is what is off by default:
    session affinity, conditional disaggregation, queues of policy classes, topology and output
    blocks.
    """

    rng: random.Random
    """Draws among workers of equal cost."""
    prefill_scale: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    name: str = "dynamo"

    def __post_init__(self) -> None:
        if not 0.0 <= self.prefill_scale < np.inf:
            raise ValueError(f"prefill_scale is at least 0 and finite, got {self.prefill_scale}")

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet)
        has_pools = {Role.PREFILL, Role.DECODE} <= set(fleet.roles)
        found = accepting_workers(pricing, fleet.decode_pool if has_pools else range(len(fleet)))
        credits = self.credits(step, fleet)
        if has_pools:
            at = self._least(pricing.table.context_tokens, found)
        else:
            at = self._least(self.costs(step, pricing, credits), found)
        prefill = at
        if has_pools:
            active = pricing.table.queued_tokens + step.prompt_tokens
            pool = accepting_workers(pricing, fleet.prefill_pool)
            prefill = self._least(np.maximum(active - credits, 0.0), pool)
        return PlacementDecision(step, Route(at, prefill), fleet.names, pricing)

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

    def _least(self, costs: Floats, found: Sequence[int]) -> int:
        least = min(costs[i] for i in found)
        return self.rng.choice([i for i in found if costs[i] == least])
