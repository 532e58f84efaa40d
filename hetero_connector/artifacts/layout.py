"""The layout of an artifact's bytes.

An artifact of one state type is the concatenation of its layers in model order, each layer's
needed pages in token order, useful bytes only:

    [layer a: page i, page i+1, ...][layer b: ...] ...

A page here is the whole page of all tensor-parallel ranks (`artifacts.tensor_parallel`). Each rank
writes and reads its own bytes of it; bytes that ranks share are stored once. There is no header
and no padding, so sizes are pure arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from hetero_connector.artifacts.tensor_parallel import PageRun, is_writer, page_runs
from hetero_connector.spec.model_spec import LayerSpec, ModelSpec
from hetero_connector.spec.state_types import Family, StateType


@dataclass(frozen=True)
class Segment:
    """One layer's pages inside an artifact."""

    layer: LayerSpec
    first_page: int
    """Index of the first page in the request's block table."""
    num_pages: int
    offset: int
    """Bytes from the start of the artifact."""

    @property
    def size_bytes(self) -> int:
        """Useful bytes of the segment, of all ranks."""
        return self.num_pages * self.layer.whole_page_bytes


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
        self._bytes = lru_cache(maxsize=4096)(self._compute_bytes)
        self._rank_bytes = lru_cache(maxsize=4096)(self._compute_rank_bytes)
        self._runs: dict[tuple[str, int], tuple[PageRun, ...]] = {}

    def segments(self, state_type: StateType, start: int, end: int) -> tuple[Segment, ...]:
        """The segments of the artifact of `state_type` over tokens [start, end).

        `start` is a multiple of the model's alignment, `end` of its `handoff_step`.
        """
        return self._segments(state_type, start, end)

    def _compute_segments(self, state_type: StateType, start: int, end: int) -> tuple[Segment, ...]:
        segments, offset = [], 0
        for layer in self.model.layers_of(state_type):
            pages = layer.pages_needed(start, end)
            segments.append(Segment(layer, pages.start, len(pages), offset))
            offset += segments[-1].size_bytes
        return tuple(segments)

    def artifact_bytes(self, state_type: StateType, start: int, end: int) -> int:
        """The bytes of the whole artifact."""
        return self._bytes(state_type, *_first_of_its_length(state_type, start, end))

    def _compute_bytes(self, state_type: StateType, start: int, end: int) -> int:
        return sum(s.size_bytes for s in self.segments(state_type, start, end))

    def rank_bytes(self, state_type: StateType, start: int, end: int) -> int:
        """The bytes of an artifact that one rank reads."""
        return self._rank_bytes(state_type, *_first_of_its_length(state_type, start, end))

    def _compute_rank_bytes(self, state_type: StateType, start: int, end: int) -> int:
        segments = self.segments(state_type, start, end)
        return sum(s.num_pages * s.layer.page_bytes for s in segments)

    def page_runs(self, layer: LayerSpec, rank: int) -> tuple[PageRun, ...]:
        """The places of the rank's bytes in each whole page of a layer."""
        known = self._runs.get((layer.layer, rank))
        if known is None:
            known = self._runs[layer.layer, rank] = page_runs(layer, self.model.tp_size, rank)
        return known

    def is_writer(self, layer: LayerSpec, rank: int, chunk: int) -> bool:
        """True if the rank stores its bytes of a layer in a chunk; else another rank does."""
        return is_writer(layer, self.model.tp_size, rank, chunk)

    @cached_property
    def max_bytes(self) -> dict[StateType, int]:
        """The bytes of the largest artifact of each stored state type, which a slot must fit."""
        return {t: self._max_bytes(t) for t in self.model.state_types}

    def _max_bytes(self, state_type: StateType) -> int:
        if state_type.family is Family.PREFIX:
            return self.artifact_bytes(state_type, 0, self.chunk_tokens)
        step = self.model.handoff_step
        reach = max((layer.window or 0) for layer in self.model.layers_of(state_type))
        # A window may begin anywhere in a page. It needs the most pages at some place on the grid.
        boundaries = range(step, reach + self.model.alignment + 2 * step, step)
        return max(self.artifact_bytes(state_type, 0, b) for b in boundaries)


def _first_of_its_length(state_type: StateType, start: int, end: int) -> tuple[int, int]:
    """The key of a size: prefix-proportional artifacts of one length have one size."""
    return (0, end - start) if state_type.family is Family.PREFIX else (start, end)
