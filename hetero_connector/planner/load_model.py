"""Seconds a load takes: per tier a latency and, for each state type, bytes over bandwidth.

    T(load) = latency + [engine computes] l + (bytes in flight) r + sum over types (bytes x s_t)

Bandwidth is kept by state type because small artifacts move more slowly than large ones. Loads
of several types are observed as a whole; the fit separates the types. Bytes that the tier is
already moving go first, at the average rate r of the mix it usually moves. While the engine
computes, loads take l longer: they share cores and the interpreter. A tier's speed may change
suddenly (other load, throttling, another path); a few loads are enough to notice. So that there are
some, one is tried if for ten minutes loads were declined for their cost and none was made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.cost_fit import ChangeDetector, RelativeErrors, RobustLeastSquares
from hetero_connector.spec.state_types import StateType

_Kind = tuple[Tier, int]
"""A tier, and the size class of a load from it."""

_LEAST_S_PER_BYTE = 1e-30
"""Too little to show in any sum, but not 0: a load of bytes must differ from a load of none."""
_KEEP_OF_MIX = 0.99
"""Weight that the earlier mix of state types keeps with each load."""
_TRY_AFTER_S = 600.0
"""Seconds from when loads are first declined to when one of them is tried."""
_RECOVERED = 0.5
"""A load that is tried and takes less than this share of the prediction makes another one due."""


@dataclass(frozen=True)
class TierRates:
    """The speed of one tier. Loads from SSD and PEER go to DRAM, loads from DRAM go to pages."""

    latency_s: float
    """Seconds before the first byte, once per load."""
    seconds_per_byte: Mapping[StateType, float]
    ahead_s_per_byte: float
    """Seconds per byte of earlier loads that are still in flight."""
    while_computing_s: float = 0.0
    """Additional seconds, once per load, while the engine computes."""

    def overhead_s(self, in_flight_bytes: float, *, while_computing: bool) -> float:
        """Seconds of a load besides those of its own bytes."""
        waiting_s = self.latency_s + in_flight_bytes * self.ahead_s_per_byte
        return waiting_s + self.while_computing_s if while_computing else waiting_s

    def seconds(
        self,
        bytes_by_type: Mapping[StateType, float],
        in_flight_bytes: float,
        *,
        while_computing: bool = False,
    ) -> float:
        """Seconds of a load; 0 for a load of no bytes."""
        if not any(bytes_by_type.values()):
            return 0.0
        moving_s = sum(n * self.seconds_per_byte[t] for t, n in bytes_by_type.items())
        return self.overhead_s(in_flight_bytes, while_computing=while_computing) + moving_s


class LoadModel:
    """Predicts loads from each tier, learning from real ones. Not thread-safe."""

    def __init__(
        self, state_types: Sequence[StateType], profile: Mapping[Tier, TierRates] | None = None
    ) -> None:
        """`state_types`: those of the model. `profile`: rates measured earlier, to start from."""
        self._types = tuple(state_types)
        self._known = frozenset(profile or ())
        self._tiers = {
            tier: _TierFit(self._types, (profile or {}).get(tier), *default)
            for tier, default in _FAST_TIERS.items()
        }
        self._try_from_s: dict[_Kind, float] = {}
        """Clock time from which one of these loads, which were declined, is due to be tried."""
        self._due: set[_Kind] = set()
        self._tried: set[_Kind] = set()
        """The kinds of loads that were tried, until one of each has ended."""

    def rates(self, tier: Tier) -> TierRates:
        """The present fit; the same object until the next `observe`."""
        return self._tiers[tier].rates

    def errors(self, tier: Tier) -> RelativeErrors:
        """Errors of the tier's loads, each predicted before it was learned from."""
        return self._tiers[tier].fit.errors

    def is_measured(self, tier: Tier, min_samples: int = 1) -> bool:
        """True if the tier's rates come from a profile, or from so many loads of this engine."""
        return tier in self._known or self.errors(tier).count >= min_samples

    def observe(
        self,
        tier: Tier,
        bytes_by_type: Mapping[StateType, float],
        seconds: float,
        in_flight_bytes: float = 0,
        *,
        while_computing: bool = False,
        at_least: bool = False,
    ) -> None:
        """Learn from a load that took `seconds`, queued behind `in_flight_bytes` of others.

        `while_computing`: the engine computed meanwhile. `at_least`: the load failed after
        `seconds` and would have taken longer; it is ignored unless less is predicted. Without
        effect unless bytes and seconds are above 0. Raises KeyError for a state type that the
        model does not store.
        """
        predicted_s = self.predict(
            tier, bytes_by_type, in_flight_bytes, while_computing=while_computing
        )
        if at_least and predicted_s >= seconds:
            return
        if any(bytes_by_type.values()) and 0.0 < seconds < math.inf:
            kind = tier, _size_class(sum(bytes_by_type.values()))
            self._forget_declined(kind)
            if kind in self._tried and seconds < _RECOVERED * predicted_s:
                self._due.add(kind)
            self._tried.discard(kind)
            self._tiers[tier].observe(bytes_by_type, seconds, in_flight_bytes, while_computing)

    def predict(
        self,
        tier: Tier,
        bytes_by_type: Mapping[StateType, float],
        in_flight_bytes: float = 0,
        *,
        while_computing: bool = False,
    ) -> float:
        """Seconds of a load; 0 for a load of no bytes."""
        return self.rates(tier).seconds(
            bytes_by_type, in_flight_bytes, while_computing=while_computing
        )

    def artifact_seconds(self, tier: Tier, state_type: StateType, size_bytes: int) -> float:
        """Seconds that one more artifact adds to a load. Safe to call on any thread."""
        return size_bytes * self.rates(tier).seconds_per_byte[state_type]

    def on_declined(self, tier: Tier, size_bytes: float, now_s: float) -> None:
        """Note that a load was declined for its cost.

        If for ten minutes such loads were declined and none was made, one is due to be tried.
        Otherwise a disk that was slow once is never tried again, and its recovery never noticed.
        Sizes are counted separately, for many small ones may be declined rightly. `now_s`: any
        clock, always the same.
        """
        kind = tier, _size_class(size_bytes)
        if now_s >= self._try_from_s.setdefault(kind, now_s + _TRY_AFTER_S):
            self._due.add(kind)

    @property
    def has_due(self) -> bool:
        """True if some load is to be tried although it will be declined."""
        return bool(self._due)

    def due(self, declined: Mapping[Tier, float]) -> dict[Tier, TierRates]:
        """The tiers, among these with the declined bytes, from which a load is due to be tried.

        Each with the rates before any load, at which to price it.
        """
        kinds = self._due & {(tier, _size_class(n)) for tier, n in declined.items()}
        return {tier: self._tiers[tier].default for tier, _ in kinds}

    def on_tried(self, tier: Tier, size_bytes: float) -> None:
        """Note that a load that was due is being made: it is due no more."""
        kind = tier, _size_class(size_bytes)
        self._forget_declined(kind)
        self._tried.add(kind)

    def _forget_declined(self, kind: _Kind) -> None:
        self._try_from_s.pop(kind, None)
        self._due.discard(kind)


