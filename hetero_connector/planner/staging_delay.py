"""How long a request whose load is staged waits while others decode.

Staging begins with one of their steps and is looked for between two of them. The step in which it
begins is longer than a decode step is on its own (the request is planned in it, and the read shares
the interpreter and the cores), and what an engine does between steps is in the time of none: how
much that is, is learned.
"""

from __future__ import annotations

from collections import deque
from statistics import median

_REMEMBERED = 31
_MOST_STEPS = 0.5
"""Of longer waits the engine was full, or something else came between."""


class StagingDelay:
    """Seconds from the beginning of a staging to the step that admits its request."""

    def __init__(self) -> None:
        self._extra_steps = deque([0.0], _REMEMBERED)
        self._extra = 0.0

    def delay_s(self, step_s: float) -> float:
        """What the wait is longer than the staging, on average, where decodes take steps of
        `step_s`. It is never less than half a step and this."""
        return step_s * (0.5 + self._extra)

    def observe(self, staged_s: float, step_s: float, waited_s: float) -> None:
        """A request waited `waited_s` for a staging of `staged_s`, beside nothing but decodes."""
        if staged_s <= 0.0 or step_s <= 0.0:
            return
        expected_s = max(staged_s, step_s / 2) + step_s / 2
        extra = (waited_s - expected_s) / step_s
        self._extra_steps.append(min(max(extra, -_MOST_STEPS), _MOST_STEPS))
        self._extra = max(0.0, median(self._extra_steps))
