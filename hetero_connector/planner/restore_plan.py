"""From what the store holds to what a request should load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import StoredChunk
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True)
class RestorePlan:
    """Resume at `boundary` tokens.

    Load `prefix_types` of every chunk in `chunks` and `boundary_types` of the last one.
    Nothing is spelled out by artifact: a long prompt has thousands, between two steps.
    """

    boundary: int
    chunks: Sequence[StoredChunk]
    """Those that reach past the local tokens, in order; the last ends at `boundary`."""
    prefix_types: tuple[StateType, ...]
    boundary_types: tuple[StateType, ...]


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
    first = last = None
    num_types = len(model.state_types)
    for index, entry in enumerate(stored):
        end = entry.chunk.end
        if end > limit_tokens:
            break
        if end <= local_tokens:
            continue
        first = index if first is None else first
        if len(entry.tiers) == num_types:  # everything: no need to look closer
            last = index
        elif any(t not in entry.tiers for t in model.prefix_types):
            break
        elif all(t in entry.tiers for t in model.boundary_types):
            last = index
    if first is None or last is None:
        return None
    chunks = stored[first : last + 1]
    return RestorePlan(chunks[-1].chunk.end, chunks, model.prefix_types, model.boundary_types)
