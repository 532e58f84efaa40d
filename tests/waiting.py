"""Wait for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def until(
    is_so: Callable[[], T | None],
    what: str | Callable[[], str] = "it never happened",
    patience_s: float = 60.0,
    pause_s: float = 0.002,
) -> T:
    """Ask until the answer is true, and return it. After `patience_s` it is asked once more, since
    the machine may have slept; then an AssertionError says `what`.
    """
    deadline_s = time.monotonic() + patience_s
    while True:
        is_last = time.monotonic() >= deadline_s
        if answer := is_so():
            return answer
        if is_last:
            said = what() if callable(what) else what
            raise AssertionError(f"not within {patience_s:g} s: {said}")
        time.sleep(pause_s)
