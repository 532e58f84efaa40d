"""The write budget of the SSD: a token bucket over a day.

The bucket holds an eighth of a day's budget, so that a burst is not held up, and the other
seven eighths flow in over 24 hours: whatever 24 hours one looks at, no more than the budget
was spent in them.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable
from typing import Any

DAY_S = 86_400.0
_BURST = 1 / 8
"""The bucket's size, as a share of the daily budget."""
_BIN_S = 3_600.0


def burst_bytes(bytes_per_day: float) -> float:
    """The most that can be written at once."""
    return _BURST * bytes_per_day


class WriteBudget:
    """Bytes that may be written. Belongs to the I/O thread."""

    def __init__(
        self, bytes_per_day: int, clock: Callable[[], float], wall: Callable[[], float]
    ) -> None:
        """Starts full. `clock`: monotonic seconds. `wall`: Unix time, to count across restarts."""
        self.bytes_per_day = bytes_per_day
        self.burst_bytes = burst_bytes(bytes_per_day)
        self._rate = (1 - _BURST) * bytes_per_day / DAY_S
        self._clock = clock
        self._wall = wall
        self._left = self.burst_bytes
        self._filled_s = clock()
        self._spent: deque[tuple[float, int]] = deque()
        """(begin, bytes) of the hours of the last day in which anything was written."""

    @property
    def left_bytes(self) -> float:
        """Return the bytes that may be written now, 0 to `burst_bytes`."""
        gained = self._rate * max(0.0, self._clock() - self._filled_s)
        return min(self.burst_bytes, self._left + gained)

    @property
    def fullness(self) -> float:
        """0 (empty) to 1."""
        return self.left_bytes / self.burst_bytes

    @property
    def spent_today_bytes(self) -> int:
        """Written in the last 24 hours, to the hour."""
        since_s = self._clock() - DAY_S
        return sum(size_bytes for begin_s, size_bytes in self._spent if begin_s > since_s)

    def spend(self, size_bytes: int) -> bool:
        """Take what a write costs; False if there is not as much."""
        left = self.left_bytes
        if size_bytes > left:
            return False
        self._left, self._filled_s = left - size_bytes, self._clock()
        self._count(size_bytes)
        return True

    def refund(self, size_bytes: int) -> None:
        """Return bytes that were spent and not written."""
        self._left = min(self.burst_bytes, self.left_bytes + size_bytes)
        self._filled_s = self._clock()
        self._count(-size_bytes)

    def _count(self, size_bytes: int) -> None:
        now = self._clock()
        while self._spent and self._spent[0][0] <= now - DAY_S:
            self._spent.popleft()
        if self._spent and now < self._spent[-1][0] + _BIN_S:
            begin, so_far = self._spent[-1]
            self._spent[-1] = (begin, so_far + size_bytes)
        else:
            self._spent.append((now, size_bytes))

    def dump(self) -> str:
        """For `load`, after a restart."""
        now = self._clock()
        spent = [(now - begin, size_bytes) for begin, size_bytes in self._spent]
        return json.dumps({"wall_s": self._wall(), "left": self.left_bytes, "spent": spent})

    def load(self, dumped: str) -> None:
        """Go on where another engine stopped. What cannot be read counts as all spent.

        A wall clock that went back gains nothing; one that went ahead at most a full bucket.
        """
        self._filled_s = self._clock()
        try:
            values = json.loads(dumped)
            away_s = max(0.0, self._wall() - _finite(values["wall_s"]))
            left = _finite(values["left"]) + self._rate * away_s
            spent = [(self._filled_s - _finite(a) - away_s, int(b)) for a, b in values["spent"]]
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            left, spent = 0.0, []
        self._left = min(self.burst_bytes, max(0.0, left))
        self._spent = deque(spent)


def _finite(value: Any) -> float:
    """JSON knows no infinity, but Python's reader takes one."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"not a finite number: {value!r}")
    return number
