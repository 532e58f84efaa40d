"""One request's candidates, priced and compared, and the decision among them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.boundaries import Boundaries, Floats
from hetero_connector.planner.cost_model import CostTerms
from hetero_connector.planner.plan import RestorePlan
from hetero_connector.planner.pricing import LoadTimes, Prices, Pricing


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

    def plan(self, boundaries: Boundaries, index: int) -> RestorePlan:
        """Return the plan to resume at the end of one chunk."""
        return boundaries.plan(index, self.replay_tokens, parked=self.prices.is_parked(index))

    def resumes_after(self, resume: int) -> bool:
        """True if a possible candidate resumes after this token."""
        return bool((self.prices.exposed_s[self.prices.resume > resume] < math.inf).any())

    def in_time_from(self, first: int) -> NDArray[np.bool_]:
        """[chunks from the `first` on] True if the request may resume there, staged in time."""
        possible: NDArray[np.bool_] = self.prices.exposed_s[first:] < math.inf
        if self.prices.staged_s is not None:
            possible &= self.prices.staged_s[first:] <= self.deadline_s
        return possible


class CandidateSet:
    """One request's candidates: nothing, and every boundary by each strategy.

    Prices are those of the moment of decision; a strategy is priced when it is first needed.
    """

    def __init__(
        self,
        pricing: Pricing,
        load_times: LoadTimes | None,
        local_tokens: int,
        *,
        replay_tokens: int,
        deadline_s: float,
    ) -> None:
        """`load_times`: up to the boundaries after the local tokens; None if there are none."""
        self.pricing, self.local_tokens = pricing, local_tokens
        self.boundaries = load_times.boundaries if load_times else None
        self.nothing = pricing.nothing(local_tokens)
        """The cost of restoring nothing."""
        self._load_times = load_times
        self._replay_tokens = replay_tokens
        self._deadline_s = deadline_s
        self._strategies: dict[int, Strategy] = {}
        """By replayed tokens."""

    def cheapest(self) -> tuple[RestorePlan | None, CostTerms]:
        """The cheapest candidate; loading wins a tie, and the deeper of two boundaries."""
        times, nothing_s = self._load_times, self.nothing.total_s
        if times is None:
            return None, self.nothing
        best = self._strategy(times, 0)
        if self._replay_tokens:
            latest = float(times.boundaries.ends[-1]) - self._replay_tokens
            # Usually a checkpoint is near, and computing that many tokens again costs more.
            if self.pricing.lower_bound_s(latest) <= min(best.best_s, nothing_s):
                best = min(best, self._strategy(times, self._replay_tokens), key=_order)
        if best.best_s > nothing_s:
            return None, self.nothing
        return best.plan(times.boundaries, best.best), self.pricing.terms(best.prices, best.best)

    def deepest(self, *, may_replay: bool) -> tuple[RestorePlan | None, CostTerms]:
        """The candidate that leaves the least to compute, whatever it costs.

        A checkpoint is taken unless a replay resumes later.
        """
        plan, terms = None, self.nothing
        for strategy in self.strategies():
            possible = np.flatnonzero(strategy.prices.exposed_s < math.inf)
            if self.boundaries and len(possible) and (may_replay or not strategy.replay_tokens):
                last = int(possible[-1])
                found = strategy.plan(self.boundaries, last)
                if plan is None or found.resume_tokens > plan.resume_tokens:
                    plan, terms = found, self.pricing.terms(strategy.prices, last)
        return plan, terms

    def strategies(self) -> Iterator[Strategy]:
        """Every strategy with its prices; none if there are no boundaries."""
        if self._load_times is not None:
            yield self._strategy(self._load_times, 0)
            if self._replay_tokens:
                yield self._strategy(self._load_times, self._replay_tokens)

    def _strategy(self, times: LoadTimes, replay_tokens: int) -> Strategy:
        if (known := self._strategies.get(replay_tokens)) is not None:
            return known
        if replay_tokens:
            prices = self.pricing.with_replay(times, replay_tokens, self.local_tokens)
        else:
            prices = self.pricing.with_checkpoints(times)
        total_s, staged_s = prices.total_s, prices.staged_s
        best = _last_argmin(total_s)
        if staged_s is not None and staged_s[best] > self._deadline_s:
            total_s = np.where(staged_s <= self._deadline_s, total_s, math.inf)
            best = _last_argmin(total_s)
        best_s = float(total_s[best])
        strategy = Strategy(prices, self._deadline_s, replay_tokens, best, best_s)
        self._strategies[replay_tokens] = strategy
        return strategy


@dataclass(frozen=True)
class RestoreDecision:
    """The plan for one request, and its predicted cost.

    `declined` and `candidates` are computed when they are first asked for, from prices of the
    moment of decision, so that they need not delay the first token unless a load is due to be
    tried.
    """

    plan: RestorePlan | None
    """None: restore nothing."""
    predicted: CostTerms
    considered: CandidateSet = field(repr=False, compare=False)
    by_cost: bool = True
    """False if the planner's mode, not the cost, decided."""

    @property
    def nothing(self) -> CostTerms:
        """The cost of computing everything after the local tokens."""
        return self.considered.nothing

    @property
    def reuse_benefit_s(self) -> float:
        """C_prefill - C_load - C_recompute - C_stall, in seconds; 0 if nothing is loaded.

        C_prefill is the cost of computing everything after the local tokens, stall included.
        """
        prefill, chosen = self.nothing, self.predicted
        return (prefill.compute_s + prefill.stall_s) - (
            chosen.load_s + chosen.compute_s + chosen.stall_s
        )

    @cached_property
    def declined(self) -> Mapping[Tier, int]:
        """Tiers from which nothing is loaded for its cost, although the request would resume later.

        Each with the most bytes that a load from it could have. Includes tiers that are predicted
        to miss the deadline. Nothing is learned about them this time, so after ten minutes without
        such a load one is tried (`LoadModel.on_declined`).
        """
        plan, at = self.plan, self.considered.boundaries
        if not self.by_cost or at is None:
            return {}
        resume = plan.resume_tokens if plan else self.considered.local_tokens
        declined = at.tiers_after(resume) - (plan.source_tiers if plan else set())
        if not declined or not any(x.resumes_after(resume) for x in self.considered.strategies()):
            return {}
        return {tier: at.bytes_in(tier) for tier in sorted(declined)}

    @property
    def is_rest_slow(self) -> bool:
        """True if state after the chosen boundary could be loaded in time, but computing is faster.

        False if the planner's mode decided.
        """
        taken, strategies = len(self.plan.chunks) if self.plan else 0, self.considered.strategies()
        return self.by_cost and any(x.in_time_from(taken).any() for x in strategies)

    def candidates(self) -> tuple[RestoreCandidate, ...]:
        """Every candidate, restoring nothing first, then by boundary.

        Takes milliseconds: for people.
        """
        local, plan = self.considered.local_tokens, self.plan
        nothing = RestoreCandidate(local, local, {}, self.nothing, chosen=plan is None)
        return (nothing, *self._boundary_candidates())

    def _boundary_candidates(self) -> Iterator[RestoreCandidate]:
        at, plan = self.considered.boundaries, self.plan
        if at is None:
            return
        chosen = (plan.boundary, plan.replay_tokens) if plan else None
        for strategy in self.considered.strategies():
            possible = (strategy.prices.exposed_s < math.inf).tolist()
            in_time = strategy.in_time_from(0).tolist()
            load_bytes = at.load_bytes(by_replay=strategy.replay_tokens > 0)
            ends = at.ends.astype(int).tolist()
            for index, (boundary, size_bytes) in enumerate(zip(ends, load_bytes, strict=True)):
                if possible[index]:
                    yield RestoreCandidate(
                        boundary,
                        boundary - strategy.replay_tokens,
                        size_bytes,
                        self.considered.pricing.terms(strategy.prices, index),
                        in_time=in_time[index],
                        chosen=chosen == (boundary, strategy.replay_tokens),
                    )


def _last_argmin(total_s: Floats) -> int:
    return len(total_s) - 1 - int(total_s[::-1].argmin())


def _order(strategy: Strategy) -> tuple[float, int]:
    return strategy.best_s, -strategy.best
