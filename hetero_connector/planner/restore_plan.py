"""From what the store holds to what a request should load."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import NamedTuple

from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType


class PlannedLoad(NamedTuple):
    """One artifact to load, and where it was when the plan was made.

    A named tuple, not a dataclass: a long prompt makes thousands between two steps.
    """

    id: ArtifactId
    start: int
    end: int
    """Tokens [start, end) of its chunk."""
    tier: Tier

    @property
    def state_type(self) -> StateType:
        """The artifact's state type."""
        return self.id.state_type


# `tuple.__new__` itself: a named tuple's own constructor is Python code, three times slower.
_new_id: Callable[[Iterable[object]], ArtifactId] = partial(tuple.__new__, ArtifactId)
_new_load: Callable[[Iterable[object]], PlannedLoad] = partial(tuple.__new__, PlannedLoad)


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
    prefix_types, boundary_types = set(model.prefix_types), set(model.boundary_types)
    num_types = len(model.state_types)
    for index, entry in enumerate(stored):
        end = entry.chunk.end
        if end > limit_tokens:
            break
        if end <= local_tokens:
            continue
        if len(entry.tiers) == num_types:
            best = index  # has them all
            continue
        if not entry.tiers.keys() >= prefix_types:
            break
        if entry.tiers.keys() >= boundary_types:
            best = index
    if best is None:
        return None
    return RestorePlan(stored[best].chunk.end, tuple(_loads(model, stored, local_tokens, best)))


def _loads(
    model: ModelSpec, stored: Sequence[StoredChunk], local_tokens: int, last: int
) -> list[PlannedLoad]:
    beyond = [entry for entry in stored[: last + 1] if entry.chunk.end > local_tokens]
    by_type = [_of_type(beyond, t) for t in model.prefix_types]
    loads = list(chain.from_iterable(zip(*by_type, strict=True)))  # chunk by chunk
    for state_type in model.boundary_types:
        loads += _of_type(beyond[-1:], state_type)
    return loads


def _of_type(entries: Sequence[StoredChunk], state_type: StateType) -> Iterator[PlannedLoad]:
    chunks = [entry.chunk for entry in entries]
    ids = map(_new_id, zip([c.key for c in chunks], repeat(state_type), strict=False))
    tiers = [entry.tiers[state_type] for entry in entries]
    fields = zip(ids, [c.start for c in chunks], [c.end for c in chunks], tiers, strict=True)
    return map(_new_load, fields)
