"""Count what was computed again soon after its eviction: a larger tier would have kept it."""

from __future__ import annotations

from collections.abc import Callable

from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.containers import BoundedDict
from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.nodes import Artifact

WINDOW_S = 600.0
_MAX_REMEMBERED = 16_384
"""Evicted artifacts that are remembered: a few MiB of memory."""


class Regrets:
    """Remembers evicted artifacts, and looks whether one of them is saved again.

    A save is where the engine tells that tokens were computed, so matching costs nothing more.
    """

    def __init__(self, clock: Callable[[], float], recorder: Recorder) -> None:
        self._clock = clock
        self._recorder = recorder
        self._evicted = BoundedDict[ArtifactId, tuple[float, Tier]](_MAX_REMEMBERED)

    def on_evicted(self, artifact: Artifact, tier: Tier) -> None:
        """Remember an artifact whose last copy has left `tier`."""
        self._evicted[artifact.id] = self._clock(), tier

    def on_saved(self, artifact: Artifact) -> None:
        """Count the artifact if it was evicted within the last `WINDOW_S` seconds."""
        evicted = self._evicted.pop(artifact.id, None) if self._evicted else None
        if evicted is not None and self._clock() - evicted[0] <= WINDOW_S:
            chunk = artifact.node.chunk
            self._recorder.add(
                "heterocache_eviction_regret_tokens",
                chunk.end - chunk.start,
                tier=evicted[1].value,
                state_type=artifact.state_type.value,
            )
