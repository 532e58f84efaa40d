"""Bytes and tokens at every boundary of a chain, as arrays over its chunks.

A prompt of a million tokens has thousands of boundaries and they are priced between two
steps of the engine. So nothing is asked chunk by chunk: full chunks have equal bytes,
boundary states have equal bytes once their windows are full, and chunks that hold the same
share one `tiers` object.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import StoredChunk, Tier
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


class Holdings(NamedTuple):
    """What the chunks hold where: few distinct mappings, and which chunk has which."""

    distinct: Sequence[Mapping[StateType, Tier]]
    """In order of first appearance."""
    firsts: Sequence[int]
    """The chunk where each appears first."""
    codes: Codes
    """[chunks] index into `distinct`."""

    @classmethod
    def of(cls, chunks: Sequence[StoredChunk]) -> Holdings:
        """`chunks` has at least one."""
        first, size = chunks[0].tiers, len(chunks)
        # Two looks spare the usual mixtures, fast before slow or every other one, the rest.
        if chunks[-1].tiers is first and chunks[size // 2 - 1].tiers is first:
            held = [stored.tiers for stored in chunks]
            if held.count(first) == size:  # compares by identity first
                return cls([first], [0], np.zeros(size, np.int64))
        code: defaultdict[int, int] = defaultdict(count().__next__)
        codes: list[int] = []
        append, last, current = codes.append, None, 0
        for stored in chunks:
            tiers = stored.tiers
            if tiers is not last:  # runs are the rule
                last, current = tiers, code[id(tiers)]
            append(current)
        firsts = [codes.index(i) for i in range(len(code))]
        return cls([chunks[i].tiers for i in firsts], firsts, np.array(array("I", codes), np.int64))

    def up_to(self, count: int) -> Holdings:
        """Of the first `count` chunks."""
        known = bisect_left(self.firsts, count)
        return Holdings(self.distinct[:known], self.firsts[:known], self.codes[:count])
