"""The restore plan of one request, and how far a replay of its windows has to reach back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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
    """The chunks that reach past the local tokens, in order. The last ends at `boundary`, or it is
    cut there: then it ends after it, and no boundary state is needed (`ModelSpec.last_cut`)."""
    prefix_types: tuple[StateType, ...]
    boundary_types: tuple[StateType, ...]
    tiers: Sequence[Mapping[StateType, Tier]]
    """The tiers of the chunks' state, each combination once (`distinct_tiers`)."""
    replay_tokens: int = 0
    """Above 0, `boundary_types` is empty: the engine rebuilds boundary state by computing so many
    tokens before the boundary again. It must not write to the state loaded for them."""
    parked: bool = False
    """True: it is loaded between steps, while the request waits. Never with a replay."""

    @property
    def resume_tokens(self) -> int:
        """The first token that the engine computes."""
        return self.boundary - self.replay_tokens

    def cut_to(self, boundary: int) -> RestorePlan:
        """Return the plan for an earlier boundary that needs no boundary state."""
        chunks = [x for x in self.chunks if x.chunk.start < boundary]
        return replace(
            self,
            boundary=boundary,
            chunks=chunks,
            boundary_types=(),
            tiers=distinct_tiers(chunks),
        )

    @property
    def source_tiers(self) -> set[Tier]:
        """The tiers of everything that is loaded."""
        loaded = {tiers[t] for tiers in self.tiers for t in self.prefix_types}
        return loaded | {self.chunks[-1].tiers[t] for t in self.boundary_types}


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


def chunks_between(
    stored: Sequence[StoredChunk], local_tokens: int, limit_tokens: int, cut_tokens: int = 0
) -> Sequence[StoredChunk]:
    """The chunks that end in (`local_tokens`, `limit_tokens`]; usually all of them.

    With `cut_tokens`, a boundary after the local tokens, also the chunk that can be cut there.
    """
    first = 0
    if stored and chunk_end(stored[0]) <= local_tokens:
        first = bisect_right(stored, local_tokens, key=chunk_end)
    if first or (stored and chunk_end(stored[-1]) > limit_tokens):
        stop = bisect_right(stored, limit_tokens, key=chunk_end)
        if stop < len(stored) and max(stored[stop].chunk.start, local_tokens) < cut_tokens:
            stop += 1
        return stored[first:stop]
    return stored


def chunk_end(stored: StoredChunk) -> int:
    """The boundary at the end of a stored chunk, in tokens."""
    return stored.chunk.end
