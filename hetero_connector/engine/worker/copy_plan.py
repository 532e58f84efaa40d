"""Plan the copies of artifacts to or from pages, as arrays over all artifacts of one shape.

Chunks of equal length have equally many pages of each layer, and the layers of a KV cache group
have the same pages. So the plan of a hundred thousand tokens takes hardly longer than that of one
chunk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.layout import ArtifactLayout, Segment
from hetero_connector.engine.messages import ArtifactCopy, ArtifactSpan, Blocks, Load, PageCopy
from hetero_connector.spec import Family, LayerSpec, StateType

IndexArray = npt.NDArray[np.int64]
_Tables = Mapping[tuple[StateType, int], "_Table"]


@dataclass(frozen=True, eq=False)
class Copies:
    """Copies between pages and artifacts of one shape."""

    shape: Hashable
    """Equal for artifacts whose segments have equal page counts and offsets."""
    segments: tuple[Segment, ...]
    """Each layer's pages in the first of the artifacts."""
    pages_of: tuple[int, ...]
    """The index in `block_ids` of each segment: layers of a group share their pages."""
    block_ids: tuple[IndexArray, ...]
    """Each `[artifacts, pages]`; id 0 is not copied."""
    offsets: IndexArray
    """`[artifacts]`: bytes from the arena's start to the artifact."""


