"""From what the store holds to what a request should load.

Rebuilding windows by computing the last tokens before a boundary once more.

Where a boundary has no checkpoint but all prefix-proportional state before it, a request may
resume some tokens earlier: those are computed again, against the stored prefix-proportional
state, only for the windows they leave behind. Their first windows are wrong, because what
lies before them is missing; each window layer passes the error on by its window less one
token, so after the sum over all layers nothing of it is left.
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


@dataclass(frozen=True)
class WindowReplay:
    """How far an error in the windows reaches in one model, in tokens.

    The k-th window layer's state is exact from the replay's start plus the sum of
    `window - 1` over the window layers below it: its input at a token is the output of the
    layer below, which reads that layer's window of the token.
    """

    reach_tokens: int
    """Sum of `window - 1` over all window layers."""
    narrowest_tokens: int
    """The smallest `window - 1`."""
    alignment: int
    """A replay starts at a multiple of this."""

    @classmethod
    def of(cls, model: ModelSpec) -> WindowReplay:
        """For a model that has window layers."""
        reaches = [x.boundary_tokens for x in model.layers_of(StateType.WINDOW_SWA)]
        return cls(sum(reaches), min(reaches), model.alignment)

    @property
    def tokens(self) -> int:
        """Tokens before a boundary to compute again, so that its windows are exact."""
        return -(-self.reach_tokens // self.alignment) * self.alignment

    def checkpoints_from(self, start: int) -> int:
        """The first boundary whose windows are exact in a replay that began at `start`."""
        return start + self.reach_tokens

    def pages_from(self, start: int) -> int:
        """The first token from which on every layer's window state is exact.

        Earlier than `checkpoints_from`: a boundary's windows are state of earlier tokens.
        """
        return start + self.reach_tokens - self.narrowest_tokens


def plan_replay(
    model: ModelSpec,
    replay_tokens: int,
    stored: Sequence[StoredChunk],
    local_tokens: int,
    limit_tokens: int,
) -> RestorePlan | None:
    """The deepest boundary that can be reached by a replay; arguments as in `plan_restore`.

    None where it would have to begin within what the engine holds: that saves nothing, the
    engine computes those tokens as it is.
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
        held=distinct_tiers(chunks),
        replay_tokens=replay_tokens,
    )


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
