"""The parts of a thread's turn: a bug in one must not end the others, nor be tried in a loop."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from hetero_connector.metrics import Recorder

PAUSE_S = 0.25
"""After a part has failed."""

_log = logging.getLogger("vllm.heterocache")


class Guard:
    """Runs parts by name. One that raises is paused, counted, and told once for each cause."""

    def __init__(self, recorder: Recorder, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._clock = clock
        self._paused_until_s: dict[str, float] = {}
        self._said: set[tuple[str, type[Exception], int]] = set()
        """What failed, how, and in which line."""

    def run(self, part: str, action: Callable[[], None]) -> bool:
        """False if it failed. Nothing happens while the part is paused."""
        if self._clock() < self.earliest_s(part, -math.inf):
            return True
        try:
            action()
        except Exception as error:
            self._paused_until_s[part] = self._clock() + PAUSE_S
            self._recorder.add("heterocache_directory_failures", cause="internal")
            self._say(part, error)
            return False
        return True

    def earliest_s(self, part: str, due_s: float) -> float:
        """When a part that is due then will be run."""
        return max(due_s, self._paused_until_s.get(part, -math.inf))

    def _say(self, part: str, error: Exception) -> None:
        at = error.__traceback__
        while at is not None and at.tb_next is not None:
            at = at.tb_next
        cause = (part, type(error), 0 if at is None else at.tb_lineno)
        if cause not in self._said:
            self._said.add(cause)
            _log.error("the directory's thread goes on after an error (%s)", part, exc_info=error)
