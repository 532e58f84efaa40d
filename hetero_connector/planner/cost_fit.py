"""Learns coefficients of seconds online, one sample at a time.

`RobustLeastSquares` fits seconds as a non-negative combination of features. It is recursive least
squares in information form: it keeps the normal equations instead of their inverse, which makes
three things plain arithmetic that the covariance form cannot do. Evidence is a sum over size
classes of samples, so that a million decode steps do not wash out what few prefills have taught
(covariance wind-up). Coefficients are held at or above zero. Evidence fades towards the default.

`ChangeDetector` separates lasting changes from outliers, for tiers whose speed changes suddenly: a
slowly forgetting fit cannot follow them. `RelativeErrors` keeps score of predictions.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_FORGETTING = 0.995
"""Weight that a size class's older samples keep at each new one: about 200 count."""
_HUBER = 2.0
"""Residuals beyond this many running mean deviations lose weight (P. J. Huber, Robust
Estimation of a Location Parameter, 1964)."""
_GUESSED = 3e-9
"""Weight of a built-in default, in samples: it may be a thousand times off."""
_KNOWN = 3.0
"""Weight of a measured profile, in samples."""
_GATHERED_SAMPLES = 8
"""Changes are detected after so many samples."""
_SETTLED_SAMPLES = 64
_SOLVE_EVERY = 8
"""Samples per solution after `_SETTLED_SAMPLES`: one sample changes little, and solving is the
expensive part."""
_LEAST_SCALE = 1e-100
"""Keeps the inverse and the square of a scale within floating point."""
_DEVIATION_GAIN = 0.05
_LEAST_DEVIATION = 0.01
_KEEP_AT_CHANGE = 1e-6
"""Weight left at a change to everything learned before it. Not 0: it still decides what the new
samples leave open."""


@dataclass
class RelativeErrors:
    """|predicted - observed| / observed of the last samples, each predicted before learning."""

    window: int = 256
    count: int = 0
    """All samples so far; the statistics are over the last `window`."""
    _last: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._last = deque(maxlen=self.window)

    def add(self, predicted_s: float, observed_s: float) -> None:
        """Count one prediction. `observed_s` is above 0."""
        self._last.append(abs(predicted_s - observed_s) / observed_s)
        self.count += 1

    @property
    def median(self) -> float:
        """Half of the errors are at most this; infinite before the first sample."""
        return self.quantile(0.5)

    @property
    def p95(self) -> float:
        """95 of 100 errors are at most this; infinite before the first sample."""
        return self.quantile(0.95)

    def quantile(self, share: float) -> float:
        """The error that `share` of the samples, in (0, 1], do not exceed."""
        if not self._last:
            return math.inf
        ordered = sorted(self._last)
        return ordered[math.ceil(share * len(ordered)) - 1]