class CopyPlanner:
    """Plans one rank's copies. Null pages and pages outside the given blocks are left out."""

    def __init__(self, layout: ArtifactLayout, rank: int, layers: Container[str]) -> None:
        """`layers`: those of this rank's pipeline stage; an artifact has the layers of all."""
        self._layout = layout
        self._rank = rank
        self._layers = layers

    def plan_loads(self, loads: Iterable[Load]) -> list[Copies]:
        """Return every copy of some loads."""
        planned: list[Copies] = []
        for load in loads:
            tables = _tables(load.blocks)
            for artifacts in self._by_shape(load.spans):
                planned += artifacts.copies(artifacts.block_ids(tables))
        return _joined(planned)

    def plan_layerwise(self, loads: Iterable[Load]) -> tuple[list[Copies], list[Copies]]:
        """Plan loads in two parts: copies before the forward, and copies that may overlap with it.

        A layer writes the state of the tokens from `Load.resume_tokens` on before it calls its load
        hook. A page that holds such tokens and loaded ones must be complete by then.
        """
        before: list[Copies] = []
        overlapped: list[Copies] = []
        for load in loads:
            tables = _tables(load.blocks)
            for artifacts in self._by_shape(load.spans):
                ids = artifacts.block_ids(tables)
                whole = [x.end_by(load.resume_tokens) for x in artifacts.pages]
                pairs = list(zip(whole, ids, strict=True))
                before += artifacts.copies([np.where(w, 0, x) for w, x in pairs])
                overlapped += artifacts.copies([np.where(w, x, 0) for w, x in pairs])
        return _joined(before), _joined(overlapped)

    def plan_saves(self, copies: Iterable[PageCopy]) -> list[Copies]:
        """Return every copy of some saves. Ranks that have the same bytes save them by turns."""
        planned: list[Copies] = []
        for copy in copies:
            tables = _tables(copy.blocks)
            for artifact in copy.artifacts:
                planned += self._plan_save(artifact, tables)
        return _joined(planned)

    def _plan_save(self, artifact: ArtifactCopy, tables: _Tables) -> Iterator[Copies]:
        state_type, start, end, offset = artifact
        found = self._one(ArtifactSpan(state_type, start, end, end - start, [offset]), 0)
        ids = found.block_ids(tables)
        if self._layout.model.tp_size > 1:
            chunk = start // self._layout.chunk_tokens
            own = [self._layout.is_writer(x.layer, self._rank, chunk) for x in found.pages]
            ids = [x if w else np.zeros_like(x) for w, x in zip(own, ids, strict=True)]
        return found.copies(ids)

    def _by_shape(self, spans: Iterable[ArtifactSpan]) -> Iterator[_Artifacts]:
        """Yield the artifacts of the spans, together where they have one shape."""
        for span in spans:
            whole = (span.end - span.start) // span.chunk_tokens
            if span.state_type.family is Family.PREFIX and whole:
                yield self._chunks(span, whole)
                rest = range(whole, len(span.offsets))
            else:
                rest = range(len(span.offsets))
            for index in rest:
                yield self._one(span, index)

    def _chunks(self, span: ArtifactSpan, count: int) -> _Artifacts:
        """Return the first chunks of a span, which are whole."""
        first = self._one(span, 0)
        steps = np.arange(count)[:, None] * span.chunk_tokens
        pages = [_Pages(x.layer, x.positions + steps // x.layer.block_tokens) for x in first.pages]
        offsets = np.asarray(span.offsets[:count], np.int64)
        return replace(first, pages=pages, offsets=offsets)

    def _one(self, span: ArtifactSpan, index: int) -> _Artifacts:
        start = span.start + index * span.chunk_tokens
        end = min(start + span.chunk_tokens, span.end)
        all_segments = self._layout.segments(span.state_type, start, end)
        own = (x for x in all_segments if x.layer.layer in self._layers)
        segments = tuple(x for x in own if x.num_pages)
        known: dict[tuple[int, int, int, int], int] = {}
        pages: list[_Pages] = []
        pages_of = []
        for segment in segments:
            layer = segment.layer
            key = (layer.group, segment.first_page, segment.num_pages, layer.parts)
            if key not in known:
                known[key] = len(pages)
                positions = segment.first_page + np.arange(segment.num_pages)[None, :]
                pages.append(_Pages(layer, positions))
            pages_of.append(known[key])
        is_prefix = span.state_type.family is Family.PREFIX
        size: Hashable = end - start if is_prefix else tuple(x.num_pages for x in all_segments)
        offsets = np.array([span.offsets[index]], np.int64)
        return _Artifacts((span.state_type, size), segments, tuple(pages_of), pages, offsets)


class _Table(NamedTuple):
    """`Blocks`, whose ids are made an array once for all artifacts."""

    first_page: int
    ids: IndexArray


def _tables(blocks: Mapping[tuple[StateType, int], Blocks]) -> _Tables:
    return {key: _Table(x.first_page, np.asarray(x.ids, np.int64)) for key, x in blocks.items()}


@dataclass(frozen=True)
class _Pages:
    """The pages that some layers of a group have in artifacts."""

    layer: LayerSpec
    """One of the layers."""
    positions: IndexArray
    """`[artifacts, pages]`: indices into the request's block table."""

    def block_ids(self, tables: _Tables) -> IndexArray:
        """Return the block of each page; 0 if it is outside the tables."""
        first_page, ids = tables[self.layer.state_type, self.layer.group]
        positions = self.positions - first_page
        if not len(ids):
            return np.zeros_like(positions)
        is_inside = (positions >= 0) & (positions < len(ids))
        return np.where(is_inside, ids.take(positions, mode="clip"), 0)

    def end_by(self, tokens: int) -> npt.NDArray[np.bool_]:
        """Return which pages end at or before a token."""
        return self.positions < tokens // self.layer.block_tokens


@dataclass(frozen=True)
class _Artifacts:
    """Artifacts of one shape, and their pages. The fields are those of `Copies`."""

    shape: Hashable
    segments: tuple[Segment, ...]
    pages_of: tuple[int, ...]
    pages: Sequence[_Pages]
    offsets: IndexArray

    def block_ids(self, tables: _Tables) -> list[IndexArray]:
        return [x.block_ids(tables) for x in self.pages]

    def copies(self, block_ids: Sequence[IndexArray]) -> Iterator[Copies]:
        """Yield these copies without the artifacts that have no page to copy."""
        is_copied = np.zeros(len(self.offsets), np.bool_)
        for ids in block_ids:
            is_copied |= ids.any(axis=1)
        if not is_copied.any():
            return
        kept, offsets = tuple(block_ids), self.offsets
        if not is_copied.all():
            kept, offsets = tuple(x[is_copied] for x in block_ids), offsets[is_copied]
        yield Copies(self.shape, self.segments, self.pages_of, kept, offsets)


def _joined(copies: Iterable[Copies]) -> list[Copies]:
    """Join copies of equal shape."""
    by_shape: defaultdict[Hashable, list[Copies]] = defaultdict(list)
    for some in copies:
        by_shape[some.shape].append(some)
    return [_join(alike) for alike in by_shape.values()]


def _join(copies: Sequence[Copies]) -> Copies:
    if len(copies) == 1:
        return copies[0]
    ids = zip(*(x.block_ids for x in copies), strict=True)
    return replace(
        copies[0],
        block_ids=tuple(np.concatenate(x) for x in ids),
        offsets=np.concatenate([x.offsets for x in copies]),
    )


def size_bytes(layout: ArtifactLayout, loads: Iterable[Load]) -> int:
    """Return the bytes of all artifacts on one rank."""
    return sum(_span_bytes(layout, span) for load in loads for span in load.spans)


def _span_bytes(layout: ArtifactLayout, span: ArtifactSpan) -> int:
    if span.state_type.family is Family.PREFIX:
        whole, rest = divmod(span.end - span.start, span.chunk_tokens)
        size = whole * layout.rank_bytes(span.state_type, 0, span.chunk_tokens)
        return size + (layout.rank_bytes(span.state_type, 0, rest) if rest else 0)
    return sum(layout.rank_bytes(span.state_type, x.start, x.end) for x in span.artifacts())
