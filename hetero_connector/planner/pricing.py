"""The price of every boundary of one request, as arrays.

    T = queue + max(staging - queue, waiting, 0) + exposed + compute, then stall and HBM

*Staging* brings artifacts from SSD or PEER to DRAM while the request waits, so the queue hides it;
the tiers are read in parallel. The engine notices its end between two steps. While decodes run,
staging begins in one of their steps, so it takes half of such a step at least, and the request
waits for a while longer (`CostModel.staging_delay_steps`). Requests that waited earlier for loads
of their own are computed first; a request without a load to wait for overtakes them.

What is in DRAM then goes to pages. Layer by layer, compute of the first step hides that, except
for the first layer, which has nothing to overlap with: max(load, first step) + load / layers
instead of their sum. Layers that call none of vLLM's hooks are loaded before the step. The part not
hidden is *exposed*, and delays running decodes as well. If that is longer than one of their steps,
the request is *parked*: they go on while it is loaded. All of a parked load is exposed, and its end
is noticed between two steps, like that of staging.

`LoadTimes` works out the seconds of loads, `Pricing` the whole sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.boundaries import Boundaries, ChunkGrid, Floats, tiers_of
from hetero_connector.planner.compute_model import Tokens
from hetero_connector.planner.cost_model import CostModel, CostTerms
from hetero_connector.planner.load_model import TierRates
from hetero_connector.spec.state_types import StateType
from hetero_connector.units import GIB

_TIERS = tuple(Tier)

STALL_S_PER_S = 0.01
"""Seconds of cost for each second that one running decode is delayed."""
HBM_S_PER_GIB_S = 0.001
"""Seconds of cost for each GiB of KV pages that is occupied for a second."""

Parking = Literal["never", "long", "always"]
"""The loads that park their request: none, those that would delay running decodes by more than one
of their steps, or all, which only tests choose."""


@dataclass(frozen=True)
class EngineLoad:
    """The engine's other work when a request is planned."""

    queued_tokens: int = 0
    """Tokens that running requests compute before they decode: they are scheduled first."""
    running_decodes: int = 0
    """Requests that are being decoded."""
    in_flight_bytes: Mapping[Tier, int] = field(default_factory=dict)
    """Bytes that earlier restores are still reading, by source tier."""
    hidden_share: float = 1.0
    """Share of a load from DRAM to pages that runs layer by layer during the forward pass; the rest
    runs before it. Parked loads need no forward pass."""
    waiting_tokens: int = 0
    """Prompt tokens of earlier requests that wait for their own loads. They are computed before
    this request if it waits for a load too, else after it."""
    parking: Parking = "never"
    decoded_context: int = 0
    """Tokens of context of the requests that are being decoded, summed."""

    @property
    def is_computing(self) -> bool:
        """True if the engine has other work while this request loads."""
        return bool(self.running_decodes or self.queued_tokens)


class TierTable:
    """Seconds of loading a model's artifacts from one tier, at fixed rates."""

    def __init__(self, grid: ChunkGrid, tier: Tier, rates: TierRates) -> None:
        self.tier, self.rates = tier, rates
        per_byte = rates.seconds_per_byte
        self._prefix_s = {t: n * per_byte[t] for t, n in grid.prefix_bytes.items()}
        self.chunk_s = sum(self._prefix_s.values())
        """Seconds of all prefix types of one full chunk."""
        self._s_per_byte = [(t, per_byte[t]) for t in grid.model.boundary_types]
        self._boundary_bytes = grid.boundary_bytes

    def checkpoints_s(self) -> Floats:
        """[columns] seconds of all boundary types."""
        seconds: Floats = np.array([s for _, s in self._s_per_byte]).dot(self._boundary_bytes)
        return seconds

    def prefixes_here_s(self, distinct: Sequence[Mapping[StateType, Tier]]) -> Floats:
        """[distinct] seconds of the prefix types of one full chunk that are in this tier."""
        tier, by_type = self.tier, self._prefix_s.items()
        seconds = [sum([s for t, s in by_type if tiers[t] is tier]) for tiers in distinct]
        return np.array(seconds, np.float64)

    def checkpoints_here_s(self, distinct: Sequence[Mapping[StateType, Tier]]) -> Floats:
        """[distinct, columns] seconds of the boundary types that are in this tier."""
        tier, by_type = self.tier, self._s_per_byte
        per_byte = [[s if tiers.get(t) is tier else 0.0 for t, s in by_type] for tiers in distinct]
        seconds: Floats = np.array(per_byte, np.float64).dot(self._boundary_bytes)
        return seconds

    def seconds(self, bytes_by_type: Mapping[StateType, int], types: Iterable[StateType]) -> float:
        """Seconds of these types of one chunk, without the latency."""
        per_byte = self.rates.seconds_per_byte
        return sum([bytes_by_type[t] * per_byte[t] for t in types])


