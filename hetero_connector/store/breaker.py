"""When what fails again and again is not tried any more for a while."""

from __future__ import annotations

MAX_FAILURES = 3
"""Failures in a row after which there is a pause."""


class Breaker:
    """Counts failures in a row. After a pause one more is enough."""

    def __init__(self) -> None:
        self.failures = 0

    @property
    def on_trial(self) -> bool:
        """Return whether the next failure is one too many."""
        return self.failures == MAX_FAILURES - 1

    def succeeded(self) -> None:
        """A success ends the row."""
        self.failures = 0

    def failed(self) -> bool:
        """Count a failure; True from the one on that is one too many."""
        self.failures += 1
        return self.failures >= MAX_FAILURES

    def try_again(self) -> None:
        """The pause is over: the next attempt decides."""
        self.failures = MAX_FAILURES - 1
