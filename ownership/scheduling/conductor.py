"""Mooncake's Conductor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ownership.scheduling.decision import PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import accepting_workers, holders
from ownership.scheduling.step import Step, WorkerPrefix
from ownership.scheduling.step_pricing import Route, StepPricing

_NO_PREFIX = WorkerPrefix()


@dataclass(frozen=True)
class Conductor:
    """Take the prefill worker of least predicted TTFT and the decode worker of the fastest step.

    TTFT of a prefill worker: queue + prefill from its own prefix. If the fleet's longest prefix is
    more than `threshold` times its own, the worker may fetch it first, provided that the transfer
    is shorter than the prefill it saves; otherwise it computes the difference. Its early rejection
    is left out. Source: Qin et al., Mooncake (arXiv 2407.00079; FAST 2025): Algorithm 1, and
    section 6.2 on what is transferred.
    """

    threshold: float = 2.0
    """`kvcache_balancing_threshold`; the paper names no value."""
    name: str = "conductor"

    def __post_init__(self) -> None:
        if not self.threshold >= 1.0:
            raise ValueError(f"threshold is a ratio of at least 1, got {self.threshold}")

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        pricing = StepPricing(step, fleet, sources=holders(step, fleet)[:1])
        prefillers = accepting_workers(pricing, fleet.prefill_pool)
        prefill, source = self._prefill(step, fleet, pricing, prefillers)
        decode = self._decode(step, fleet, pricing)
        return PlacementDecision(step, Route(decode, prefill, source), fleet.names, pricing)

    def _prefill(
        self, step: Step, fleet: FleetView, pricing: StepPricing, found: Sequence[int]
    ) -> tuple[int, int | None]:
        """Return the prefill worker and the one it reads from."""
        local_s = pricing.local_ready_s
        own = {i: step.prefixes.get(fleet.names[i], _NO_PREFIX).local_tokens for i in found}
        routes: list[tuple[float, int, int | None]]
        routes = [(local_s.item(i), i, None) for i in found]
        for source in pricing.sources:
            best = pricing.prefills.readable[source]
            fetched_s = pricing.fetched_ready_s
            routes += [
                (fetched_s.item(0, i), i, source)
                for i in found
                if best > self.threshold * own[i] and fetched_s.item(0, i) < local_s.item(i)
            ]
        return min(routes, key=lambda route: route[0])[1:]

    def _decode(self, step: Step, fleet: FleetView, pricing: StepPricing) -> int:
        """Return the decode worker: that of the shortest step with the request in it."""
        found = accepting_workers(pricing, fleet.decode_pool)
        table = pricing.table
        context = table.context_tokens + step.prompt_tokens
        step_s = table.machine.decode_step_s + (table.running + 1.0) * table.machine.decode_s
        step_s = step_s + context * table.machine.context_s
        return min(found, key=step_s.__getitem__)
