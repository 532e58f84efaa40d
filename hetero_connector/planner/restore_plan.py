"""From what the store holds to what a request should load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True)
class PlannedLoad:
    """One artifact to load, and where it was when the plan was made."""

    chunk: ChunkRange
    state_type: StateType
    tier: Tier

    @property
    def id(self) -> ArtifactId:
        """The artifact's id."""
        return ArtifactId(self.chunk.key, self.state_type)


@dataclass(frozen=True)
class RestorePlan:
    """Resume at `boundary` tokens: `loads` in the order in which they should arrive."""

    boundary: int
    loads: tuple[PlannedLoad, ...]


def plan_restore(
    model: ModelSpec,
    stored: Sequence[StoredChunk],
    local_tokens: int,
    limit_tokens: int,
) -> RestorePlan | None:
    """The deepest boundary in (`local_tokens`, `limit_tokens`] that can be restored exactly.

    `stored` is one unbroken chain from the first chunk. The engine already holds the
    state of the first `local_tokens` tokens. Prefix-proportional state must be there
    for every chunk that reaches past them; boundary state only at the boundary.
    None when nothing beyond the local tokens can be restored.
    """
    best = None
    for index, entry in enumerate(stored):
        chunk = entry.chunk
        if chunk.end > limit_tokens:
            break
        if chunk.end <= local_tokens:
            continue
        if any(t not in entry.tiers for t in model.prefix_types):
            break
        if all(t in entry.tiers for t in model.boundary_types):
            best = index
    if best is None:
        return None
    return RestorePlan(stored[best].chunk.end, tuple(_loads(model, stored, local_tokens, best)))


def _loads(
    model: ModelSpec, stored: Sequence[StoredChunk], local_tokens: int, last: int
) -> list[PlannedLoad]:
    loads = [
        PlannedLoad(entry.chunk, t, entry.tiers[t])
        for entry in stored[: last + 1]
        if entry.chunk.end > local_tokens
        for t in model.prefix_types
    ]
    final = stored[last]
    loads += [PlannedLoad(final.chunk, t, final.tiers[t]) for t in model.boundary_types]
    return loads
