"""The times between two tokens of an answer, all of them, as a histogram."""

from __future__ import annotations

import math
from collections import Counter

_LEAST_S = 1e-6
_LOG_WIDTH = math.log(1.01)
"""A bucket ends 1 % above its begin."""


class TokenGaps:
    """Counts of gaps by their seconds, to 1 %, and the sum of all.

    An addition is O(1), however many gaps it adds.
    """

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total_s = 0.0

    def add(self, seconds: float, count: int) -> None:
        """Add `count` gaps of the same length; those below a microsecond count as one."""
        self._total_s += seconds * count
        self._counts[int(math.log(max(seconds, _LEAST_S) / _LEAST_S) / _LOG_WIDTH)] += count

    def merge(self, other: TokenGaps) -> None:
        """Add all gaps of another histogram."""
        self._counts.update(other._counts)
        self._total_s += other._total_s

    def since(self, before: TokenGaps) -> TokenGaps:
        """Return the gaps added after a copy was made."""
        found = TokenGaps()
        found._counts = self._counts - before._counts
        found._total_s = self._total_s - before._total_s
        return found

    @property
    def count(self) -> int:
        """Number of gaps."""
        return self._counts.total()

    @property
    def mean_s(self) -> float:
        """The mean, not rounded to buckets; 0 if there is no gap."""
        return self._total_s / self.count if self.count else 0.0

    def percentile_s(self, q: float) -> float:
        """Return the seconds that `q` percent of the gaps do not exceed; 0 if there is none."""
        left = math.ceil(q / 100 * self.count)
        for bucket in sorted(self._counts):
            left -= self._counts[bucket]
            if left <= 0:
                return _LEAST_S * math.exp((bucket + 0.5) * _LOG_WIDTH)
        return 0.0
