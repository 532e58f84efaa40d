"""When a moment of the store's logical clock was, in seconds."""

from __future__ import annotations

from bisect import bisect_right

_MAX_NOTED = 4096


class Moments:
    """Remembers some ticks' times: the finer the more recent. Guarded by the store's lock."""

    def __init__(self, now_s: float) -> None:
        """`now_s`: what was before counts as now."""
        self._ticks = [0]
        self._times_s = [now_s]

    def note(self, tick: int, now_s: float) -> None:
        """`tick`, later than all before, is now."""
        self._ticks.append(tick)
        self._times_s.append(now_s)
        if len(self._ticks) > _MAX_NOTED:
            # Every second one of the older half goes.
            half = _MAX_NOTED // 2
            self._ticks[:half] = self._ticks[:half:2]
            self._times_s[:half] = self._times_s[:half:2]

    def when_s(self, tick: int) -> float:
        """The time of the tick, or of the last one noted before it."""
        return self._times_s[max(0, bisect_right(self._ticks, tick) - 1)]
