"""Artifacts of little use: they leave their tier before the eviction policy is asked.

What the planner left alone because computing is cheaper, what was prefetched for a session
that did not come, and other workers' state that nobody used for a while. Nothing is dropped
while there is room.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.evictability import Standing
from hetero_connector.store.catalog.nodes import Artifact

_CAPACITY = 16_384


class Demoted:
    """By tier and state type, the newest of each. The caller holds the store's lock."""

    def __init__(self) -> None:
        self._places: defaultdict[tuple[Tier, StateType], dict[Artifact, None]]
        self._places = defaultdict(dict)

    def add(self, artifact: Artifact, tier: Tier) -> None:
        """It lies in `tier` and may leave it first. Of a chain add parents first."""
        place = self._places[tier, artifact.state_type]
        place.pop(artifact, None)
        place[artifact] = None
        if len(place) > _CAPACITY:
            del place[next(iter(place))]

    def used(self, artifacts: Iterable[Artifact]) -> None:
        """They were of use after all."""
        if not any(self._places.values()):
            return
        for artifact in artifacts:
            for tier in (Tier.DRAM, Tier.SSD):
                self._places[tier, artifact.state_type].pop(artifact, None)

    def pop(
        self, tier: Tier, state_type: StateType, standing: Callable[[Artifact], Standing]
    ) -> Artifact | None:
        """The next to leave, for good: what others rest on by now is not demoted any more."""
        place = self._places[tier, state_type]
        while place:
            artifact, _ = place.popitem()
            if standing(artifact) is Standing.LEAF:
                return artifact
        return None

    def clear(self) -> None:
        """Forget every artifact."""
        self._places.clear()
