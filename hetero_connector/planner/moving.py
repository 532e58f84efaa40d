"""Seconds of moving what is stored: from other tiers to DRAM, then all of it from DRAM to pages.

Every way to restore moves the prefix types of all chunks up to where it ends. The boundary types
of the last are moved with them, or rebuilt.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.boundaries import ChunkGrid, Floats, PricedChunks
from hetero_connector.planner.load_model import TierRates
from hetero_connector.spec.state_types import StateType

Held = Mapping[StateType, Tier]


class TierTable:
    """Seconds of moving a model's artifacts from one tier, at rates that stand."""

    def __init__(self, grid: ChunkGrid, tier: Tier, rates: TierRates) -> None:
        self.tier, self.rates = tier, rates
        per_byte = rates.seconds_per_byte
        self._prefix_s = {t: n * per_byte[t] for t, n in grid.prefix_bytes.items()}
        self.chunk_s = sum(self._prefix_s.values())
        """Of all prefix types of one full chunk."""
        self._s_per_byte = [(t, per_byte[t]) for t in grid.model.boundary_types]
        self._boundary_bytes = grid.boundary_bytes

    def checkpoints_s(self) -> Floats:
        """[columns] of all boundary types."""
        seconds: Floats = np.array([s for _, s in self._s_per_byte]).dot(self._boundary_bytes)
        return seconds

    def held_prefixes_s(self, distinct: Sequence[Held]) -> Floats:
        """[distinct] of the prefix types of one full chunk that this tier has."""
        tier, by_type = self.tier, self._prefix_s.items()
        seconds = [sum([s for t, s in by_type if held[t] is tier]) for held in distinct]
        return np.array(seconds, np.float64)

    def held_checkpoints_s(self, distinct: Sequence[Held]) -> Floats:
        """[distinct, columns] of the boundary types that this tier has."""
        tier, by_type = self.tier, self._s_per_byte
        per_byte = [[s if held.get(t) is tier else 0.0 for t, s in by_type] for held in distinct]
        seconds: Floats = np.array(per_byte, np.float64).dot(self._boundary_bytes)
        return seconds

    def seconds(self, bytes_by_type: Mapping[StateType, int], types: Iterable[StateType]) -> float:
        """Of moving those types of one chunk; the latency is not in it."""
        per_byte = self.rates.seconds_per_byte
        return sum([bytes_by_type[t] * per_byte[t] for t in types])


class _Staging(NamedTuple):
    """From one tier to DRAM."""

    table: TierTable
    overhead_s: float
    """Of any bytes at all."""
    prefixes_s: Floats
    """[chunks] of the prefix types up to each."""


class LoadSeconds(NamedTuple):
    """[chunks] seconds of moving what is needed to resume at the end of each."""

    to_pages_s: Floats
    """From DRAM; infinite where state is missing that the boundary needs."""
    to_dram_s: Floats | None
    """From other tiers, side by side; None where everything is in DRAM."""


class LoadTimes:
    """One span's chunks. What all ways have in common is worked out once."""

    def __init__(
        self, grid: ChunkGrid, span: PricedChunks, dram: TierTable, overhead_s: float
    ) -> None:
        """`overhead_s`: of a load from DRAM to pages."""
        self.span = span
        self._model, self._dram = grid.model, dram
        count, tail = len(span.ends), span.tail_bytes
        self._to_pages_s = grid.ordinals(count) * dram.chunk_s
        if tail:
            full_s = (count - 1) * dram.chunk_s
            self._to_pages_s[-1] = full_s + dram.seconds(tail, grid.model.prefix_types)
        self._to_pages_s += overhead_s
        self._staging: list[_Staging] = []

    def stage(self, table: TierTable, overhead_s: float) -> None:
        """Some of it is in another tier. `overhead_s`: of a load of any bytes from there."""
        held, tail = self.span.held, self.span.tail_bytes
        chunk_s = table.held_prefixes_s(held.distinct).take(held.codes)
        if tail:
            types = self.span.tail_types(table.tier, self._model.prefix_types)
            chunk_s[-1] = table.seconds(tail, types)
        self._staging.append(_Staging(table, overhead_s, chunk_s.cumsum()))

    def prefixes(self) -> LoadSeconds:
        """Of the prefix types only."""
        return LoadSeconds(
            self._to_pages_s, _staged_s([(x.prefixes_s, x.overhead_s) for x in self._staging])
        )

    def checkpoints(self) -> LoadSeconds:
        """Of the prefix types, and the boundary types at the boundary."""
        types, span = self._model.boundary_types, self.span
        if not types:
            return self.prefixes()
        by_cell_s, cells = self._dram.checkpoints_s(), span.columns
        if (lacking := span.lacking()) is not None:
            by_cell_s, cells = np.where(lacking, math.inf, by_cell_s), span.cells
        to_pages_s = by_cell_s.take(cells)
        if span.tail_bytes:  # the grid has it longer
            whole = self._model.is_whole(span.tail_tiers.keys(), int(span.ends[-1]))
            to_pages_s[-1] = self._dram.seconds(span.tail_bytes, types) if whole else math.inf
        to_pages_s += self._to_pages_s
        staged = [(self._with_checkpoints_s(x), x.overhead_s) for x in self._staging]
        return LoadSeconds(to_pages_s, _staged_s(staged))

    def _with_checkpoints_s(self, staging: _Staging) -> Floats:
        table, span = staging.table, self.span
        moved_s: Floats = table.held_checkpoints_s(span.held.distinct).take(span.cells)
        if span.tail_bytes:
            types = span.tail_types(table.tier, self._model.boundary_types)
            moved_s[-1] = table.seconds(span.tail_bytes, types)
        moved_s += staging.prefixes_s
        return moved_s


def _staged_s(tiers: Iterable[tuple[Floats, float]]) -> Floats | None:
    """The slowest of the tiers' seconds, each with its overhead where anything is moved."""
    staged_s: Floats | None = None
    for moved_s, overhead_s in tiers:
        tier_s: Floats = moved_s + (moved_s > 0.0) * overhead_s
        staged_s = tier_s if staged_s is None else np.maximum(staged_s, tier_s)
    return staged_s
