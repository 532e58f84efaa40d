"""All the ways to serve one request, priced and compared."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.planner.boundaries import (
    ChunkGrid,
    ChunkTiers,
    Codes,
    Floats,
    PricedChunks,
    tiers_of,
)
from hetero_connector.planner.cost_model import CostTerms
from hetero_connector.planner.decision import RestoreCandidate
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.planner.pricing import Prices, Pricing
from hetero_connector.spec.state_types import StateType


class CandidateSet:
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
        self._local_tokens, self._replay_tokens = local_tokens, replay_tokens
        self._deadline_s = deadline_s
        self.nothing = pricing.nothing(local_tokens)
        self._ways: dict[int, Strategy] = {}
        """By replayed tokens, priced when they are first asked for."""
        self._chunks = _between(stored, local_tokens, limit_tokens)
        if self._chunks:
            self._held = ChunkTiers.of(self._chunks)
            self._cut()
        if self._chunks:
            self._moving = pricing.moving(PricedChunks(grid, self._chunks, self._held))

    def cheapest(self) -> tuple[RestorePlan | None, CostTerms]:
        """The best way; loading wins a tie, and the deeper of two."""
        nothing_s = self.nothing.total_s
        if not self._chunks:
            return None, self.nothing
        way = self._way(0)
        if self._replay_tokens:
            latest = self._chunks[-1].chunk.end - self._replay_tokens
            # As a rule a checkpoint is near, and computing so many tokens again is dearer.
            if self._pricing.least_s(latest) <= min(way.best_s, nothing_s):
                way = min(way, self._way(self._replay_tokens), key=_price)
        if way.best_s > nothing_s:
            return None, self.nothing
        return self._plan(way, way.best), self._pricing.terms(way.prices, way.best)

    def of(self, plan: RestorePlan | None) -> tuple[RestorePlan | None, CostTerms]:
        """A plan made elsewhere, and its terms."""
        if plan is None:
            return None, self.nothing
        return plan, self._pricing.terms(self._way(plan.replay_tokens).prices, len(plan.chunks) - 1)

    def stages(self, plan: RestorePlan) -> bool:
        """Whether the plan needs artifacts that are not in DRAM."""
        staged_s = self._way(plan.replay_tokens).prices.staged_s
        return staged_s is not None and bool(staged_s[len(plan.chunks) - 1] > 0.0)

    def leads_further(self, plan: RestorePlan | None) -> bool:
        """Whether what is stored would lead further than the plan goes."""
        taken = len(plan.chunks) if plan else 0
        return any(way.may_be_taken(taken).any() for way in self._all_ways())

    def declined(self, plan: RestorePlan | None) -> tuple[Tier, ...]:
        """Tiers of which resuming later than the plan does would load, and the plan nothing.

        Those too that are thought too slow for the deadline.
        """
        if not self._chunks:
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
        for way in self._all_ways():
            indices = way.possible_after(resume)
            if len(indices):
                further |= self._tiers_of(way, indices)
        return tuple(sorted(further - loaded))

    def candidates(self, plan: RestorePlan | None) -> Iterator[RestoreCandidate]:
        """Nothing at all, then every boundary, `plan`'s marked as chosen."""
        local = self._local_tokens
        yield RestoreCandidate(local, local, {}, self.nothing, chosen=plan is None)
        for way in self._all_ways():
            taken = len(plan.chunks) - 1 if plan and plan.replay_tokens == way.replay_tokens else -1
            prefix_bytes: dict[Tier, int] = {}
            in_time = way.may_be_taken(0).tolist()
            for index, stored in enumerate(self._chunks):
                self._add_bytes(prefix_bytes, stored, self._model.prefix_types)
                if not way.is_possible(index):
                    continue
                load_bytes = dict(prefix_bytes)
                if not way.replay_tokens:
                    needed = self._model.boundary_types_at(stored.chunk.end)
                    self._add_bytes(load_bytes, stored, needed)
                yield RestoreCandidate(
                    stored.chunk.end,
                    stored.chunk.end - way.replay_tokens,
                    load_bytes,
                    self._pricing.terms(way.prices, index),
                    in_time=in_time[index],
                    chosen=index == taken,
                )

    def _all_ways(self) -> Iterator[Strategy]:
        if self._chunks:
            yield self._way(0)
            if self._replay_tokens:
                yield self._way(self._replay_tokens)

    def _way(self, replay_tokens: int) -> Strategy:
        way = self._ways.get(replay_tokens)
        if way is None:
            way = self._ways[replay_tokens] = self._priced(replay_tokens)
        return way

    def _priced(self, replay_tokens: int) -> Strategy:
        if replay_tokens:
            prices = self._pricing.replays(self._moving, replay_tokens, self._local_tokens)
        else:
            prices = self._pricing.checkpoints(self._moving)
        total_s, staged_s = prices.total_s, prices.staged_s
        best = _last_least(total_s)
        if staged_s is not None and staged_s[best] > self._deadline_s:
            total_s = np.where(staged_s <= self._deadline_s, total_s, math.inf)
            best = _last_least(total_s)
        return Strategy(prices, self._deadline_s, replay_tokens, best, float(total_s[best]))

    def _tiers_of(self, way: Strategy, indices: Codes) -> set[Tier]:
        """Where what is loaded for the boundaries at these chunks lies. An inner chunk's
        boundary state is not among it."""
        held = self._held.distinct_up_to(int(indices[-1]) + 1)
        tiers = _tiers(held, self._model.prefix_types)
        if not way.replay_tokens and self._model.boundary_types:
            ends = np.flatnonzero(np.bincount(self._held.codes[indices])).tolist()
            tiers |= _tiers([held[code] for code in ends], self._model.boundary_types)
        return tiers

    def _cut(self) -> None:
        """Leave the chunks before the first that lacks a prefix type."""
        held, prefix = self._held, set(self._model.prefix_types)
        for tiers, first in zip(held.distinct, held.firsts, strict=True):
            if not tiers.keys() >= prefix:
                self._chunks, self._held = self._chunks[:first], held.up_to(first)
                break

    def _plan(self, way: Strategy, index: int) -> RestorePlan:
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


class Strategy(NamedTuple):
    """Every boundary, restored in one way."""

    prices: Prices
    deadline_s: float
    replay_tokens: int
    best: int
    """The chunk at the cheapest boundary that is staged in time; of equals the deepest."""
    best_s: float
    """That boundary's total; infinite where none is possible and in time."""

    def is_possible(self, index: int) -> bool:
        """Whether one may resume there, however slow it is."""
        return bool(self.prices.exposed_s[index] < math.inf)

    def may_be_taken(self, first: int) -> NDArray[np.bool_]:
        """Of the chunks from the `first` on: whether one may resume there, staged in time."""
        possible: NDArray[np.bool_] = self.prices.exposed_s[first:] < math.inf
        if self.prices.staged_s is not None:
            possible &= self.prices.staged_s[first:] <= self.deadline_s
        return possible

    def possible_after(self, resume: int) -> Codes:
        """The chunks whose ends are possible boundaries that resume later, in order."""
        first = int(self.prices.resume.searchsorted(resume, side="right"))
        return first + np.flatnonzero(self.prices.exposed_s[first:] < math.inf)


def _last_least(total_s: Floats) -> int:
    return len(total_s) - 1 - int(total_s[::-1].argmin())


def _price(way: Strategy) -> tuple[float, int]:
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
