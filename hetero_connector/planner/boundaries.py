"""Bytes and tokens at every boundary of a chain, as arrays over its chunks.

A prompt of a million tokens has thousands of boundaries, and they are priced between two steps
of the engine. So nothing is computed chunk by chunk: full chunks have equal bytes, boundary states
have equal bytes once their windows are full, and chunks whose state lies in the same tiers share
one `tiers` object.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import UNNUMBERED, StoredChunk, Tier
from hetero_connector.planner.plan import RestorePlan, chunk_end
from hetero_connector.spec.state_types import Family, RestoreRule, StateType

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


class ChunkGrid:
    """The ends and bytes of a model's full chunks, by chunk index."""

    def __init__(self, layout: ArtifactLayout) -> None:
        self.layout = layout
        self.model = layout.model
        self.prefix_bytes = {
            t: layout.artifact_bytes(t, 0, layout.chunk_tokens) for t in self.model.prefix_types
        }
        self._full, self._period = self._saturation()
        ends = [layout.chunk_tokens * (i + 1) for i in range(self._full + self._period)]
        self.boundary_bytes = np.array(
            [[layout.artifact_bytes(t, 0, end) for end in ends] for t in self.model.boundary_types],
            dtype=np.float64,
        ).reshape(len(self.model.boundary_types), len(ends))
        """[boundary types, columns] bytes at a boundary; `columns` has the column of a chunk."""
        self.page_bytes_per_token = sum(
            layer.page_stride_bytes / layer.block_tokens
            for layer in self.model.layers
            if layer.restore_rule is RestoreRule.EVERY_TOKEN
        )
        """Bytes of KV pages that a request occupies on one rank, padding included."""
        self._grow(1024)

    def ordinals(self, count: int) -> Floats:
        """[count] the numbers 1, 2, 3, ..."""
        if count > len(self._ordinals):
            self._grow(2 * count)
        return self._ordinals[:count]

    def ends(self, first: int, count: int) -> Floats:
        """[count] the ends, in tokens, of the chunks from the `first` on."""
        if first + count > len(self._ordinals):
            self._grow(2 * (first + count))
        return self._ends[first : first + count]

    def columns(self, first: int, count: int) -> Codes:
        """[count] columns of `boundary_bytes` of the chunks from the `first` on."""
        if first + count > len(self._ordinals):
            self._grow(2 * (first + count))
        return self._columns[first : first + count]

    def _grow(self, count: int) -> None:
        index = np.arange(count)
        self._ordinals = np.arange(1, count + 1, dtype=np.float64)
        self._ends = self._ordinals * self.layout.chunk_tokens
        repeating = self._full + (index - self._full) % self._period
        self._columns = np.where(index < self._full, index, repeating)

    def _saturation(self) -> tuple[int, int]:
        """Return (chunks until every window is full, chunks after which sizes repeat)."""
        reach, period = 0, self.layout.chunk_tokens
        for layer in self.model.stored_layers:
            if layer.state_type.family is Family.BOUNDARY:
                reach = max(reach, layer.boundary_tokens, layer.block_tokens)
                if layer.restore_rule is RestoreRule.CHUNK_START and layer.window:
                    period = math.lcm(period, layer.window)
        return -(-reach // self.layout.chunk_tokens), period // self.layout.chunk_tokens


class ChunkTiers(NamedTuple):
    """The tiers of each chunk's state: few distinct mappings, and a code for each chunk."""

    distinct: Sequence[Mapping[StateType, Tier]]
    """In order of first appearance."""
    firsts: Sequence[int]
    """The first chunk of each."""
    codes: Codes
    """[chunks] index into `distinct`."""

    @classmethod
    def of(cls, chunks: Sequence[StoredChunk]) -> ChunkTiers:
        """Encode at least one chunk. The numbers of all must come from one index."""
        numbers = rest = bytes([stored.number for stored in chunks])
        if UNNUMBERED in numbers:
            return cls._by_identity(chunks)
        distinct, firsts = b"", []
        while rest:
            distinct += rest[:1]
            firsts.append(numbers.index(rest[0]))
            rest = rest.translate(None, rest[:1])
        codes = numbers.translate(bytes.maketrans(distinct, bytes(range(len(distinct)))))
        tiers = [chunks[first].tiers for first in firsts]
        return cls(tiers, firsts, np.frombuffer(codes, np.uint8).astype(np.int64))

    @classmethod
    def _by_identity(cls, chunks: Sequence[StoredChunk]) -> ChunkTiers:
        """Encode chunks of which some have no number."""
        known: dict[int, int] = {}
        codes: list[int] = []
        firsts: list[int] = []
        for index, stored in enumerate(chunks):
            code = known.setdefault(id(stored.tiers), len(firsts))
            if code == len(firsts):
                firsts.append(index)
            codes.append(code)
        return cls([chunks[i].tiers for i in firsts], firsts, np.array(codes, np.int64))

    def up_to(self, count: int) -> ChunkTiers:
        """The encoding of the first `count` chunks."""
        known = bisect_left(self.firsts, count)
        return ChunkTiers(self.distinct[:known], self.firsts[:known], self.codes[:count])

    def distinct_up_to(self, count: int) -> Sequence[Mapping[StateType, Tier]]:
        """`distinct` of the first `count` chunks."""
        return self.distinct[: bisect_left(self.firsts, count)]


class Boundaries:
    """The boundaries at the ends of successive chunks, and the tiers of the chunks' state.

    All chunks are on the grid and have the prefix types. The last one, the tail, may be short, or
    cut: if it ends after the last token to restore, its boundary is before its end.
    """

    def __init__(
        self,
        grid: ChunkGrid,
        chunks: Sequence[StoredChunk],
        tiers: ChunkTiers,
        limit_tokens: int,
    ) -> None:
        first, last = chunks[0].chunk, chunks[-1].chunk
        end = last.end if last.end <= limit_tokens else grid.model.last_cut(limit_tokens)
        index = first.start // grid.layout.chunk_tokens
        self.grid, self.chunks, self.tiers = grid, chunks, tiers
        self.ends = grid.ends(index, len(chunks))
        """[chunks] in tokens."""
        self.columns = self.cells = grid.columns(index, len(chunks))
        """[chunks] indices: into `ChunkGrid.boundary_bytes`; into a flattened table
        [distinct tiers, columns]."""
        if len(tiers.distinct) > 1:
            self.cells = tiers.codes * grid.boundary_bytes.shape[1]
            self.cells += self.columns
        self.tail_tiers = chunks[-1].tiers
        self.tail_bytes: dict[StateType, int] = {}
        """Bytes of the tail by type if it is short or cut; else empty."""
        self.tail_page_bytes = self.tail_bytes
        """The part of them that is copied to pages; all of an artifact is brought to DRAM."""
        if end - last.start < grid.layout.chunk_tokens:
            self.ends = self.ends.copy()
            self.ends[-1] = end
            self.tail_bytes = self._tail_bytes(last.start, last.end)
            self.tail_page_bytes = self._tail_bytes(last.start, end)

    def _tail_bytes(self, start: int, end: int) -> dict[StateType, int]:
        layout = self.grid.layout
        return {t: layout.artifact_bytes(t, start, end) for t in self.grid.model.state_types}

    @classmethod
    def of(
        cls, grid: ChunkGrid, chunks: Sequence[StoredChunk], limit_tokens: int
    ) -> Boundaries | None:
        """Take the chunks before the first that lacks a prefix type; None if there are none."""
        if not chunks:
            return None
        tiers, needed = ChunkTiers.of(chunks), set(grid.model.prefix_types)
        for mapping, first in zip(tiers.distinct, tiers.firsts, strict=True):
            if not mapping.keys() >= needed:
                chunks, tiers = chunks[:first], tiers.up_to(first)
                break
        return cls(grid, chunks, tiers, limit_tokens) if chunks else None

    def plan(self, index: int, replay_tokens: int = 0, *, parked: bool = False) -> RestorePlan:
        """The plan to restore up to the boundary of a chunk, by its checkpoint or by a replay."""
        model, chunks = self.grid.model, self.chunks[: index + 1]
        boundary = int(self.ends[index])
        return RestorePlan(
            boundary,
            chunks,
            model.prefix_types,
            () if replay_tokens else model.boundary_types_at(boundary),
            self.tiers.distinct_up_to(index + 1),
            replay_tokens,
            parked,
        )

    def tiers_after(self, tokens: int) -> set[Tier]:
        """The tiers of the chunks that end after so many tokens."""
        codes = self.tiers.codes[self.ends.searchsorted(tokens, side="right") :]
        return tiers_of(self.tiers.distinct[code] for code in np.unique(codes).tolist())

    def bytes_in(self, tier: Tier) -> int:
        """The bytes in a tier of all prefix state and of the largest checkpoint.

        A tail counts as full.
        """
        types = self.grid.model.boundary_types
        here = [[tiers.get(t) is tier for t in types] for tiers in self.tiers.distinct]
        checkpoints = np.array(here, np.float64).dot(self.grid.boundary_bytes)
        size_bytes = checkpoints.take(self.cells).max()
        counts = np.bincount(self.tiers.codes, minlength=len(self.tiers.distinct))
        for tiers, count in zip(self.tiers.distinct, counts.tolist(), strict=True):
            chunk_bytes = [n for t, n in self.grid.prefix_bytes.items() if tiers[t] is tier]
            size_bytes += count * sum(chunk_bytes)
        return int(size_bytes)

    def load_bytes(self, *, by_replay: bool) -> Iterator[dict[Tier, int]]:
        """Yield for each chunk the bytes by tier that are loaded to resume at its end.

        Chunk by chunk: for people.
        """
        model = self.grid.model
        prefix_bytes: dict[Tier, int] = {}
        for stored in self.chunks:
            self._add_bytes(prefix_bytes, stored, model.prefix_types)
            load_bytes = dict(prefix_bytes)
            if not by_replay:
                self._add_bytes(load_bytes, stored, model.boundary_types_at(chunk_end(stored)))
            yield load_bytes

    def _add_bytes(
        self, total: dict[Tier, int], stored: StoredChunk, types: Iterable[StateType]
    ) -> None:
        for state_type in types:
            tier, chunk = stored.tiers.get(state_type), stored.chunk
            if tier is not None:
                size_bytes = self.grid.layout.artifact_bytes(state_type, chunk.start, chunk.end)
                total[tier] = total.get(tier, 0) + size_bytes

    def tail_types(self, tier: Tier, types: Iterable[StateType]) -> list[StateType]:
        """The `types` that the tail has in a tier."""
        return [t for t in types if self.tail_tiers.get(t) is tier]

    def incomplete(self) -> NDArray[np.bool_] | None:
        """[distinct tiers, columns] True where a boundary lacks state; None if none does."""
        types = self.grid.model.boundary_types
        lacks = [[t not in tiers for t in types] for tiers in self.tiers.distinct]
        if not any(map(any, lacks)):
            return None
        missing: NDArray[np.bool_] = np.array(lacks, np.float64).dot(self.grid.boundary_bytes) > 0
        return missing


def tiers_of(mappings: Iterable[Mapping[StateType, Tier]]) -> set[Tier]:
    """Every tier in these mappings."""
    tiers: set[Tier] = set()
    return tiers.union(*[mapping.values() for mapping in mappings])