class RobustLeastSquares:
    """Fits seconds = sum of coefficient x feature, every coefficient >= 0. Not thread-safe.

    Residuals are relative to the predicted seconds, so a step of 2 ms teaches as much as a
    prefill of 2 s.
    """

    def __init__(
        self,
        default: Sequence[float],
        known: Sequence[float | None] | None = None,
        changes: ChangeDetector | None = None,
    ) -> None:
        """`default`: seconds per unit of each feature, above 0, in force until the first samples.

        `known`: coefficients measured earlier, at least 0, None where not measured. They weigh
        as much as a few samples, also where samples show them to be several times too small. A
        coefficient measured as 0 may have been too small to see, so it is learned anew.

        `changes`: pass a detector where the truth may change suddenly. At a change almost all
        earlier evidence is dropped.
        """
        pairs = list(zip(known or [None] * len(default), default, strict=True))
        self._scale = np.array([max(k or d, _LEAST_SCALE) for k, d in pairs])
        guess = np.array([0.0 if k == 0.0 else d for k, d in pairs]) / self._scale
        self._guess = _GUESSED * np.column_stack([np.eye(len(guess)), guess])
        self._known = np.array([_KNOWN if k else 0.0 for k, _ in pairs])
        """`[features]`: weight of each known coefficient, in samples."""
        self._coefficients: tuple[float, ...] = tuple(self._scale.tolist())
        self._evidence: dict[int, NDArray[np.float64]] = {}
        """[features, features + 1] weighted normal equations, by size class."""
        self._deviation = 0.5
        self._changes = changes
        self.errors = RelativeErrors()
        self._solve()

    @property
    def samples(self) -> int:
        """Samples learned so far."""
        return self.errors.count

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; at least 0 if no feature is negative."""
        return sum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float, size_class: int) -> None:
        """Learn one sample; only earlier samples of its own size class lose weight.

        Without effect unless `seconds` is finite and above 0.
        """
        if not 0.0 < seconds < math.inf:
            return
        predicted_s = self.predict(features)
        self.errors.add(predicted_s, seconds)
        sample = Observation(features, seconds, size_class)
        if self._changes and self.samples > _GATHERED_SAMPLES:
            changed = self._changes.update(sample, predicted_s, _HUBER * self._deviation)
            if changed:
                self._restart(changed)
                return
        self._add(sample, self._weight(sample))
        if self.samples <= _SETTLED_SAMPLES or self.samples % _SOLVE_EVERY == 0:
            self._solve()

    def fade(self, keep: float) -> None:
        """Keep this share, in [0, 1], of what is known; the coefficients approach the default."""
        for evidence in (self._known, *self._evidence.values()):
            evidence *= keep
        self._solve()

    def _restart(self, changed: Sequence[Observation]) -> None:
        """Learn the samples of a change almost from nothing."""
        self.fade(_KEEP_AT_CHANGE)
        for sample in changed:
            self._add(sample, weight=1.0)
            self._solve()

    def _weight(self, sample: Observation) -> float:
        """Return 1, or less for an outlier."""
        deviation = abs(sample.seconds - self.predict(sample.features)) / self._unit_s(sample)
        bound = _HUBER * self._deviation
        step = _DEVIATION_GAIN * (min(deviation, 1.5 * bound) - self._deviation)
        self._deviation = max(_LEAST_DEVIATION, self._deviation + step)
        return 1.0 if deviation <= bound else bound / deviation

    def _unit_s(self, sample: Observation) -> float:
        """The seconds that the sample's residual is relative to: never close to 0."""
        return max(self.predict(sample.features), sample.seconds / 2)

    def _add(self, sample: Observation, weight: float) -> None:
        """Add a sample to the evidence of its size class."""
        row: NDArray[np.float64] = np.array([*sample.features, sample.seconds])
        row /= self._unit_s(sample)
        row[:-1] *= self._scale
        added = weight * row[:-1, np.newaxis] * row
        old = self._evidence.get(sample.size_class)
        self._evidence[sample.size_class] = added if old is None else _FORGETTING * old + added

    def _solve(self) -> None:
        """Compute the coefficients; one that would be negative is held at 0."""
        total = sum(self._evidence.values(), self._guess)
        size = len(total)
        # Like a sample's, the error of a known coefficient is relative to what is predicted. Were
        # it relative to the known value, one that is far too small would outweigh all samples.
        unit = np.maximum(np.array(self._coefficients) / self._scale, 1.0)
        known = self._known / unit**2
        matrix, right = total[:, :size] + np.diag(known), total[:, size] + known
        free = np.arange(size)
        while True:
            factor = _cholesky(matrix[np.ix_(free, free)])
            found = np.linalg.solve(factor.T, np.linalg.solve(factor, right[free]))
            lowest = int(found.argmin())
            if found[lowest] >= 0.0 or len(free) == 1:
                break
            free = np.delete(free, lowest)
        solution = np.zeros(size)
        solution[free] = found.clip(0.0)
        self._coefficients = tuple((self._scale * solution).tolist())


def _cholesky(matrix: NDArray[np.float64]) -> NDArray[np.floating[Any]]:
    """Return L with L L' = `matrix`, which is positive definite but for rounding."""
    try:
        return np.linalg.cholesky(matrix)
    except np.linalg.LinAlgError:  # columns that are nearly equal have cancelled
        return np.linalg.cholesky(matrix * (1.0 + 1e-12 * np.eye(len(matrix))))


_LEAST_CHANGE = 0.25
"""Smallest change, as a share of the seconds. Slow forgetting follows smaller ones."""
_IN_A_ROW = 3


class Observation(NamedTuple):
    """A sample: features and the seconds they took."""

    features: Sequence[float]
    seconds: float
    size_class: int


class ChangeDetector:
    """Separates a lasting change from outliers: outliers come alone. Not thread-safe.

    A robust regression gives outliers little weight, so it would take hundreds of samples to
    believe that a disk is five times slower. Samples that are far off are therefore kept until
    the next sample of their size class is as predicted; `_IN_A_ROW` that are off to the same
    side are a change. Size classes are separate because a change need not show in all of them:
    a slower disk serves small loads as fast as before, and those prove nothing about large ones.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[int, bool], list[Observation]] = {}
        """By size class, and whether the samples took longer than predicted."""

    def update(
        self, sample: Observation, predicted_s: float, bound: float
    ) -> Sequence[Observation]:
        """Return the samples that make a change, this one last; empty if there is no change.

        `bound`: the usual deviation, as a share of the seconds.
        """
        longer = sample.seconds > predicted_s
        self._in_a_row.pop((sample.size_class, not longer), None)
        shorter_s, longer_s = sorted((sample.seconds, predicted_s))
        if longer_s - shorter_s <= max(bound, _LEAST_CHANGE) * longer_s:
            self._in_a_row.pop((sample.size_class, longer), None)
            return ()
        in_a_row = self._in_a_row.setdefault((sample.size_class, longer), [])
        in_a_row.append(sample)
        if len(in_a_row) < _IN_A_ROW:
            return ()
        self._in_a_row.clear()
        return in_a_row
