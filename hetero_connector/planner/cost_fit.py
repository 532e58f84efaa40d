"""Seconds as a non-negative combination of features, learned one sample at a time.

Recursive least squares in its information form: the normal equations are kept instead of
their inverse, which makes three things plain arithmetic that the covariance form cannot do.
A sum over size classes of samples, so that a million decode steps do not wash out what few
prefills have taught (covariance wind-up); coefficients held at or above zero; and evidence
that fades towards the default.

The solver is plain Python: three to seven unknowns are too few for numpy to pay.

Tells a change from outliers: outliers come alone, a change stays.

A regression that gives outliers little weight takes hundreds of samples to believe that a disk
is five times slower now. Those that surprise it are therefore kept until the next of their size
does not; a few in a row that all err to one side are the new state of things.

How fast the machine is now, against how fast it usually is.

Clocks throttle, neighbours come and go: everything takes half as long again for some
seconds, short steps and long ones alike. Samples of all sizes tell that one factor within a
few of them; coefficients, which they have to be told apart by, need dozens.

What is noise and what is drift shows in whether it lasts. The factor is the best guess of a
first-order autoregressive process: the last level, as far as levels have been repeating.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

_FORGETTING = 0.995
"""Weight that a size class's older samples keep at each new one: about 200 count."""
_HUBER = 2.0
"""Residuals beyond this many running mean deviations lose weight (P. J. Huber, Robust
Estimation of a Location Parameter, 1964)."""
_GUESSED = 1e-8
"""Samples that a built-in default weighs: it may be a thousand times off."""
_KNOWN = 10.0
"""Samples that a measured profile weighs."""
_GATHERED_SAMPLES = 8
"""Before them a surprise is no news."""
_SETTLED_SAMPLES = 64
_SOLVE_EVERY = 8
"""Samples per solution once the first are in: one moves little, and solving costs most."""
_DEVIATION_GAIN = 0.05
_LEAST_DEVIATION = 0.01
_KEEP_AT_CHANGE = 1e-6
"""Of what was learned before a change: it still says what the new samples leave open."""


@dataclass
class RelativeErrors:
    """|predicted - observed| / observed of the last samples, each predicted before it was seen."""

    window: int = 256
    count: int = 0
    """Samples seen since the start; the statistics are over the last `window`."""
    _last: deque[float] = field(init=False)

    def __post_init__(self) -> None:
        self._last = deque(maxlen=self.window)

    def add(self, predicted_s: float, observed_s: float) -> None:
        """`observed_s` is above 0."""
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
        """The error that `share` of the samples do not exceed; `share` in (0, 1]."""
        if not self._last:
            return math.inf
        ordered = sorted(self._last)
        return ordered[math.ceil(share * len(ordered)) - 1]