_FAST_TIERS = {Tier.DRAM: (2e-4, 1 / 10e9), Tier.SSD: (1e-3, 1 / 3e9), Tier.PEER: (2e-3, 1 / 3e9)}
"""(latency in s, seconds per byte) before the first load: 10 and 3 GB/s. Optimistic, so that a
load is tried and its speed can be learned."""


class _TierFit:
    """One tier's regression over (1, whether the engine computes, bytes of each type)."""

    def __init__(
        self,
        state_types: tuple[StateType, ...],
        profile: TierRates | None,
        latency_s: float,
        s_per_byte: float,
    ) -> None:
        self._types = state_types
        self.default = TierRates(latency_s, dict.fromkeys(state_types, s_per_byte), s_per_byte)
        default = [latency_s, latency_s] + [s_per_byte] * len(state_types)
        # Until a load shows otherwise, it takes no longer while the engine computes.
        known: list[float | None] = [None, 0.0, *(None for _ in state_types)]
        if profile:
            per_byte = (profile.seconds_per_byte.get(t) for t in state_types)
            known = [profile.latency_s, profile.while_computing_s]
            known.extend(0.0 if s == _LEAST_S_PER_BYTE else s for s in per_byte)
        self.fit = RobustLeastSquares(default, known, ChangeDetector())
        self._moved = dict.fromkeys(state_types, 0.0)
        self._unseen_s_per_byte = profile.ahead_s_per_byte if profile else s_per_byte
        self.rates = self._rates()

    def observe(
        self,
        bytes_by_type: Mapping[StateType, float],
        seconds: float,
        in_flight_bytes: float,
        while_computing: bool,
    ) -> None:
        size_class = _size_class(sum(bytes_by_type.values()) + in_flight_bytes)
        moved = {t: _KEEP_OF_MIX * n for t, n in self._moved.items()}
        for state_type, size in bytes_by_type.items():
            moved[state_type] += size
        self._moved = moved
        # Bytes in flight count as bytes of the usual mix of types.
        share = in_flight_bytes / sum(moved.values())
        row = [bytes_by_type.get(t, 0) + share * moved[t] for t in self._types]
        self.fit.observe([1.0, float(while_computing), *row], seconds, size_class)
        self.rates = self._rates()

    def _rates(self) -> TierRates:
        latency_s, while_computing_s, *per_byte = self.fit.coefficients
        seconds = {t: max(s, _LEAST_S_PER_BYTE) for t, s in zip(self._types, per_byte, strict=True)}
        total = sum(self._moved.values())
        ahead = self._unseen_s_per_byte
        if total:
            ahead = sum(seconds[t] * n for t, n in self._moved.items()) / total
        return TierRates(latency_s, seconds, ahead, while_computing_s)


def _size_class(size_bytes: float) -> int:
    """Return the same number for sizes within a factor of 16."""
    return int(size_bytes).bit_length() // 4
