"""How often the fleet is asked for what a prefill has just left, before it is found.

That another engine has prefilled a prompt is what its request says, and any client can say so. So
the pauses grow after the first questions, and all requests together have so many a second.
"""

from __future__ import annotations

from collections.abc import Callable

_PAUSE_S = 0.01
_AT_ONCE = 5
"""Questions before the pauses double: claiming takes some 10 ms."""
_PER_SECOND = 200.0
_BURST = 50.0


class AskingAgain:
    """Limit how often one engine asks a question again."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _BURST
        self._counted_s = clock()

    def may_ask(self, asked_s: float, times: int) -> bool:
        """Return whether it may ask again after `times`, last at `asked_s`; count the question."""
        now_s = self._clock()
        if now_s < asked_s + _PAUSE_S * 2.0 ** max(0, times - _AT_ONCE):
            return False
        self._left = min(_BURST, self._left + _PER_SECOND * (now_s - self._counted_s))
        self._counted_s = now_s
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True
