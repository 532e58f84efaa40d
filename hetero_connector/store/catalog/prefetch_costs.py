"""Is it worth prefetching an artifact for the evictions it causes? Pure: no store, no time.

A slot is taken from the next victim of eviction, and only if the expected gain is larger:
P(session returns) * seconds saved > P(victim is used meanwhile) * seconds lost without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_connector.store.catalog.nodes import Artifact

BATCH_BYTES = 4 << 20
"""In flight at once, or one artifact if that is larger: what a restore may find ahead of it."""


@dataclass(frozen=True)
class PrefetchCosts:
    """The engine's figures for prefetching. Called with the catalog's lock held."""

    stage_seconds: Callable[[Artifact], float] = lambda artifact: artifact.size_bytes / 3e9
    """Seconds to read an artifact from SSD; without measurements, at 3 GB/s."""
    used_within: Callable[[float, float], float] = lambda idle_s, within_s: 1.0
    """(idle_s, within_s) -> probability that an artifact last used so long ago is used so soon.
    Without knowledge 1, so that only artifacts of less value are displaced."""


DEFAULT_COSTS = PrefetchCosts()


@dataclass(frozen=True)
class PrefetchWorth:
    """Seconds gained and lost by having an artifact in DRAM."""

    costs: PrefetchCosts
    seconds_saved: Callable[[Artifact], float]
    """Seconds of computing that a request saves by finding an artifact."""

    def at_stake_s(self, artifact: Artifact) -> float:
        """Return what a request loses without it in DRAM: staging, or computing if cheaper."""
        compute_s = self.seconds_saved(artifact)
        if artifact.ssd is None:
            return compute_s
        return min(compute_s, self.costs.stage_seconds(artifact))

    def loss_s(self, victim: Artifact, idle_s: float, within_s: float) -> float:
        """Return the expected loss if a victim leaves that was last used `idle_s` ago."""
        return self.costs.used_within(idle_s, within_s) * self.at_stake_s(victim)