class RobustLeastSquares:
    """seconds = sum of coefficient x feature, every coefficient >= 0. Not thread-safe.

    Residuals count relative to the seconds predicted, so a step of 2 ms teaches as much as
    a prefill of 2 s.
    """

    def __init__(
        self,
        default: Sequence[float],
        known: Sequence[float | None] | None = None,
        changes: ChangeDetector | None = None,
    ) -> None:
        """`default`: seconds per unit of each feature, above 0, until samples say otherwise.

        `known`: the same as measured earlier, at least 0, or None for what was not; weighs as
        much as a few samples. What was found to be 0 then may have been too small to see, and
        is open again.

        `changes`: for what may change by leaps. Several in a row are a change, and what was
        learned before it is all but given up.
        """
        size = len(default)
        earlier = known or [None] * size
        self._scale = tuple(k or d for k, d in zip(earlier, default, strict=True))
        self._pairs = [(i, j) for i in range(size) for j in range(i, size)]
        guess = [0.0 if k == 0.0 else d for k, d in zip(earlier, default, strict=True)]
        self._guess = self._as_evidence([_GUESSED] * size, guess)
        self._known = self._as_evidence(
            [_KNOWN if k else 0.0 for k in earlier], [k or 0.0 for k in earlier]
        )
        self._evidence: dict[int, list[float]] = {}
        self._deviation = 0.5
        self._changes = changes
        self.errors = RelativeErrors()
        self._solve()

    @property
    def samples(self) -> int:
        """Samples seen since the start."""
        return self.errors.count

    @property
    def coefficients(self) -> tuple[float, ...]:
        """Seconds per unit of each feature."""
        return self._coefficients

    def predict(self, features: Sequence[float]) -> float:
        """Seconds; never below 0 for features that are not."""
        return sum(c * x for c, x in zip(self._coefficients, features, strict=True))

    def observe(self, features: Sequence[float], seconds: float, size_class: int) -> None:
        """Learn one sample. Samples of other size classes are not forgotten for it.

        Without effect unless `seconds` is finite and above 0.
        """
        if not 0.0 < seconds < math.inf:
            return
        predicted_s = self.predict(features)
        self.errors.add(predicted_s, seconds)
        sample = Sample(features, seconds, size_class)
        if self._changes and self.samples > _GATHERED_SAMPLES:
            changed = self._changes.update(sample, predicted_s, _HUBER * self._deviation)
            if changed:
                self._begin_again(changed)
                return
        self._add(sample, predicted_s, doubted=True)
        if self.samples <= _SETTLED_SAMPLES or self.samples % _SOLVE_EVERY == 0:
            self._solve()

    def _begin_again(self, changed: Sequence[Sample]) -> None:
        """Learn from these as if little had been seen before."""
        self.fade(_KEEP_AT_CHANGE)
        for sample in changed:
            self._add(sample, self.predict(sample.features), doubted=False)
            self._solve()

    def _add(self, sample: Sample, predicted_s: float, *, doubted: bool) -> None:
        """Add to the evidence; `doubted`: less of it where it is an outlier."""
        unit_s = max(predicted_s, sample.seconds / 2)  # a prediction near 0 would weigh too much
        row = [x * s / unit_s for x, s in zip(sample.features, self._scale, strict=True)]
        weight = self._weight(abs(sample.seconds - predicted_s) / unit_s, row) if doubted else 1.0
        target = weight * sample.seconds / unit_s
        news = [weight * row[i] * row[j] for i, j in self._pairs] + [x * target for x in row]
        old = self._evidence.get(sample.size_class)
        if old is not None:
            news = [_FORGETTING * a + b for a, b in zip(old, news, strict=True)]
        self._evidence[sample.size_class] = news

    def fade(self, keep: float) -> None:
        """Keep this share of what was learned, now and earlier, in [0, 1].

        The rest goes back to the default.
        """
        self._known = [keep * x for x in self._known]
        for size_class, evidence in self._evidence.items():
            self._evidence[size_class] = [keep * x for x in evidence]
        self._solve()

    def _as_evidence(self, weights: Sequence[float], coefficients: Sequence[float]) -> list[float]:
        """What samples of one feature each would leave, so many of these coefficients."""
        evidence = [weights[i] if i == j else 0.0 for i, j in self._pairs]
        told = zip(weights, coefficients, self._scale, strict=True)
        return evidence + [w * c / s for w, c, s in told]

    def _weight(self, residual: float, row: Sequence[float]) -> float:
        """1, or less for an outlier; a row unlike those seen is allowed to surprise."""
        spread = math.sqrt(1.0 + self._leverage(row))
        bound = _HUBER * self._deviation
        deviation = residual / spread
        moved = _DEVIATION_GAIN * (min(deviation, 1.5 * bound) - self._deviation)
        self._deviation = max(_LEAST_DEVIATION, self._deviation + moved)
        return 1.0 if deviation <= bound else bound / deviation

    def _leverage(self, row: Sequence[float]) -> float:
        """row' A^-1 row over the coefficients that are not held at 0."""
        solved = _forward(self._factor, [row[i] for i in self._free])
        return sum(x * x for x in solved)

    def _solve(self) -> None:
        """Coefficients from the evidence; those that would be negative are held at 0."""
        parts = (self._guess, self._known, *self._evidence.values())
        total = [sum(column) for column in zip(*parts, strict=True)]
        size = len(self._scale)
        entry = dict(zip(self._pairs, total, strict=False))  # the last `size` are not pairs
        right = total[-size:]
        free = list(range(size))
        while True:
            self._factor = _cholesky([[entry[j, i] for j in free if j <= i] for i in free])
            found = _backward(self._factor, _forward(self._factor, [right[i] for i in free]))
            lowest = min(range(len(free)), key=found.__getitem__)
            if found[lowest] >= 0.0 or len(free) == 1:
                break
            del free[lowest]
        self._free = free
        solution = dict(zip(free, found, strict=True))
        self._coefficients = tuple(
            max(0.0, solution.get(i, 0.0)) * s for i, s in enumerate(self._scale)
        )


