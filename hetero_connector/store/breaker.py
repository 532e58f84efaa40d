"""Pause what fails again and again."""

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

    def reset(self) -> None:
        """End the row of failures: a success."""
        self.failures = 0

    def count_failure(self) -> bool:
        """Count a failure; return whether it is one too many."""
        self.failures += 1
        return self.failures >= MAX_FAILURES

    def allow_one(self) -> None:
        """End a pause: the next attempt decides."""
        self.failures = MAX_FAILURES - 1
