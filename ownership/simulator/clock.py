"""Virtual time: an event loop that jumps from event to event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Calls events in the order of time. At one moment, ends come before beginnings.

    Otherwise equal events come in the order of their announcement, so a run can be repeated.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, bool, int, Callable[..., None], tuple[Any, ...]]] = []
        self._announced = 0

    def at(
        self, time_s: float, call: Callable[..., None], *args: Any, begins: bool = False
    ) -> None:
        """Call `call(*args)` at `time_s`. `begins`: the event starts something, like an arrival.

        Raises:
            ValueError: the time has passed.
        """
        if time_s < self.now_s:
            raise ValueError(f"{time_s} s has passed: it is {self.now_s} s")
        self._announced += 1
        heapq.heappush(self._events, (time_s, begins, self._announced, call, args))

    def stop(self) -> None:
        """Drop the events announced so far: `run` ends if no more are announced."""
        self._events.clear()

    def run(self) -> None:
        """Run until no event is left."""
        events = self._events
        while events:
            self.now_s, _, _, call, args = heapq.heappop(events)
            call(*args)