class LoadSeconds(NamedTuple):
    """Seconds of loading what is needed to resume at the end of each chunk."""

    to_pages_s: Floats
    """[chunks] from DRAM to pages; infinite where the boundary lacks state."""
    to_dram_s: Floats | None
    """[chunks] from other tiers to DRAM, in parallel; None if everything is in DRAM."""


class TierLoad(NamedTuple):
    """A load of one request from one tier."""

    table: TierTable
    overhead_s: float
    """Seconds besides those of its bytes."""


class LoadTimes:
    """The load times of one request.

    Every strategy loads the prefix types of all chunks up to the boundary, so these are worked
    out once. The boundary types of the last chunk are loaded too, or rebuilt.
    """

    def __init__(
        self, boundaries: Boundaries, to_pages: TierLoad, to_dram: Sequence[TierLoad]
    ) -> None:
        """`to_pages`: the load from DRAM. `to_dram`: those from the other tiers with state."""
        grid, tail = boundaries.grid, boundaries.tail_page_bytes
        count, chunk_s = len(boundaries.ends), to_pages.table.chunk_s
        self.boundaries, self._types = boundaries, grid.model.boundary_types
        self._to_pages, self._to_dram = to_pages, to_dram
        self._to_pages_s = grid.ordinals(count) * chunk_s
        if tail:
            tail_s = to_pages.table.seconds(tail, grid.model.prefix_types)
            self._to_pages_s[-1] = (count - 1) * chunk_s + tail_s
        self._to_pages_s += to_pages.overhead_s
        self._to_dram_s = [self._prefixes_s(table) for table, _ in to_dram]

    def prefixes(self) -> LoadSeconds:
        """Load times of the prefix types alone."""
        return LoadSeconds(self._to_pages_s, self._slowest_s(self._to_dram_s))

    def with_checkpoints(self) -> LoadSeconds:
        """Load times of the prefix types, and of the boundary types at the boundary."""
        types, at = self._types, self.boundaries
        if not types:
            return self.prefixes()
        table = self._to_pages.table
        by_cell_s, cells = table.checkpoints_s(), at.columns
        if (incomplete := at.incomplete()) is not None:
            by_cell_s, cells = np.where(incomplete, math.inf, by_cell_s), at.cells
        to_pages_s = by_cell_s.take(cells)
        if at.tail_bytes:  # the grid has the tail as a full chunk
            is_whole = at.grid.model.is_complete(at.tail_tiers.keys(), int(at.ends[-1]))
            to_pages_s[-1] = table.seconds(at.tail_bytes, types) if is_whole else math.inf
        to_pages_s += self._to_pages_s
        to_dram_s = [
            self._with_checkpoints_s(table, prefixes_s)
            for (table, _), prefixes_s in zip(self._to_dram, self._to_dram_s, strict=True)
        ]
        return LoadSeconds(to_pages_s, self._slowest_s(to_dram_s))

    def _prefixes_s(self, table: TierTable) -> Floats:
        """[chunks] seconds of the prefix types that are in a tier, up to each chunk."""
        at = self.boundaries
        chunk_s = table.prefixes_here_s(at.tiers.distinct).take(at.tiers.codes)
        if at.tail_bytes:
            types = at.tail_types(table.tier, at.grid.model.prefix_types)
            chunk_s[-1] = table.seconds(at.tail_bytes, types)
        return chunk_s.cumsum()

    def _with_checkpoints_s(self, table: TierTable, prefixes_s: Floats) -> Floats:
        """[chunks] seconds of the prefix types and the boundary types that are in a tier."""
        at = self.boundaries
        load_s: Floats = table.checkpoints_here_s(at.tiers.distinct).take(at.cells)
        if at.tail_bytes:
            types = at.tail_types(table.tier, self._types)
            load_s[-1] = table.seconds(at.tail_bytes, types)
        load_s += prefixes_s
        return load_s

    def _slowest_s(self, by_tier_s: Sequence[Floats]) -> Floats | None:
        """[chunks] seconds of the slowest tier, with its overhead where it loads anything."""
        slowest_s: Floats | None = None
        for load_s, (_, overhead_s) in zip(by_tier_s, self._to_dram, strict=True):
            tier_s: Floats = load_s + (load_s > 0.0) * overhead_s
            slowest_s = tier_s if slowest_s is None else np.maximum(slowest_s, tier_s)
        return slowest_s


