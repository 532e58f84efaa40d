"""All the ways to serve one request, priced and compared."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.boundaries import ChunkGrid, Codes, Floats, Holdings, tiers_of
from hetero_connector.planner.cost_model import Terms
from hetero_connector.planner.decision import Candidate
from hetero_connector.planner.pricing import Prices, Pricing
from hetero_connector.planner.restore_plan import RestorePlan
from hetero_connector.spec.state_types import StateType


class Weighing:
    """One request's boundaries, with and without replay, beside restoring nothing."""

    def __init__(
        self,
        grid: ChunkGrid,
        pricing: Pricing,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        limit_tokens: int,
        *,
        replay_tokens: int,
        deadline_s: float,
    ) -> None:
        self._model, self._layout = grid.model, grid.layout
        self._pricing = pricing
        self._local_tokens = local_tokens
        self.nothing = pricing.nothing(local_tokens)
        self._nothing_s = self.nothing.total_s
        chunks = _between(stored, local_tokens, limit_tokens)
        self._ways: list[_Way] = []
        if not chunks:
            return
        self._chunks, self._held = chunks, Holdings.of(chunks)
        barred_s = None
        num_types = len(grid.model.state_types)
        if any(len(tiers) < num_types for tiers in self._held.distinct):
            self._cut()
            if not self._chunks:
                return
            barred_s = self._barred(grid)
        self._ways.append(self._way(0, barred_s, deadline_s))
        if replay_tokens:
            self._ways.append(self._way(replay_tokens, None, deadline_s))

    def cheapest(self) -> tuple[RestorePlan | None, Terms]:
        """The best way; loading wins a tie, and the deeper of two."""
        way = min(self._ways, key=_price, default=None)
        if way is None or way.best_s > self._nothing_s:
            return None, self.nothing
        return self._plan(way, way.best), self._pricing.terms(way.prices, way.best)

    def of(self, plan: RestorePlan | None) -> tuple[RestorePlan | None, Terms]:
        """A plan made elsewhere, and its terms."""
        if plan is None:
            return None, self.nothing
        return plan, self._pricing.terms(self._way_of(plan).prices, len(plan.chunks) - 1)

    def stages(self, plan: RestorePlan) -> bool:
        """Whether the plan needs artifacts that are not in DRAM."""
        staged_s = self._way_of(plan).prices.staged_s
        return staged_s is not None and bool(staged_s[len(plan.chunks) - 1] > 0.0)

    def leads_further(self, plan: RestorePlan | None) -> bool:
        """Whether what is stored would lead further than the plan goes."""
        taken = len(plan.chunks) if plan else 0
        return any(way.total_s[taken:].min(initial=math.inf) < math.inf for way in self._ways)

    def declined(self, plan: RestorePlan | None) -> tuple[Tier, ...]:
        """Tiers of which resuming later than the plan does would load, and the plan nothing.

        Those too that are thought too slow for the deadline.
        """
        if not self._ways:
            return ()
        resume, loaded = self._local_tokens, set[Tier]()
        if plan is not None:
            resume = plan.resume_tokens
            if resume == self._chunks[-1].chunk.end:
                return ()
            loaded = _tiers(plan.held, plan.prefix_types)
            loaded |= _tiers([plan.chunks[-1].tiers], plan.boundary_types)
        if tiers_of(self._held.distinct) <= loaded:
            return ()
        further: set[Tier] = set()
        for way in self._ways:
            indices = way.possible_after(resume)
            if len(indices):
                further |= self._tiers_of(way, indices)
        return tuple(sorted(further - loaded))

    def candidates(self, plan: RestorePlan | None) -> Iterator[Candidate]:
        """Nothing at all, then every boundary, `plan`'s marked as chosen."""
        local = self._local_tokens
        yield Candidate(local, local, {}, self.nothing, chosen=plan is None)
        for way in self._ways:
            taken = len(plan.chunks) - 1 if plan and self._way_of(plan) is way else -1
            prefix_bytes: dict[Tier, int] = {}
            for index, stored in enumerate(self._chunks):
                self._add_bytes(prefix_bytes, stored, self._model.prefix_types)
                if way.barred_s is not None and way.barred_s[index]:
                    continue
                load_bytes = dict(prefix_bytes)
                if not way.replay_tokens:
                    needed = self._model.boundary_types_at(stored.chunk.end)
                    self._add_bytes(load_bytes, stored, needed)
                yield Candidate(
                    stored.chunk.end,
                    stored.chunk.end - way.replay_tokens,
                    load_bytes,
                    self._pricing.terms(way.prices, index),
                    in_time=bool(np.isfinite(way.total_s[index])),
                    chosen=index == taken,
                )

    def _way(self, replay_tokens: int, barred_s: Floats | None, deadline_s: float) -> _Way:
        prices = self._pricing.boundaries(self._chunks, self._held, replay_tokens)
        total_s, staged_s = prices.total_s, prices.staged_s
        if replay_tokens:
            # From the local tokens or before, nothing would be saved by what is loaded; and a
            # hand-off's end is off the grid, on which a replay starts and ends.
            possible = prices.resume > self._local_tokens
            possible[-1] &= self._chunks[-1].chunk.end % self._model.alignment == 0
            barred_s = np.where(possible, 0.0, math.inf)
        if barred_s is not None:
            total_s = total_s + barred_s
        if staged_s is not None and staged_s.max() > deadline_s:
            total_s = np.where(staged_s <= deadline_s, total_s, math.inf)
        best = len(total_s) - 1 - int(total_s[::-1].argmin())
        return _Way(prices, total_s, barred_s, replay_tokens, best, float(total_s[best]))

    def _tiers_of(self, way: _Way, indices: Codes) -> set[Tier]:
        """Where what is loaded for the boundaries at these chunks lies. An inner chunk's
        boundary state is not among it."""
        held = self._held.distinct_up_to(int(indices[-1]) + 1)
        tiers = _tiers(held, self._model.prefix_types)
        if not way.replay_tokens and self._model.boundary_types:
            ends = np.flatnonzero(np.bincount(self._held.codes[indices])).tolist()
            tiers |= _tiers([held[code] for code in ends], self._model.boundary_types)
        return tiers

    def _way_of(self, plan: RestorePlan) -> _Way:
        return self._ways[1 if plan.replay_tokens else 0]

    def _cut(self) -> None:
        """Leave the chunks before the first that lacks a prefix type."""
        held, prefix = self._held, set(self._model.prefix_types)
        for tiers, first in zip(held.distinct, held.firsts, strict=True):
            if not tiers.keys() >= prefix:
                self._chunks, self._held = self._chunks[:first], held.up_to(first)
                break

    def _barred(self, grid: ChunkGrid) -> Floats:
        """[chunks] infinite where boundary state is missing, else 0."""
        chunks, held = self._chunks, self._held
        types = self._model.boundary_types
        lacks = np.array([[t not in tiers for t in types] for tiers in held.distinct], np.float64)
        first = chunks[0].chunk.start // self._layout.chunk_tokens
        by_code_s = np.where(lacks.dot(grid.boundary_bytes) > 0.0, math.inf, 0.0)
        columns = grid.columns(first, len(chunks))
        barred_s: Floats = by_code_s.take(held.codes * by_code_s.shape[1] + columns)
        last = chunks[-1]
        is_whole = self._model.is_whole(last.tiers.keys(), last.chunk.end)
        barred_s[-1] = 0.0 if is_whole else math.inf  # it may be shorter than the grid has it
        return barred_s

    def _plan(self, way: _Way, index: int) -> RestorePlan:
        chunks = self._chunks[: index + 1]
        boundary = chunks[-1].chunk.end
        return RestorePlan(
            boundary,
            chunks,
            self._model.prefix_types,
            () if way.replay_tokens else self._model.boundary_types_at(boundary),
            self._held.distinct_up_to(index + 1),
            way.replay_tokens,
        )

    def _add_bytes(
        self, total: dict[Tier, int], stored: StoredChunk, types: Sequence[StateType]
    ) -> None:
        for state_type in types:
            tier, chunk = stored.tiers[state_type], stored.chunk
            size = self._layout.artifact_bytes(state_type, chunk.start, chunk.end)
            total[tier] = total.get(tier, 0) + size


