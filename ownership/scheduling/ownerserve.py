"""OwnerServe's policy: the cheapest of all placements of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hetero_connector.errors import NoWorkerError
from ownership.scheduling.decision import PlacementAction, PlacementDecision
from ownership.scheduling.fleet import FleetView
from ownership.scheduling.policy import holders
from ownership.scheduling.roles import Leaning
from ownership.scheduling.step import Step
from ownership.scheduling.step_pricing import Route, StepPricing
from ownership.scheduling.weights import PlacementWeights

_REMOTE = PlacementAction.REMOTE_PREFILL
_FETCH = PlacementAction.ARTIFACT_FETCH
_MIGRATE = PlacementAction.STATE_MIGRATION
_MAX_SOURCES = 4
"""Number of workers to read from that are priced: those with the longest prefixes."""


@dataclass(frozen=True)
class OwnerServe:
    """Take the cheapest placement by C = T_queue + T_compute + T_network + T_restore + prices.

    Among equals it prefers to stay, then never to transfer, then a fetch, then a remote prefill;
    within these the first by name. So nothing is moved without a gain.
    """

    weights: PlacementWeights = field(default_factory=PlacementWeights)
    """mu, kappa and the strength of roles."""
    moves: frozenset[PlacementAction] = frozenset({_REMOTE, _FETCH, _MIGRATE})
    """The moves over the network that are considered."""
    name: str = "ownerserve"

    def decide(self, step: Step, fleet: FleetView) -> PlacementDecision:
        owner = None if step.owner is None else fleet.index.get(step.owner)
        sources = self._sources(step, fleet)
        pricing = StepPricing(step, fleet, self.weights, sources, self._leaning(fleet))
        remote = _REMOTE in self.moves and len(fleet) > 1
        route, total_s = _cheapest(pricing, owner, remote)
        refusal = None
        if total_s == np.inf:
            if not pricing.table.accepting.any():
                raise NoWorkerError
            refusal = "the prompt's pages fit no worker"
        return PlacementDecision(step, route, fleet.names, pricing, refusal)

    def _leaning(self, fleet: FleetView) -> Leaning | None:
        if self.weights.role == 1.0 or len(fleet) == 1:
            return None
        _, terms = fleet.machines()
        return Leaning(self.weights.role, terms.shared, fleet.prefill_demand, fleet.accepting)

    def _sources(self, step: Step, fleet: FleetView) -> list[int]:
        """Return the workers to read from. Reading from the owner moves the session."""
        fetch = _FETCH in self.moves
        migrate = fetch if step.forked else _MIGRATE in self.moves
        found = holders(step, fleet)
        allowed = [i for i in found if (migrate if fleet.names[i] == step.owner else fetch)]
        return allowed[:_MAX_SOURCES]


def _cheapest(pricing: StepPricing, owner: int | None, remote: bool) -> tuple[Route, float]:
    """Return the cheapest route and its cost; among equals the one that moves least."""
    local_s = pricing.local_total_s
    at = int(local_s.argmin())
    if owner is not None and local_s[owner] == local_s[at]:
        at = owner
    best, best_s = Route(at, at), float(local_s[at])
    if pricing.sources and pricing.fetched_least_s <= best_s:
        fetched_s = pricing.fetched_total_s
        source, at = divmod(int(fetched_s.argmin()), fetched_s.shape[1])
        if fetched_s[source, at] < best_s:
            best, best_s = Route(at, at, pricing.sources[source]), float(fetched_s[source, at])
    if remote and pricing.remote_least_s <= best_s:
        remote_s = pricing.remote_total_s
        prefill, decode = divmod(int(remote_s.argmin()), remote_s.shape[1])
        if remote_s[prefill, decode] < best_s:
            best, best_s = Route(decode, prefill), float(remote_s[prefill, decode])
    return best, best_s
