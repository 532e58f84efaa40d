"""Virtual time: what happens next, and when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class EventLoop:
    """Calls what is due, in the order of time; of what is due at once, endings before beginnings.

    Of equals the first that was announced comes first, so that a run can be repeated.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, bool, int, Callable[..., None], tuple[Any, ...]]] = []
        self._announced = 0

    def at(
        self, time_s: float, call: Callable[..., None], *args: Any, begins: bool = False
    ) -> None:
        """Call `call(*args)` then. `begins`: it starts something new, as an arrival does.

        Raises:
            ValueError: the time has passed.
        """
        if time_s < self.now_s:
            raise ValueError(f"{time_s} s has passed: it is {self.now_s} s")
        self._announced += 1
        heapq.heappush(self._events, (time_s, begins, self._announced, call, args))

    def run(self) -> None:
        """Until nothing is due any more."""
        events = self._events
        while events:
            self.now_s, _, _, call, args = heapq.heappop(events)
            call(*args)
