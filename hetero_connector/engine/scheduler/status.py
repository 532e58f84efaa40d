"""Describe a running engine: its tiers, its health, its last decisions and what it has learned."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from hetero_connector.engine.scheduler.predictions import Predictions
from hetero_connector.planner.profile import CostProfile
from hetero_connector.store.artifact_store import ArtifactStore

STATUS_FORMAT = 1
MakeProfile = Callable[[], CostProfile]


class EngineStatus:
    """Makes the answer to `{"get": "status"}`. Any thread may call it."""

    def __init__(
        self,
        about: Mapping[str, Any],
        store: ArtifactStore,
        predictions: Predictions,
        profile: MakeProfile,
    ) -> None:
        """`about`: what does not change while the engine runs; `profile`: what it has learned."""
        self._about = {**about, "started": time.time()}
        self._store = store
        self._predictions = predictions
        self._profile = profile

    def __call__(self) -> dict[str, Any]:
        return {
            "format": STATUS_FORMAT,
            "now": time.time(),
            "engine": self._about,
            "health": self._store.health()._asdict(),
            "tiers": [
                {
                    "tier": x.tier.value,
                    "capacity_bytes": x.capacity_bytes,
                    "artifacts": {kind.value: n for kind, n in x.artifacts.items()},
                    "bytes": {kind.value: n for kind, n in x.bytes.items()},
                }
                for x in self._store.occupancy()
            ],
            "decisions": self._predictions.recent(),
            "costs": self._profile().as_json(),
        }
