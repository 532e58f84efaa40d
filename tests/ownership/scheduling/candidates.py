"""All ways to serve a step, to compare a choice with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from ownership.scheduling import Placement, PlacementDecision
from ownership.scheduling.step_pricing import Route, StepPricing


def routes(pricing: StepPricing) -> Iterator[Route]:
    """Iterate over all possible routes."""
    accepting = np.flatnonzero(pricing.table.accepting).tolist()
    for worker in accepting:
        yield Route(worker, worker)
    for source in pricing.sources:
        lacking = pricing.prefills.readable[source] > pricing.prefills.resident
        yield from (Route(i, i, source) for i in accepting if lacking[i])
    for prefill in accepting:
        yield from (Route(i, prefill) for i in accepting if i != prefill)


def candidates(decision: PlacementDecision) -> dict[Placement, float]:
    """Return the price of each placement, by the figures of the decision."""
    pricing = decision.pricing
    return {
        replace(decision, route=route).placement: pricing.terms(route).total_s
        for route in routes(pricing)
    }
