"""The price of every boundary of one request, as arrays.

    T = queue + max(staging - queue, waiting, 0) + exposed + compute, then stall and HBM

Staging brings artifacts from SSD or PEER to DRAM while the request waits, so the queue hides
it; tiers are read side by side. The engine finds out that it has ended between two steps. With
decodes running staging begins with one of their steps, so it takes that step at least, and half
a step longer than it moves bytes on average. Requests that waited before it for loads of their
own are computed first; without a load to wait for it overtakes them. What is in DRAM then goes
to pages. Layer by layer that is hidden by the first step's compute, except for the first layer,
which nothing runs ahead of: max(load, first step) + load / layers instead of their sum.
Parked it comes before compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.boundaries import ChunkGrid, Floats, Holdings, tiers_of
from hetero_connector.planner.compute_model import Tokens
from hetero_connector.planner.cost_model import CostModel, Terms
from hetero_connector.planner.decision import EngineLoad
from hetero_connector.planner.load_model import TierRates
from hetero_connector.spec.state_types import StateType

Held = Mapping[StateType, Tier]

_GIB = 1 << 30
_TIERS = (Tier.DRAM, Tier.SSD, Tier.PEER)


class TierTable:
    """Seconds of moving a model's artifacts from one tier, at rates that stand."""

    def __init__(self, grid: ChunkGrid, tier: Tier, rates: TierRates) -> None:
        self.tier, self.rates = tier, rates
        per_byte = rates.seconds_per_byte
        self.prefix_s = {t: n * per_byte[t] for t, n in grid.prefix_bytes.items()}
        """One full chunk, by type."""
        self.chunk_s = sum(self.prefix_s.values())
        self._types = (*grid.model.prefix_types, *grid.model.boundary_types)
        self._prefix_s = np.array([*self.prefix_s.values()], np.float64)
        self._boundary_bytes = grid.boundary_bytes
        self._per_byte = np.array([per_byte[t] for t in grid.model.boundary_types], np.float64)
        self.checkpoint_s: Floats = self._per_byte.dot(grid.boundary_bytes)
        """[columns] all boundary types."""

    def holds(self, distinct: Sequence[Held]) -> Floats:
        """[distinct, prefix types then boundary types] 1 where this tier has the type, else 0."""
        tier, types = self.tier, self._types
        return np.array([[tiers.get(t) is tier for t in types] for tiers in distinct], np.float64)

    def prefix_seconds(self, holds: Floats) -> Floats:
        """[distinct] of moving the prefix types that this tier has of one full chunk."""
        seconds: Floats = holds[:, : len(self._prefix_s)].dot(self._prefix_s)
        return seconds

    def boundary_seconds(self, holds: Floats) -> Floats:
        """[distinct, columns] of moving the boundary types that this tier has at a boundary."""
        per_byte = holds[:, len(self._prefix_s) :] * self._per_byte
        seconds: Floats = per_byte.dot(self._boundary_bytes)
        return seconds

    def seconds(self, bytes_by_type: Mapping[StateType, int], types: Iterable[StateType]) -> float:
        """Of moving those types of one chunk; the latency is not in it."""
        per_byte = self.rates.seconds_per_byte
        return sum(bytes_by_type.get(t, 0) * per_byte[t] for t in types)


class Prices(NamedTuple):
    """Seconds by term, over the chunks at whose end the request may resume."""

    resume: Floats
    """Where the engine computes from, in tokens."""
    staged_s: Floats | None
    """Until everything is in DRAM; None where it is there already."""
    exposed_s: Floats
    """From DRAM to pages, as far as compute does not hide it."""
    compute_s: Floats
    total_s: Floats
    """All terms together."""


