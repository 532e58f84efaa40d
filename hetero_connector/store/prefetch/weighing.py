"""Whether a session's state is worth the place of what would leave for it. Pure: no store, no time.

A slot is taken from what eviction would drop next, and only if the expected gain is larger:
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
    """What prefetching weighs. Called on the I/O thread."""

    stage_seconds: Callable[[Artifact], float] = lambda artifact: artifact.size_bytes / 3e9
    """Seconds to read an artifact from SSD; without measurements, at 3 GB/s."""
    used_within: Callable[[float, float], float] = lambda idle_s, within_s: 1.0
    """(idle_s, within_s) -> how likely what was last used so long ago is used so soon.
    Without knowledge: certainly, so that only what is worth less is displaced."""


DEFAULT_COSTS = PrefetchCosts()


@dataclass(frozen=True)
class Weighing:
    """Seconds on either side."""

    costs: PrefetchCosts
    seconds_saved: Callable[[Artifact], float]
    """What computing costs a request that does not find an artifact."""

    def at_stake_s(self, artifact: Artifact) -> float:
        """What a request loses that does not find it in DRAM: staging, or computing if cheaper."""
        compute_s = self.seconds_saved(artifact)
        if artifact.ssd is None:
            return compute_s
        return min(compute_s, self.costs.stage_seconds(artifact))

    def loss_s(self, victim: Artifact, idle_s: float, within_s: float) -> float:
        """Expected within `within_s` if the victim leaves DRAM, last used `idle_s` ago."""
        return self.costs.used_within(idle_s, within_s) * self.at_stake_s(victim)
