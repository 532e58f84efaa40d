"""A circuit breaker: it limits how often a server that does not answer is asked."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class CircuitBreaker:
    """Refuse calls for a pause after each failure; the pause doubles with each failure.

    After a pause one call is allowed, and its success closes the circuit. So a server that does
    not answer costs one deadline per pause, not one per call. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self.is_open = False
        """True if the last call failed. May be read by any thread."""
        self._pause_s = 0.0
        self._refuse_until_s = 0.0
        self._failed_s = -math.inf
        """The time of the last failure that counted."""

    @property
    def can_try(self) -> bool:
        """True if `admit` would return 0.0."""
        return not self.is_open or self._clock() >= self._refuse_until_s

    def admit(self) -> float:
        """Return 0.0 if a call may be made now, else the seconds until the next attempt.

        After a pause only one caller gets 0.0; the others wait for the result of its call.
        """
        with self._lock:
            if not self.is_open:
                return 0.0
            now_s = self._clock()
            if now_s < self._refuse_until_s:
                return self._refuse_until_s - now_s
            self._refuse_until_s = now_s + self._pause_s
            return 0.0

    def on_success(self) -> None:
        with self._lock:
            self.is_open, self._pause_s = False, 0.0

    def on_failure(self, began_s: float = math.inf) -> None:
        """Begin a pause. `began_s`: when the call was made, by the clock.

        While the circuit is open, a call that was made before the last failure tells nothing new:
        calls that fail together count once.
        """
        with self._lock:
            if self.is_open and began_s <= self._failed_s:
                return
            self._failed_s = self._clock()
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._refuse_until_s = self._failed_s + self._pause_s
            self.is_open = True