class Pricing:
    """Prices for one request, by the costs and the engine's load at this moment."""

    def __init__(
        self,
        grid: ChunkGrid,
        costs: CostModel,
        tables: dict[Tier, TierTable],
        prompt_tokens: int,
        load: EngineLoad,
    ) -> None:
        """`tables`: kept between requests; renewed here where the rates have changed."""
        for tier in _TIERS:
            rates = costs.load.rates(tier)
            if tier not in tables or tables[tier].rates is not rates:
                tables[tier] = TierTable(grid, tier, rates)
        self._dram_table, *self._slow_tables = (tables[tier] for tier in _TIERS)
        self._grid, self._load = grid, load
        self._prompt_tokens = prompt_tokens
        self._step_tokens = costs.step_tokens or max(1, prompt_tokens)
        self._coefficients = costs.compute.coefficients
        self._queue_s = costs.queue_s(load.queued_tokens)
        self._behind_s = self._queue_s
        if load.waiting_tokens:
            self._behind_s = costs.queue_s(load.queued_tokens + load.waiting_tokens)
        self._half_step_s = 0.0
        if load.running_decodes:
            self._half_step_s = costs.delays().decode_step_s(load.running_decodes, 0.0) / 2
        self._stall = costs.weights.stall * load.running_decodes
        # A parked load runs beside the steps of others; layer by layer it may hold them up.
        self._load_stall = self._stall if load.layerwise else 0.0
        self._hbm = costs.weights.hbm_s_per_gib_s * grid.page_bytes_per_token * prompt_tokens / _GIB
        self._num_layers = len(grid.model.stored_layers)

    def nothing(self, local_tokens: int) -> Terms:
        """Of computing everything past the local tokens."""
        compute_s = float(self._compute(float(local_tokens)))
        hbm_s = self._hbm * compute_s
        return Terms(self._queue_s, 0.0, compute_s, self._stall * compute_s, hbm_s)

    def boundaries(
        self, chunks: Sequence[StoredChunk], held: Holdings, replay_tokens: int
    ) -> Prices:
        """Of restoring up to the end of each of `chunks`, all of which hold the prefix types.

        With `replay_tokens` boundary state is not loaded but rebuilt by computing so many
        tokens again. Does not ask whether what is loaded is there: see `held`.
        """
        span = _Span(self._grid, chunks, with_checkpoint=not replay_tokens)
        resume = span.ends - replay_tokens if replay_tokens else span.ends
        staged_s = self._staged(span, held)
        compute_s = self._compute(resume)
        exposed_s = self._dram(span)
        if self._load.layerwise:
            hidden_s = np.minimum(exposed_s, self._first_step(resume, compute_s))
            exposed_s *= 1.0 + 1.0 / self._num_layers
            exposed_s -= hidden_s
        waited_s = self._waited(staged_s)
        total_s = (exposed_s + compute_s) * (1.0 + self._hbm + self._load_stall)
        total_s += waited_s
        if self._load_stall != self._stall:
            total_s += compute_s * self._stall
        return Prices(resume, staged_s, exposed_s, compute_s, total_s)

    def terms(self, prices: Prices, index: int) -> Terms:
        """One boundary's."""
        exposed_s, compute_s = float(prices.exposed_s[index]), float(prices.compute_s[index])
        staged_s = None if prices.staged_s is None else prices.staged_s[index : index + 1]
        return Terms(
            self._queue_s,
            float(np.max(self._waited(staged_s))) - self._queue_s + exposed_s,
            compute_s,
            self._stall * compute_s + self._load_stall * exposed_s,
            self._hbm * (exposed_s + compute_s),
        )

    def _waited(self, staged_s: Floats | None) -> Floats | float:
        """Seconds until a request that loads is admitted."""
        if not self._load.layerwise:  # loading between steps is waiting, too
            return self._behind_s if staged_s is None else np.maximum(staged_s, self._behind_s)
        if staged_s is None:
            return self._queue_s
        waited_s: Floats = np.maximum(staged_s, self._queue_s)
        if self._behind_s > self._queue_s:
            waited_s = np.maximum(waited_s, self._behind_s * (staged_s > 0.0))
        return waited_s

    def _compute(self, resume: Tokens) -> Tokens:
        """Seconds of the prompt's tokens from `resume` on, in as many steps as it takes."""
        step_s, token_s, attention_s = self._coefficients
        rest = self._prompt_tokens - resume
        # attention_work of the rest over `resume` is rest (prompt + resume) / 2
        fixed_s = token_s + attention_s / 2 * self._prompt_tokens
        work_s = rest * (fixed_s + attention_s / 2 * resume)
        steps: Tokens = np.ceil(rest / self._step_tokens)
        return work_s + step_s * steps

    def _first_step(self, resume: Floats, compute_s: Floats) -> Floats:
        """Seconds of the step that admits the request: a full one, or all that is left."""
        step_s, token_s, attention_s = self._coefficients
        size = self._step_tokens
        full_s = step_s + size * (token_s + attention_s / 2 * size)
        return np.minimum(resume * (size * attention_s) + full_s, compute_s)

    def _dram(self, span: _Span) -> Floats:
        """Seconds from DRAM to pages."""
        table = self._dram_table
        moved_s = self._grid.ordinals(span.count) * table.chunk_s
        if span.with_checkpoint:
            moved_s += table.checkpoint_s.take(span.columns)
        if span.tail_bytes:
            full_s = (span.count - 1) * table.chunk_s
            moved_s[-1] = full_s + table.seconds(span.tail_bytes, span.tail_bytes)
        moved_s += self._overhead_s(table)
        return moved_s

    def _staged(self, span: _Span, held: Holdings) -> Floats | None:
        """Seconds until everything is in DRAM; None where it is there already."""
        staged, tiers = None, tiers_of(held.distinct)
        for table in self._slow_tables:
            if table.tier in tiers:
                staged_s = self._staged_from(table, span, held)
                staged = staged_s if staged is None else np.maximum(staged, staged_s)
        if staged is not None and self._half_step_s:
            noticed_s = np.maximum(staged, self._half_step_s) + self._half_step_s
            staged = noticed_s * (staged > 0.0)
        return staged

    def _staged_from(self, table: TierTable, span: _Span, held: Holdings) -> Floats:
        """Seconds of bringing to DRAM what one tier has."""
        holds = table.holds(held.distinct)
        per_chunk_s = table.prefix_seconds(holds).take(held.codes)
        tail_types = span.tail_types(table.tier)
        if span.tail_bytes:
            per_chunk_s[-1] = table.seconds(span.tail_bytes, tail_types & table.prefix_s.keys())
        moved_s: Floats = per_chunk_s.cumsum()
        if span.with_checkpoint:
            by_code_s = table.boundary_seconds(holds)
            checkpoint_s = by_code_s.take(held.codes * by_code_s.shape[1] + span.columns)
            if span.tail_bytes:
                checkpoint_s[-1] = table.seconds(
                    span.tail_bytes, tail_types - table.prefix_s.keys()
                )
            moved_s += checkpoint_s
        if per_chunk_s[0] > 0.0:  # then something is moved for every boundary
            return moved_s + self._overhead_s(table)
        return moved_s + self._overhead_s(table) * (moved_s > 0.0)

    def _overhead_s(self, table: TierTable) -> float:
        """Latency, what is under way already, and what the engine takes of the tier's pace."""
        in_flight_bytes = self._load.in_flight_bytes.get(table.tier, 0)
        return table.rates.overhead_s(in_flight_bytes, beside=self._load.is_computing)


class _Span:
    """The chunks being priced, on the grid."""

    def __init__(
        self, grid: ChunkGrid, chunks: Sequence[StoredChunk], with_checkpoint: bool
    ) -> None:
        first, last = chunks[0].chunk, chunks[-1].chunk
        index = first.start // grid.layout.chunk_tokens
        self.count = len(chunks)
        self.ends = grid.ends(index, self.count)
        self.columns = grid.columns(index, self.count)
        self.with_checkpoint = with_checkpoint and bool(grid.model.boundary_types)
        self._last_tiers = chunks[-1].tiers
        self.tail_bytes: dict[StateType, int] = {}
        """Of the last chunk, by type, if it is shorter than the others; else empty."""
        if last.end - last.start < grid.layout.chunk_tokens:
            self.ends = self.ends.copy()
            self.ends[-1] = last.end
            types = grid.model.prefix_types
            if self.with_checkpoint:
                types = grid.model.state_types
            self.tail_bytes = {
                t: grid.layout.artifact_bytes(t, last.start, last.end) for t in types
            }

    def tail_types(self, tier: Tier) -> set[StateType]:
        """What the tail has in a tier."""
        return {t for t in self.tail_bytes if self._last_tiers.get(t) is tier}
