"""All candidates of one request: every boundary it could resume at, priced and compared."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.planner.pricing import Prices, Pricing
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True)
class RestoreCandidate:
    """One way to serve the request. Slow to make: for people."""

    boundary: int
    """State of the tokens before it is restored; the local tokens if nothing is loaded."""
    resume_tokens: int
    """The first token that the engine computes: the boundary, or earlier for a replay."""
    load_bytes: Mapping[Tier, int]
    """Bytes to load, by source tier."""
    terms: CostTerms
    in_time: bool = True
    """False if staging is predicted to miss the deadline; such a candidate is not taken."""
    chosen: bool = False


class Strategy(NamedTuple):
    """Every boundary, restored with checkpoints or with a replay of `replay_tokens`."""

    prices: Prices
    deadline_s: float
    replay_tokens: int
    """0: with checkpoints."""
    best: int
    """The chunk whose end is the cheapest boundary that is staged in time; the last of equals."""
    best_s: float
    """The total of that boundary; infinite if none is possible in time."""

    def is_possible(self, index: int) -> bool:
        """True if the request may resume at the end of this chunk, however slow that is."""
        return bool(self.prices.exposed_s[index] < math.inf)

    def in_time_from(self, first: int) -> NDArray[np.bool_]:
        """[chunks from the `first` on] True if the request may resume there, staged in time."""
        possible: NDArray[np.bool_] = self.prices.exposed_s[first:] < math.inf
        if self.prices.staged_s is not None:
            possible &= self.prices.staged_s[first:] <= self.deadline_s
        return possible

    def possible_after(self, resume: int) -> Codes:
        """The indices of chunks whose ends are possible and resume after `resume`, in order."""
        first = int(self.prices.resume.searchsorted(resume, side="right"))
        return first + np.flatnonzero(self.prices.exposed_s[first:] < math.inf)


class CandidateSet:
    """One request's candidates: nothing, and every boundary by each strategy.

    Prices are those of the moment of decision; a strategy is priced when it is first needed.
    """

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
        self.local_tokens, self.prompt_tokens = local_tokens, pricing.prompt_tokens
        self._replay_tokens = replay_tokens
        self._deadline_s = deadline_s
        self.nothing = pricing.nothing(local_tokens)
        """The cost of restoring nothing."""
        self._strategies: dict[int, Strategy] = {}
        """By replayed tokens."""
        self._chunks = _between(stored, local_tokens, limit_tokens)
        if self._chunks:
            self._tiers = ChunkTiers.of(self._chunks)
            self._cut_at_missing_prefix()
        if self._chunks:
            chunks = PricedChunks(grid, self._chunks, self._tiers)
            self._load_times = pricing.load_times(chunks)

    def cheapest(self) -> tuple[RestorePlan | None, CostTerms]:
        """The cheapest candidate; loading wins a tie, and the deeper of two boundaries."""
        nothing_s = self.nothing.total_s
        if not self._chunks:
            return None, self.nothing
        best = self._strategy(0)
        if self._replay_tokens:
            latest = self._chunks[-1].chunk.end - self._replay_tokens
            # Usually a checkpoint is near, and computing that many tokens again costs more.
            if self._pricing.lower_bound_s(latest) <= min(best.best_s, nothing_s):
                best = min(best, self._strategy(self._replay_tokens), key=_order)
        if best.best_s > nothing_s:
            return None, self.nothing
        return self._plan(best, best.best), self._pricing.terms(best.prices, best.best)

    def terms_of(self, plan: RestorePlan | None) -> CostTerms:
        """The cost of a plan over these chunks."""
        if plan is None:
            return self.nothing
        prices = self._strategy(plan.replay_tokens).prices
        return self._pricing.terms(prices, len(plan.chunks) - 1)

    def needs_staging(self, plan: RestorePlan) -> bool:
        """True if the plan loads artifacts that are not in DRAM."""
        staged_s = self._strategy(plan.replay_tokens).prices.staged_s
        return staged_s is not None and bool(staged_s[len(plan.chunks) - 1] > 0.0)

    def has_deeper(self, plan: RestorePlan | None) -> bool:
        """True if a boundary after the plan's could be restored in time."""
        taken = len(plan.chunks) if plan else 0
        return any(x.in_time_from(taken).any() for x in self._all_strategies())

    def declined_tiers(self, plan: RestorePlan | None) -> tuple[Tier, ...]:
        """Tiers from which the plan loads nothing, although candidates that resume later do.

        Includes tiers that are predicted to miss the deadline.
        """
        if not self._chunks:
            return ()
        resume, loaded = self.local_tokens, set[Tier]()
        if plan is not None:
            resume = plan.resume_tokens
            if resume == self._chunks[-1].chunk.end:
                return ()
            loaded = _tiers_with(plan.tiers, plan.prefix_types)
            loaded |= _tiers_with([plan.chunks[-1].tiers], plan.boundary_types)
        if tiers_of(self._tiers.distinct) <= loaded:
            return ()
        later: set[Tier] = set()
        for strategy in self._all_strategies():
            indices = strategy.possible_after(resume)
            if len(indices):
                later |= self._tiers_of(strategy, indices)
        return tuple(sorted(later - loaded))

    def candidates(self, plan: RestorePlan | None) -> Iterator[RestoreCandidate]:
        """Yield restoring nothing, then every boundary; `plan` is marked as chosen."""
        local = self.local_tokens
        yield RestoreCandidate(local, local, {}, self.nothing, chosen=plan is None)
        for strategy in self._all_strategies():
            replay_tokens = strategy.replay_tokens
            is_plans = plan is not None and plan.replay_tokens == replay_tokens
            taken = len(plan.chunks) - 1 if plan and is_plans else -1
            prefix_bytes: dict[Tier, int] = {}
            in_time = strategy.in_time_from(0).tolist()
            for index, stored in enumerate(self._chunks):
                self._add_bytes(prefix_bytes, stored, self._model.prefix_types)
                if not strategy.is_possible(index):
                    continue
                load_bytes = dict(prefix_bytes)
                if not replay_tokens:
                    needed = self._model.boundary_types_at(stored.chunk.end)
                    self._add_bytes(load_bytes, stored, needed)
                yield RestoreCandidate(
                    stored.chunk.end,
                    stored.chunk.end - replay_tokens,
                    load_bytes,
                    self._pricing.terms(strategy.prices, index),
                    in_time=in_time[index],
                    chosen=index == taken,
                )

    def _all_strategies(self) -> Iterator[Strategy]:
        if self._chunks:
            yield self._strategy(0)
            if self._replay_tokens:
                yield self._strategy(self._replay_tokens)

    def _strategy(self, replay_tokens: int) -> Strategy:
        strategy = self._strategies.get(replay_tokens)
        if strategy is None:
            strategy = self._strategies[replay_tokens] = self._priced(replay_tokens)
        return strategy

    def _priced(self, replay_tokens: int) -> Strategy:
        times = self._load_times
        if replay_tokens:
            prices = self._pricing.with_replay(times, replay_tokens, self.local_tokens)
        else:
            prices = self._pricing.with_checkpoints(times)
        total_s, staged_s = prices.total_s, prices.staged_s
        best = _last_argmin(total_s)
        if staged_s is not None and staged_s[best] > self._deadline_s:
            total_s = np.where(staged_s <= self._deadline_s, total_s, math.inf)
            best = _last_argmin(total_s)
        return Strategy(prices, self._deadline_s, replay_tokens, best, float(total_s[best]))

    def _tiers_of(self, strategy: Strategy, indices: Codes) -> set[Tier]:
        """The tiers of all that is loaded to resume at the ends of these chunks.

        The boundary state of the chunks before them is not loaded.
        """
        distinct = self._tiers.distinct_up_to(int(indices[-1]) + 1)
        tiers = _tiers_with(distinct, self._model.prefix_types)
        if not strategy.replay_tokens and self._model.boundary_types:
            codes = np.flatnonzero(np.bincount(self._tiers.codes[indices])).tolist()
            tiers |= _tiers_with([distinct[code] for code in codes], self._model.boundary_types)
        return tiers

    def _cut_at_missing_prefix(self) -> None:
        """Drop the first chunk that lacks a prefix type, and all after it."""
        tiers, prefix = self._tiers, set(self._model.prefix_types)
        for mapping, first in zip(tiers.distinct, tiers.firsts, strict=True):
            if not mapping.keys() >= prefix:
                self._chunks, self._tiers = self._chunks[:first], tiers.up_to(first)
                break

    def _plan(self, strategy: Strategy, index: int) -> RestorePlan:
        chunks = self._chunks[: index + 1]
        boundary = chunks[-1].chunk.end
        return RestorePlan(
            boundary,
            chunks,
            self._model.prefix_types,
            () if strategy.replay_tokens else self._model.boundary_types_at(boundary),
            self._tiers.distinct_up_to(index + 1),
            strategy.replay_tokens,
        )

    def _add_bytes(
        self, total: dict[Tier, int], stored: StoredChunk, types: Sequence[StateType]
    ) -> None:
        for state_type in types:
            tier, chunk = stored.tiers[state_type], stored.chunk
            size = self._layout.artifact_bytes(state_type, chunk.start, chunk.end)
            total[tier] = total.get(tier, 0) + size


def _last_argmin(total_s: Floats) -> int:
    return len(total_s) - 1 - int(total_s[::-1].argmin())


def _order(strategy: Strategy) -> tuple[float, int]:
    return strategy.best_s, -strategy.best


def _tiers_with(
    mappings: Iterable[Mapping[StateType, Tier]], types: Sequence[StateType]
) -> set[Tier]:
    """The tiers of these types. A boundary may do without a type, so it may be absent."""
    return {tiers[t] for tiers in mappings for t in types if t in tiers}


def _between(
    stored: Sequence[StoredChunk], local_tokens: int, limit_tokens: int
) -> Sequence[StoredChunk]:
    """The chunks that end in (`local_tokens`, `limit_tokens`]; usually all of them."""
    first = 0
    if stored and stored[0].chunk.end <= local_tokens:
        first = bisect_right(stored, local_tokens, key=_end)
    if first or (stored and stored[-1].chunk.end > limit_tokens):
        return stored[first : bisect_right(stored, limit_tokens, key=_end)]
    return stored


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
