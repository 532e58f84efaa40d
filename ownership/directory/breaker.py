"""When to try again what does not answer: a circuit breaker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 5.0


class CircuitBreaker:
    """After a failure calls are refused at once, for a pause that doubles with each failure.

    When a pause is over one call is let through; its success closes the circuit. So a server
    that is gone costs one deadline a pause, not one a call. Thread-safe.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = 0.0
        self._refuse_until_s = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the last call failed."""
        return self._pause_s > 0.0

    def admit(self) -> float:
        """0.0: go ahead. Otherwise seconds until it is worth asking again."""
        with self._lock:
            if not self.is_open:
                return 0.0
            now_s = self._clock()
            if now_s < self._refuse_until_s:
                return self._refuse_until_s - now_s
            self._refuse_until_s = now_s + self._pause_s  # the others wait for this call's end
            return 0.0

    def succeeded(self) -> None:
        """A call was answered."""
        with self._lock:
            self._pause_s = 0.0

    def failed(self) -> None:
        """A call was not answered."""
        with self._lock:
            self._pause_s = min(max(FIRST_PAUSE_S, 2 * self._pause_s), LONGEST_PAUSE_S)
            self._refuse_until_s = self._clock() + self._pause_s