class _Way(NamedTuple):
    """Every boundary, restored in one way."""

    prices: Prices
    total_s: Floats
    """Infinite where the boundary is not possible or staging is too slow."""
    barred_s: Floats | None
    """Infinite where the boundary is not possible, else 0; None where all are."""
    replay_tokens: int
    best: int
    """The chunk at the cheapest boundary; of equals the deepest."""
    best_s: float
    """That boundary's total."""

    def possible_after(self, resume: int) -> Codes:
        """The chunks whose ends are possible boundaries that resume later, in order."""
        first = int(self.prices.resume.searchsorted(resume, side="right"))
        if self.barred_s is None:
            return np.arange(first, len(self.total_s))
        return first + np.flatnonzero(self.barred_s[first:] == 0.0)


def _price(way: _Way) -> tuple[float, int]:
    return way.best_s, -way.best


def _tiers(held: Iterable[Mapping[StateType, Tier]], types: Sequence[StateType]) -> set[Tier]:
    """Where these types lie, of what can be resumed: a type that is not there is not needed."""
    return {tiers[t] for tiers in held for t in types if t in tiers}


def _between(
    stored: Sequence[StoredChunk], local_tokens: int, limit_tokens: int
) -> Sequence[StoredChunk]:
    """Those that end in (`local_tokens`, `limit_tokens`]; as a rule all do."""
    first = 0
    if stored and stored[0].chunk.end <= local_tokens:
        first = bisect_right(stored, local_tokens, key=_end)
    if first or (stored and stored[-1].chunk.end > limit_tokens):
        return stored[first : bisect_right(stored, limit_tokens, key=_end)]
    return stored


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
