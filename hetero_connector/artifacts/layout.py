"""Where each layer's pages lie inside an artifact's bytes.

An artifact of one state type is the concatenation, rank by rank, of that rank's
layers in model order, each layer's needed pages in token order, useful bytes only:

    [rank 0: [layer a: page i, page i+1, ...][layer b: ...]] [rank 1: ...] ...

State that every tensor-parallel rank holds alike (MLA, compressed states) is stored once:
rank 0 writes it and all ranks read it.

There is no header and no padding, so the size is pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hetero_connector.spec.model_spec import LayerSpec, ModelSpec
from hetero_connector.spec.state_types import Family, StateType


@dataclass(frozen=True)
class Segment:
    """One layer's pages inside one rank's share of an artifact."""

    layer: LayerSpec
    first_page: int
    """Index into the request's block table of the first page."""
    num_pages: int
    offset: int
    """Bytes from the start of the rank's share."""

    @property
    def size_bytes(self) -> int:
        """Useful bytes of the segment."""
        return self.num_pages * self.layer.page_bytes


class ArtifactLayout:
    """Sizes and segments of every artifact of one model."""

    def __init__(self, model: ModelSpec, chunk_tokens: int) -> None:
        if chunk_tokens <= 0 or chunk_tokens % model.alignment:
            raise ValueError(
                f"chunk_tokens={chunk_tokens} is not a positive multiple of the "
                f"model's alignment, {model.alignment} tokens"
            )
        self.model = model
        self.chunk_tokens = chunk_tokens
        self._segments = lru_cache(maxsize=4096)(self._compute_segments)
        self._rank_bytes = lru_cache(maxsize=4096)(self._compute_rank_bytes)
        self._shares = {
            t: 1 if all(x.replicated for x in model.layers_of(t)) else model.tp_size
            for t in model.state_types
        }

    def segments(self, state_type: StateType, start: int, end: int) -> tuple[Segment, ...]:
        """Segments of the artifact of `state_type` over tokens [start, end), one rank's share.

        `start` is a multiple of the model's alignment, `end` of its `handoff_step`.
        """
        return self._segments(state_type, start, end)

    def _compute_segments(self, state_type: StateType, start: int, end: int) -> tuple[Segment, ...]:
        segments, offset = [], 0
        for layer in self.model.layers_of(state_type):
            pages = layer.pages_needed(start, end)
            segments.append(Segment(layer, pages.start, len(pages), offset))
            offset += len(pages) * layer.page_bytes
        return tuple(segments)

    def rank_bytes(self, state_type: StateType, start: int, end: int) -> int:
        """Bytes of one rank's share of the artifact."""
        if state_type.family is Family.PREFIX:
            start, end = 0, end - start  # the same for every chunk of this length
        return self._rank_bytes(state_type, start, end)

    def _compute_rank_bytes(self, state_type: StateType, start: int, end: int) -> int:
        return sum(s.size_bytes for s in self.segments(state_type, start, end))

    def shares(self, state_type: StateType) -> int:
        """How many ranks' shares an artifact holds: 1 if they are all alike."""
        return self._shares[state_type]

    def share_of(self, state_type: StateType, rank: int) -> int:
        """The share that `rank` reads; it writes it only if the share's number is its own."""
        return min(rank, self.shares(state_type) - 1)

    def artifact_bytes(self, state_type: StateType, start: int, end: int) -> int:
        """Bytes of the whole artifact: all shares."""
        return self.shares(state_type) * self.rank_bytes(state_type, start, end)

    @cached_property
    def max_bytes(self) -> dict[StateType, int]:
        """The largest artifact of each stored state type: what a slot must hold."""
        return {t: self._max_bytes(t) for t in self.model.state_types}

    def _max_bytes(self, state_type: StateType) -> int:
        if state_type.family is Family.PREFIX:
            return self.artifact_bytes(state_type, 0, self.chunk_tokens)
        step = self.model.handoff_step
        reach = max((layer.window or 0) for layer in self.model.layers_of(state_type))
        boundaries = range(step, reach + 2 * step, step)
        return max(self.artifact_bytes(state_type, 0, b) for b in boundaries)
