"""The times of the logical clock's ticks, in seconds."""

from __future__ import annotations

from bisect import bisect_right

_MAX_NOTED = 4096


class TickTimes:
    """Remembers the times of some ticks, the more recent the more of them.

    A private part of `Catalog`, which holds the lock.
    """

    def __init__(self, now_s: float) -> None:
        """`now_s` stands for all ticks before the first that is noted."""
        self._ticks = [0]
        self._times_s = [now_s]

    def note(self, tick: int, now_s: float) -> None:
        """Note the time of a tick that is later than all before."""
        self._ticks.append(tick)
        self._times_s.append(now_s)
        if len(self._ticks) > _MAX_NOTED:
            # Drop every second one of the older half.
            half = _MAX_NOTED // 2
            self._ticks[:half] = self._ticks[:half:2]
            self._times_s[:half] = self._times_s[:half:2]

    def time_s(self, tick: int) -> float:
        """Return the time of the tick, or of the last one that was noted before it."""
        return self._times_s[max(0, bisect_right(self._ticks, tick) - 1)]
