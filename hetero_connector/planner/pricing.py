"""Seconds of moving what is stored: from other tiers to DRAM, then all of it from DRAM to pages.

Every way to restore moves the prefix types of all chunks up to where it ends. The boundary types
of the last are moved with them, or rebuilt.

The price of every boundary of one request, as arrays.

    T = queue + max(staging - queue, waiting, 0) + exposed + compute, then stall and HBM

Staging brings artifacts from SSD or PEER to DRAM while the request waits, so the queue hides it;
tiers are read side by side. The engine finds out that it has ended between two steps. With
decodes running staging begins with one of their steps, so it takes that step at least, and half a
step longer than it moves bytes on average (`staging_delay`: and what was learned beyond). Requests
that waited before it for loads of their own are computed first; without a load to wait for it
overtakes them. What is in DRAM then goes to pages. Layer by layer that is hidden by the first
step's compute, except for the first layer, which nothing runs ahead of: max(load, first step) +
load / layers instead of their sum. Parked it comes before compute.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.boundaries import ChunkGrid, Floats, PricedChunks, tiers_of
from hetero_connector.planner.compute_model import Tokens
from hetero_connector.planner.cost_model import CostModel, CostTerms
from hetero_connector.planner.decision import EngineLoad
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


_GIB = 1 << 30
_TIERS = (Tier.DRAM, Tier.SSD, Tier.PEER)


class Prices(NamedTuple):
    """Seconds by term, over the chunks at whose end the request may resume."""

    resume: Floats
    """Where the engine computes from, in tokens."""
    staged_s: Floats | None
    """Until everything is in DRAM; None where it is there already."""
    waited_s: Floats
    """Until the request is admitted. One for all where nothing is staged."""
    exposed_s: Floats
    """From DRAM to pages, as far as compute does not hide it; infinite where the request cannot
    resume at all."""
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
        # Loading between steps is waiting, too, even for what is in DRAM.
        self._least_wait_s = self._queue_s if load.layerwise else self._behind_s
        self._half_step_s = self._staging_delay_s = 0.0
        if load.running_decodes:
            step_s = costs.delays().decode_step_s(load.running_decodes, 0.0)
            self._half_step_s, self._staging_delay_s = (
                step_s / 2,
                costs.staging_delay.delay_s(step_s),
            )
        self._stall = costs.weights.stall * load.running_decodes
        # A parked load runs beside the steps of others; layer by layer it may hold them up.
        self._load_stall = self._stall if load.layerwise else 0.0
        self._hbm = costs.weights.hbm_s_per_gib_s * grid.page_bytes_per_token * prompt_tokens / _GIB
        self._num_layers = len(grid.model.stored_layers)

    def nothing(self, local_tokens: int) -> CostTerms:
        """Of computing everything past the local tokens."""
        compute_s = self._compute_s(local_tokens)
        hbm_s = self._hbm * compute_s
        return CostTerms(self._queue_s, 0.0, compute_s, self._stall * compute_s, hbm_s)

    def least_s(self, resume: float) -> float:
        """What no restore that resumes there or earlier can cost less than: computing the rest.

        The more is left, the longer `_compute_s` is. Less what rounding may do, so that equals
        are compared by their prices.
        """
        compute_s = self._compute_s(resume)
        total_s = self._least_wait_s + compute_s * (1.0 + self._hbm + self._stall)
        return total_s * (1.0 - 1e-9)

    def moving(self, span: PricedChunks) -> LoadTimes:
        """What all ways to restore these chunks share."""
        dram = self._dram_table
        moving = LoadTimes(self._grid, span, dram, self._overhead_s(dram))
        tiers = tiers_of(span.held.distinct)
        for table in self._slow_tables:
            if table.tier in tiers:
                moving.stage(table, self._overhead_s(table))
        return moving

    def checkpoints(self, moving: LoadTimes) -> Prices:
        """Of restoring up to the end of each chunk, by what is stored there."""
        return self._prices(moving.span.ends, *moving.checkpoints())

    def replays(self, moving: LoadTimes, replay_tokens: int, local_tokens: int) -> Prices:
        """The same with boundary state rebuilt: so many tokens are computed again.

        Not possible from the local tokens or before, where nothing would be saved by what is
        loaded, nor to a handoff's end, which is off the grid on which a replay starts and ends.
        """
        ends = moving.span.ends
        resume = ends - replay_tokens
        to_pages_s, staged_s = moving.prefixes()
        to_pages_s = to_pages_s.copy()
        to_pages_s[: resume.searchsorted(local_tokens, side="right")] = math.inf
        if ends[-1] % self._grid.model.alignment:
            to_pages_s[-1] = math.inf
        return self._prices(resume, to_pages_s, staged_s)

    def _prices(self, resume: Floats, to_pages_s: Floats, staged_s: Floats | None) -> Prices:
        if staged_s is not None and self._half_step_s:
            delayed_s = np.maximum(staged_s, self._half_step_s) + self._staging_delay_s
            staged_s = delayed_s * (staged_s > 0.0)
        waited_s = self._waited(staged_s)
        compute_s = self._compute(resume)
        exposed_s = to_pages_s
        if self._load.layerwise:
            exposed_s = to_pages_s * (1.0 + 1.0 / self._num_layers)
            exposed_s -= np.minimum(to_pages_s, self._first_step(resume, compute_s))
        total_s = exposed_s + compute_s
        total_s *= 1.0 + self._hbm + self._load_stall
        total_s += waited_s
        if self._load_stall != self._stall:
            total_s += compute_s * self._stall
        return Prices(resume, staged_s, waited_s, exposed_s, compute_s, total_s)

    def terms(self, prices: Prices, index: int) -> CostTerms:
        """One boundary's."""
        exposed_s, compute_s = float(prices.exposed_s[index]), float(prices.compute_s[index])
        waited_s = float(prices.waited_s[index if prices.staged_s is not None else 0])
        return CostTerms(
            self._queue_s,
            waited_s - self._queue_s + exposed_s,
            compute_s,
            self._stall * compute_s + self._load_stall * exposed_s,
            self._hbm * (exposed_s + compute_s),
        )

    def _waited(self, staged_s: Floats | None) -> Floats:
        """Seconds until a request that loads is admitted."""
        if staged_s is None:
            return np.array([self._least_wait_s])
        waited_s: Floats = np.maximum(staged_s, self._least_wait_s)
        if self._behind_s > self._least_wait_s:
            waited_s = np.maximum(waited_s, self._behind_s * (staged_s > 0.0))
        return waited_s

    def _compute_s(self, resume: float) -> float:
        """Seconds of the prompt's tokens from `resume` on, in as many steps as it takes."""
        rest = self._prompt_tokens - resume
        return self._work(resume, rest) + self._coefficients.step_s * math.ceil(
            rest / self._step_tokens
        )

    def _compute(self, resume: Floats) -> Floats:
        """The same of each."""
        rest = self._prompt_tokens - resume
        work_s = self._work(resume, rest)
        rest /= self._step_tokens
        steps: Floats = np.ceil(rest, out=rest)
        steps *= self._coefficients.step_s
        steps += work_s
        return steps

    def _work(self, resume: Tokens, rest: Tokens) -> Tokens:
        """Seconds of `rest` tokens behind `resume`, whatever the steps."""
        _, token_s, attention_s = self._coefficients
        # attention_work of the rest over `resume` is rest (prompt + resume) / 2
        fixed_s = token_s + attention_s / 2 * self._prompt_tokens
        return rest * (fixed_s + attention_s / 2 * resume)

    def _first_step(self, resume: Floats, compute_s: Floats) -> Floats:
        """Seconds of the step that admits the request: a full one, or all that is left."""
        step_s, token_s, attention_s = self._coefficients
        size = self._step_tokens
        full_s = step_s + size * (token_s + attention_s / 2 * size)
        return np.minimum(resume * (size * attention_s) + full_s, compute_s)

    def _overhead_s(self, table: TierTable) -> float:
        """Latency, what is under way already, and what the engine takes of the tier's pace."""
        in_flight_bytes = self._load.in_flight_bytes.get(table.tier, 0)
        return table.rates.overhead_s(in_flight_bytes, while_computing=self._load.is_computing)
