"""How fast the machine is now, against how fast it usually is.

Clocks throttle, neighbours come and go: everything takes half as long again for some
seconds, short steps and long ones alike. Samples of all sizes tell that one factor within a
few of them; coefficients, which they have to be told apart by, need dozens.

What is noise and what is drift shows in whether it lasts. The factor is the best guess of a
first-order autoregressive process: the last level, as far as levels have been repeating.
"""

from __future__ import annotations

import math

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
