"""Tells a change from outliers: outliers come alone, a change stays.

A regression that gives outliers little weight takes hundreds of samples to believe that a disk
is five times slower now. Those that surprise it are therefore kept until the next of their size
does not; a few in a row that all err to one side are the new state of things.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_LEAST = 0.25
"""Part of the seconds by which a sample has to be off. Forgetting follows smaller changes."""
_IN_A_ROW = 3


class Sample(NamedTuple):
    """What a regression learns from."""

    features: Sequence[float]
    seconds: float
    size_class: int


class ChangeDetector:
    """The samples of each size since the last that was as predicted. Not thread-safe.

    Sizes are told apart because a change need not show in all: a slower disk takes as long as
    before over what is small, and such loads between the large ones are no proof against it.
    """

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[int, bool], list[Sample]] = {}
        """By size class, and whether they took longer than predicted."""

    def update(self, sample: Sample, predicted_s: float, bound: float) -> Sequence[Sample]:
        """The samples that make a change, this one last; none while there is none.

        `bound`: part of the seconds by which samples are often off.
        """
        longer = sample.seconds > predicted_s
        self._in_a_row.pop((sample.size_class, not longer), None)
        shorter_s, longer_s = sorted((sample.seconds, predicted_s))
        if longer_s - shorter_s <= max(bound, _LEAST) * longer_s:
            self._in_a_row.pop((sample.size_class, longer), None)
            return ()
        in_a_row = self._in_a_row.setdefault((sample.size_class, longer), [])
        in_a_row.append(sample)
        if len(in_a_row) < _IN_A_ROW:
            return ()
        self._in_a_row.clear()
        return in_a_row
