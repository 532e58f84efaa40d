"""The restore plan of one request, and the rules that need no costs.

`plan_restore` finds the deepest boundary with a checkpoint, `plan_replay` the deepest boundary
whose windows can be rebuilt. The planner adds costs to choose among all of them.
"""

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

    Load `prefix_types` of every chunk in `chunks`, and `boundary_types` of the last one: those
    that the boundary needs (`ModelSpec.boundary_types_at`). Artifacts are not listed one by one,
    because a long prompt has thousands and plans are made between two steps.
    """

    boundary: int
    chunks: Sequence[StoredChunk]
    """The chunks that reach past the local tokens, in order; the last ends at `boundary`."""
    prefix_types: tuple[StateType, ...]
    boundary_types: tuple[StateType, ...]
    tiers: Sequence[Mapping[StateType, Tier]]
    """The tiers of the chunks' state, each combination once (`distinct_tiers`)."""
    replay_tokens: int = 0
    """Above 0, `boundary_types` is empty: the engine rebuilds boundary state by computing so many
    tokens before the boundary again. It must not write to the state loaded for them."""

    @property
    def resume_tokens(self) -> int:
        """The first token that the engine computes."""
        return self.boundary - self.replay_tokens


def plan_restore(
    model: ModelSpec,
    stored: Sequence[StoredChunk],
    local_tokens: int,
    limit_tokens: int,
) -> RestorePlan | None:
    """Return the deepest boundary in (`local_tokens`, `limit_tokens`] that can be restored exactly.

    `stored` is one unbroken chain from the first chunk. The engine already has the state of the
    first `local_tokens` tokens. Prefix-proportional state must be stored for every chunk that
    reaches past them; boundary state only at the boundary. None if there is no such boundary.
    """
    first = bisect_right(stored, local_tokens, key=_end)
    chunks = stored[first : bisect_right(stored, limit_tokens, key=_end)]
    tiers = distinct_tiers(chunks)
    num_types = len(model.state_types)
    if any(len(mapping) < num_types for mapping in tiers):  # else every chunk has everything
        chunks = chunks[: _restorable(model, chunks)]
        tiers = distinct_tiers(chunks)
    if not chunks:
        return None
    boundary = _end(chunks[-1])
    needed = model.boundary_types_at(boundary)
    return RestorePlan(boundary, chunks, model.prefix_types, needed, tiers)


def _restorable(model: ModelSpec, chunks: Sequence[StoredChunk]) -> int:
    """The number of chunks up to the deepest complete boundary."""
    best = 0
    for count, stored in enumerate(chunks, 1):
        if any(t not in stored.tiers for t in model.prefix_types):
            break
        if model.is_complete(stored.tiers.keys(), _end(stored)):
            best = count
    return best


@dataclass(frozen=True)
class WindowReplay:
    """The reach of an error in the windows of one model, in tokens.

    Where a boundary has no checkpoint but all prefix-proportional state before it is stored, a
    request may resume some tokens earlier. Those are computed again, against the stored
    prefix-proportional state, only for the windows they leave behind. Their first windows are
    wrong, because the tokens before them are missing. Each window layer passes the error on by its
    window less one token: the input of a layer at a token is the output of the layer below, which
    reads that layer's window of the token. So the k-th window layer is exact from the start of the
    replay plus the sum of `window - 1` over the window layers below it, and after the sum over all
    layers nothing of the error is left.
    """

    reach_tokens: int
    """Sum of `window - 1` over all window layers."""
    narrowest_tokens: int
    """The smallest `window - 1`."""
    alignment: int
    """A replay starts at a multiple of this."""

    @classmethod
    def of(cls, model: ModelSpec) -> WindowReplay:
        """`model` has window layers."""
        reaches = [x.boundary_tokens for x in model.layers_of(StateType.WINDOW_SWA)]
        return cls(sum(reaches), min(reaches), model.alignment)

    @property
    def tokens(self) -> int:
        """Tokens to compute again before a boundary, so that its windows are exact."""
        return -(-self.reach_tokens // self.alignment) * self.alignment

    def first_exact_boundary(self, start: int) -> int:
        """The first boundary whose windows are exact in a replay that began at `start`."""
        return start + self.reach_tokens

    def first_exact_token(self, start: int) -> int:
        """The first token from which on the window state of every layer is exact.

        Earlier than `first_exact_boundary`: a boundary's windows are state of earlier tokens.
        """
        return start + self.reach_tokens - self.narrowest_tokens


def plan_replay(
    model: ModelSpec,
    replay_tokens: int,
    stored: Sequence[StoredChunk],
    local_tokens: int,
    limit_tokens: int,
) -> RestorePlan | None:
    """Return the deepest boundary that a replay can reach; arguments as in `plan_restore`.

    None if the replay would begin within the local tokens: that would save nothing, because the
    engine computes those tokens anyway.
    """
    first = bisect_right(stored, local_tokens, key=_end)
    chunks = list(stored[first : bisect_right(stored, limit_tokens, key=_end)])
    for count, chunk in enumerate(chunks):
        if any(t not in chunk.tiers for t in model.prefix_types):
            del chunks[count:]
            break
    if chunks and _end(chunks[-1]) % model.alignment:
        del chunks[-1]  # a handoff's end: a replay starts and ends on the grid
    if not chunks or _end(chunks[-1]) - replay_tokens <= local_tokens:
        return None
    return RestorePlan(
        boundary=_end(chunks[-1]),
        chunks=chunks,
        prefix_types=model.prefix_types,
        boundary_types=(),
        tiers=distinct_tiers(chunks),
        replay_tokens=replay_tokens,
    )


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
