"""Bytes and tokens at every boundary of a chain, as arrays over its chunks.

A prompt of a million tokens has thousands of boundaries and they are priced between two
steps of the engine. So nothing is asked chunk by chunk: full chunks have equal bytes,
boundary states have equal bytes once their windows are full, and chunks that hold the same
share one `tiers` object.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import UNNUMBERED, StoredChunk, Tier
from hetero_connector.spec.state_types import Family, RestoreRule, StateType

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]


class ChunkGrid:
    """Where a model's full chunks end and how many bytes they hold."""

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
        """[boundary types, columns]: bytes at a boundary; see `columns`."""
        self.page_bytes_per_token = sum(
            layer.page_stride_bytes / layer.block_tokens
            for layer in self.model.layers
            if layer.restore_rule is RestoreRule.EVERY_TOKEN
        )
        """Bytes of KV pages that a request holds on one rank, padding included."""
        self._grow(1024)

    def ordinals(self, count: int) -> Floats:
        """[count] 1, 2, 3, ..."""
        if count > len(self._ordinals):
            self._grow(2 * count)
        return self._ordinals[:count]

    def ends(self, first: int, count: int) -> Floats:
        """[count] where the chunks from the `first` on end, in tokens."""
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
        beyond = self._full + (index - self._full) % self._period
        self._columns = np.where(index < self._full, index, beyond)

    def _saturation(self) -> tuple[int, int]:
        """(chunks until every window is full, chunks after which sizes repeat)."""
        reach, period = 0, self.layout.chunk_tokens
        for layer in self.model.stored_layers:
            if layer.state_type.family is Family.BOUNDARY:
                reach = max(reach, layer.boundary_tokens, layer.block_tokens)
                if layer.restore_rule is RestoreRule.CHUNK_START and layer.window:
                    period = math.lcm(period, layer.window)
        return -(-reach // self.layout.chunk_tokens), period // self.layout.chunk_tokens


class ChunkTiers(NamedTuple):
    """What the chunks hold where: few distinct mappings, and which chunk has which."""

    distinct: Sequence[Mapping[StateType, Tier]]
    """In order of first appearance."""
    firsts: Sequence[int]
    """The chunk where each appears first."""
    codes: Codes
    """[chunks] index into `distinct`."""

    @classmethod
    def of(cls, chunks: Sequence[StoredChunk]) -> ChunkTiers:
        """`chunks`, at least one; their numbers are all of one index."""
        numbers = left = bytes([stored.number for stored in chunks])
        if UNNUMBERED in numbers:
            return cls._by_identity(chunks)
        distinct, firsts = b"", []
        while left:
            distinct += left[:1]
            firsts.append(numbers.index(left[0]))
            left = left.translate(None, left[:1])
        codes = numbers.translate(bytes.maketrans(distinct, bytes(range(len(distinct)))))
        tiers = [chunks[first].tiers for first in firsts]
        return cls(tiers, firsts, np.frombuffer(codes, np.uint8).astype(np.int64))

    @classmethod
    def _by_identity(cls, chunks: Sequence[StoredChunk]) -> ChunkTiers:
        """Of chunks of which some have no number."""
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
        """Of the first `count` chunks."""
        known = bisect_left(self.firsts, count)
        return ChunkTiers(self.distinct[:known], self.firsts[:known], self.codes[:count])

    def distinct_up_to(self, count: int) -> Sequence[Mapping[StateType, Tier]]:
        """`distinct` of the first `count` chunks."""
        return self.distinct[: bisect_left(self.firsts, count)]


class PricedChunks:
    """Chunks on the grid that are priced together, and what they hold where."""

    def __init__(self, grid: ChunkGrid, chunks: Sequence[StoredChunk], held: ChunkTiers) -> None:
        """`chunks`: successive ones, all of which hold the prefix types; the last may be short."""
        first, last = chunks[0].chunk, chunks[-1].chunk
        index = first.start // grid.layout.chunk_tokens
        self.held = held
        self.ends = grid.ends(index, len(chunks))
        self.columns = self.cells = grid.columns(index, len(chunks))
        """[chunks] index into `columns`; into a table [distinct, columns] laid flat."""
        if len(held.distinct) > 1:
            self.cells = held.codes * grid.boundary_bytes.shape[1]
            self.cells += self.columns
        self.tail_tiers = chunks[-1].tiers
        self.tail_bytes: dict[StateType, int] = {}
        """Of the last chunk, by type, if it is shorter than the others; else empty."""
        if last.end - last.start < grid.layout.chunk_tokens:
            self.ends = self.ends.copy()
            self.ends[-1] = last.end
            self.tail_bytes = {
                t: grid.layout.artifact_bytes(t, last.start, last.end)
                for t in grid.model.state_types
            }
        self._grid = grid

    def tail_types(self, tier: Tier, types: Iterable[StateType]) -> list[StateType]:
        """Those that the tail has in a tier."""
        return [t for t in types if self.tail_tiers.get(t) is tier]

    def lacking(self) -> NDArray[np.bool_] | None:
        """[distinct, columns] where state that a boundary needs is missing; None: nowhere."""
        types = self._grid.model.boundary_types
        lacks = [[t not in tiers for t in types] for tiers in self.held.distinct]
        if not any(map(any, lacks)):
            return None
        missing: NDArray[np.bool_] = np.array(lacks, np.float64).dot(self._grid.boundary_bytes) > 0
        return missing


def tiers_of(holdings: Iterable[Mapping[StateType, Tier]]) -> set[Tier]:
    """Every tier that holds something."""
    tiers: set[Tier] = set()
    return tiers.union(*[held.values() for held in holdings])
