"""A clock that stands still until a test moves it, however busy the machine is."""

from __future__ import annotations


class Clock:
    def __init__(self, now_s: float = 1_000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def passes(self, seconds: float) -> None:
        self.now_s += seconds