class Prices(NamedTuple):
    """[chunks] the price of restoring up to the end of each chunk, by term."""

    resume: Floats
    """The first token that the engine computes."""
    staged_s: Floats | None
    """Seconds until everything is in DRAM; None if it is there already."""
    waited_s: Floats
    """Seconds until the request is admitted; [1] if they are the same for all chunks."""
    exposed_s: Floats
    """Seconds from DRAM to pages that compute does not hide; infinite where the request cannot
    resume."""
    parked: NDArray[np.bool_] | None
    """[chunks] True where the request is parked while it is loaded; None if nowhere."""
    compute_s: Floats
    total_s: Floats
    """All terms together."""

    def is_parked(self, index: int) -> bool:
        """True if the request is parked while it is loaded up to the end of one chunk."""
        return self.parked is not None and bool(self.parked[index])


class Pricing:
    """Prices the boundaries of one request, by the present costs and load of the engine."""

    def __init__(
        self,
        grid: ChunkGrid,
        costs: CostModel,
        tables: dict[Tier, TierTable],
        prompt_tokens: int,
        load: EngineLoad,
        tried: Mapping[Tier, TierRates],
    ) -> None:
        """`tables`: a cache that the caller keeps between requests; updated here. `tried`: rates
        that hold for this request instead of the learned ones.
        """
        for tier in _TIERS:
            rates = tried.get(tier) or costs.load.rates(tier)
            if tier not in tables or tables[tier].rates is not rates:
                tables[tier] = TierTable(grid, tier, rates)
        self._dram_table, *self._slow_tables = (tables[tier] for tier in _TIERS)
        self._grid, self._load = grid, load
        self.prompt_tokens = prompt_tokens
        self._step_tokens = costs.step_tokens or max(1, prompt_tokens)
        self._coefficients = costs.compute.coefficients
        self._queue_s = costs.queue_s(load.queued_tokens)
        self._behind_s = self._queue_s
        """Seconds until a request that waits for a load is admitted at the earliest."""
        if load.waiting_tokens:
            self._behind_s = costs.queue_s(load.queued_tokens + load.waiting_tokens)
        self._decode_step_s = 0.0
        if load.running_decodes:
            delays, context = costs.delays(), load.decoded_context
            self._decode_step_s = delays.decode_step_s(load.running_decodes, context)
        self._staging_delay_s = costs.staging_delay_steps * self._decode_step_s
        self._park_above_s = math.inf
        """A load of which more is exposed parks its request."""
        if load.parking == "always":
            self._park_above_s = -math.inf
        elif load.parking == "long" and load.running_decodes:
            self._park_above_s = self._decode_step_s
        self._stall = STALL_S_PER_S * load.running_decodes
        self._hbm = HBM_S_PER_GIB_S * grid.page_bytes_per_token * prompt_tokens / GIB
        self._num_layers = len(grid.model.stored_layers)

    def nothing(self, local_tokens: int) -> CostTerms:
        """The cost of restoring nothing: computing everything after the local tokens."""
        compute_s = self._prompt_s(local_tokens)
        hbm_s = self._hbm * compute_s
        return CostTerms(self._queue_s, 0.0, compute_s, self._stall * compute_s, hbm_s)

    def lower_bound_s(self, resume: float) -> float:
        """The least cost of any restore that resumes at `resume` or earlier: computing the rest.

        The earlier it resumes, the more there is to compute. The bound allows for rounding, so
        that equals are compared by their prices.
        """
        compute_s = self._prompt_s(resume)
        total_s = self._queue_s + compute_s * (1.0 + self._hbm + self._stall)
        return total_s * (1.0 - 1e-9)

    def load_times(self, boundaries: Boundaries) -> LoadTimes:
        """The load times up to these boundaries, which all strategies share."""
        tiers = tiers_of(boundaries.tiers.distinct)
        slow = [self._load_from(table) for table in self._slow_tables if table.tier in tiers]
        return LoadTimes(boundaries, self._load_from(self._dram_table), slow)

    def with_checkpoints(self, times: LoadTimes) -> Prices:
        """Prices of restoring up to the end of each chunk by the checkpoint stored there."""
        ends = times.boundaries.ends
        return self._prices(ends, *times.with_checkpoints(), self._park_above_s)

    def with_replay(self, times: LoadTimes, replay_tokens: int, local_tokens: int) -> Prices:
        """Prices of restoring up to the end of each chunk by a replay of so many tokens.

        Impossible where the replay would begin within the local tokens, which would save nothing,
        and up to a handoff's end, which is off the grid on which a replay starts and ends.
        """
        ends = times.boundaries.ends
        resume = ends - replay_tokens
        to_pages_s, staged_s = times.prefixes()
        to_pages_s = to_pages_s.copy()
        to_pages_s[: resume.searchsorted(local_tokens, side="right")] = math.inf
        if ends[-1] % self._grid.model.alignment:
            to_pages_s[-1] = math.inf
        # Each step of a replay loads what it needs, so it is never parked.
        return self._prices(resume, to_pages_s, staged_s, math.inf)

    def _prices(
        self, resume: Floats, to_pages_s: Floats, staged_s: Floats | None, park_above_s: float
    ) -> Prices:
        if staged_s is not None and self._decode_step_s:
            noticed_s = np.maximum(staged_s, self._decode_step_s / 2) + self._staging_delay_s
            staged_s = noticed_s * (staged_s > 0.0)
        waited_s = self._waited_s(staged_s)
        compute_s = self._computed_s(resume)
        exposed_s, share = to_pages_s, self._load.hidden_share
        if share:
            exposed_s = to_pages_s * (1.0 + share / self._num_layers)
            exposed_s -= np.minimum(to_pages_s * share, self._first_step_s(resume, compute_s))
        delays_s = total_s = exposed_s + compute_s
        """`delays_s`: the seconds by which running decodes are delayed."""
        parked = None
        if park_above_s < math.inf:
            parked = exposed_s > park_above_s
            delays_s = np.where(parked, compute_s, delays_s)
            exposed_s = np.where(parked, to_pages_s + self._staging_delay_s, exposed_s)
            waited_s = np.where(parked, np.maximum(waited_s, self._behind_s), waited_s)
            total_s = exposed_s + compute_s
        total_s = total_s * (1.0 + self._hbm)
        if self._stall:
            total_s += self._stall * delays_s
        total_s += waited_s
        return Prices(resume, staged_s, waited_s, exposed_s, parked, compute_s, total_s)

    def terms(self, prices: Prices, index: int) -> CostTerms:
        """The cost of resuming at the end of one chunk."""
        exposed_s, compute_s = float(prices.exposed_s[index]), float(prices.compute_s[index])
        waited_s = float(prices.waited_s[index if len(prices.waited_s) > 1 else 0])
        delays_s = compute_s if prices.is_parked(index) else exposed_s + compute_s
        return CostTerms(
            self._queue_s,
            waited_s - self._queue_s + exposed_s,
            compute_s,
            self._stall * delays_s,
            self._hbm * (exposed_s + compute_s),
        )

    def _waited_s(self, staged_s: Floats | None) -> Floats:
        """Seconds until the request is admitted."""
        if staged_s is None:
            return np.array([self._queue_s])
        waited_s: Floats = np.maximum(staged_s, self._queue_s)
        if self._behind_s > self._queue_s:
            waited_s = np.maximum(waited_s, self._behind_s * (staged_s > 0.0))
        return waited_s

    def _prompt_s(self, resume: float) -> float:
        """Seconds of computing the prompt from `resume` on, in as many steps as it takes."""
        rest = self.prompt_tokens - resume
        return self._work_s(resume, rest) + self._coefficients.step_s * math.ceil(
            rest / self._step_tokens
        )

    def _computed_s(self, resume: Floats) -> Floats:
        """`_prompt_s` of each."""
        rest = self.prompt_tokens - resume
        work_s = self._work_s(resume, rest)
        rest /= self._step_tokens
        steps: Floats = np.ceil(rest, out=rest)
        steps *= self._coefficients.step_s
        steps += work_s
        return steps

    def _work_s(self, resume: Tokens, rest: Tokens) -> Tokens:
        """Seconds of `rest` tokens after `resume`, without the cost of steps."""
        _, token_s, attention_s = self._coefficients
        # attention_work of the rest over `resume` is rest (prompt + resume) / 2
        fixed_s = token_s + attention_s / 2 * self.prompt_tokens
        return rest * (fixed_s + attention_s / 2 * resume)

    def _first_step_s(self, resume: Floats, compute_s: Floats) -> Floats:
        """Seconds of the step that admits the request: a full step, or all that is left."""
        step_s, token_s, attention_s = self._coefficients
        size = self._step_tokens
        full_s = step_s + size * (token_s + attention_s / 2 * size)
        return np.minimum(resume * (size * attention_s) + full_s, compute_s)

    def _load_from(self, table: TierTable) -> TierLoad:
        in_flight_bytes = self._load.in_flight_bytes.get(table.tier, 0)
        overhead_s = table.rates.overhead_s(
            in_flight_bytes, while_computing=self._load.is_computing
        )
        return TierLoad(table, overhead_s)