def _cholesky(lower: list[list[float]]) -> list[list[float]]:
    """L with L L' = A, from the rows of A's lower triangle. A is positive definite."""
    factor: list[list[float]] = []
    for i, row in enumerate(lower):
        done: list[float] = []
        for j in range(i):
            inner = sum(a * b for a, b in zip(done, factor[j], strict=False))
            done.append((row[j] - inner) / factor[j][j])
        # Rounding may eat a pivot when columns are all but alike.
        pivot = max(row[i] - sum(a * a for a in done), 1e-12 * row[i])
        done.append(math.sqrt(pivot))
        factor.append(done)
    return factor


def _forward(factor: list[list[float]], right: Sequence[float]) -> list[float]:
    """x with L x = right."""
    solved: list[float] = []
    for row, value in zip(factor, right, strict=True):
        inner = sum(a * b for a, b in zip(row, solved, strict=False))
        solved.append((value - inner) / row[-1])
    return solved


def _backward(factor: list[list[float]], right: list[float]) -> list[float]:
    """x with L' x = right."""
    solved = list(right)
    for i in reversed(range(len(solved))):
        solved[i] /= factor[i][i]
        for j in range(i):
            solved[j] -= factor[i][j] * solved[i]
    return solved


_LEAST = 0.25
"""Part of the seconds by which a sample has to be off. Forgetting follows smaller changes."""
_IN_A_ROW = 3


class Sample(NamedTuple):
    """What a regression learns from."""

    features: Sequence[float]
    seconds: float
    size_class: int


class ChangeDetector:
    """The samples of each size since the last that was as predicted. Not thread-safe.

    Sizes are told apart because a change need not show in all: a slower disk takes as long as
    before over what is small, and such loads between the large ones are no proof against it.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[int, bool], list[Sample]] = {}
        """By size class, and whether they took longer than predicted."""

    def update(self, sample: Sample, predicted_s: float, bound: float) -> Sequence[Sample]:
        """The samples that make a change, this one last; none while there is none.

        `bound`: part of the seconds by which samples are often off.
        """
        longer = sample.seconds > predicted_s
        self._in_a_row.pop((sample.size_class, not longer), None)
        shorter_s, longer_s = sorted((sample.seconds, predicted_s))
        if longer_s - shorter_s <= max(bound, _LEAST) * longer_s:
            self._in_a_row.pop((sample.size_class, longer), None)
            return ()
        in_a_row = self._in_a_row.setdefault((sample.size_class, longer), [])
        in_a_row.append(sample)
        if len(in_a_row) < _IN_A_ROW:
            return ()
        self._in_a_row.clear()
        return in_a_row


_FADING = 0.9
"""Weight that older samples keep in the autocorrelation: about 10 count."""
_UNCERTAIN = 0.01
"""Variance of a level that is taken for noise until samples show more."""
_USUAL_GAIN = 0.01
_FARTHEST = 2.0
"""Logarithm of the greatest ratio taken seriously: about 7."""


class SpeedFactor:
    """One factor on all predictions. A single outlier does not move it; two in a row do."""

    def __init__(self) -> None:
        self.factor = 1.0
        """Seconds now for each second as a rule."""
        self._log = 0.0
        self._before = 0.0
        self._covariance, self._variance = 0.0, _UNCERTAIN
        self._usual: dict[int, float] = {}

    def follow(self, ratio: float, size_class: int) -> None:
        """A sample took `ratio`, above 0, times what it should as a rule.

        Each size class counts by how far it is off its own usual ratio: what the
        coefficients get wrong about short steps says nothing about long ones.
        """
        off = min(_FARTHEST, max(-_FARTHEST, math.log(ratio)))
        usual = self._usual.get(size_class, 0.0)
        level = off - usual
        self._usual[size_class] = usual + _USUAL_GAIN * level
        repeats = self._repeats(level)
        # The middle of the present factor and the last two: what is alone does not count.
        middle = sorted((self._log, self._before, level))[1]
        self._log, self._before = repeats * middle, level
        self.factor = math.exp(self._log)

    def _repeats(self, level: float) -> float:
        """Autocorrelation of the levels, in [0, 1]: how much of one is found in the next."""
        self._covariance = _FADING * self._covariance + (1 - _FADING) * level * self._before
        self._variance = _FADING * self._variance + (1 - _FADING) * level * level
        return min(1.0, max(0.0, self._covariance / self._variance))
