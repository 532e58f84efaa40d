"""From what the store holds to what a request should load."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import StoredChunk, Tier, distinct_tiers
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True)
class RestorePlan:
    """Load state up to `boundary` tokens and compute from `resume_tokens` on.

    Load `prefix_types` of every chunk in `chunks` and `boundary_types` of the last one, which are
    those that the boundary needs (`ModelSpec.boundary_types_at`).
    Nothing is spelled out by artifact: a long prompt has thousands, between two steps.
    """

    boundary: int
    chunks: Sequence[StoredChunk]
    """Those that reach past the local tokens, in order; the last ends at `boundary`."""
    prefix_types: tuple[StateType, ...]
    boundary_types: tuple[StateType, ...]
    held: Sequence[Mapping[StateType, Tier]]
    """What the chunks hold where, each combination once (`distinct_tiers`)."""
    replay_tokens: int = 0
    """Above 0 `boundary_types` is empty: the engine rebuilds boundary state by computing so
    many tokens before the boundary again, whose loaded state it must not write to."""

    @property
    def resume_tokens(self) -> int:
        """The engine computes from here."""
        return self.boundary - self.replay_tokens


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
    first = bisect_right(stored, local_tokens, key=_end)
    chunks = stored[first : bisect_right(stored, limit_tokens, key=_end)]
    held = distinct_tiers(chunks)
    num_types = len(model.state_types)
    if any(len(tiers) < num_types for tiers in held):  # else no need to look closer
        chunks = chunks[: _restorable(model, chunks)]
        held = distinct_tiers(chunks)
    if not chunks:
        return None
    boundary = _end(chunks[-1])
    needed = model.boundary_types_at(boundary)
    return RestorePlan(boundary, chunks, model.prefix_types, needed, held)


def _restorable(model: ModelSpec, chunks: Sequence[StoredChunk]) -> int:
    """How many of `chunks` lead to the deepest boundary that is complete."""
    best = 0
    for count, stored in enumerate(chunks, 1):
        if any(t not in stored.tiers for t in model.prefix_types):
            break
        if model.is_whole(stored.tiers.keys(), _end(stored)):
            best = count
    return best


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
