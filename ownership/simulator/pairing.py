"""Two policies on the same sessions: ratios of their means, with bootstrap intervals.

Sessions that start soon after each other wait in the same queues, so they are no independent
samples. What is drawn with replacement are blocks of consecutive sessions, the same blocks for both
policies (B. Efron, R. Tibshirani, An Introduction to the Bootstrap, 1993, chapter 8). A result
keeps sums over blocks, not over sessions: that is all the bootstrap needs, in a few kilobytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_COLUMNS = ("tasks", "task_wait_s", "task_slowdown", "requests", "ttft_s", "attained")
MEANS = {
    "task_wait_s": "tasks",
    "task_slowdown": "tasks",
    "ttft_s": "requests",
    "attained": "requests",
}
"""Each figure that can be compared, a sum, with the number that it is divided by."""
_MOST_BLOCKS = 32
_LEAST_BLOCKS = 8
_DRAWS = 2_000

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class BlockSums:
    """Sums over blocks of consecutive sessions."""

    sessions: int
    """Sessions in a block, a power of two: blocks of two results can be made equal."""
    sums: Sequence[Sequence[float]]
    """`[blocks][columns]`, of the blocks that have figures."""
    places: Sequence[int] | None = None
    """The numbers of those blocks, from the first session on; None: 0, 1, 2, ..."""

    @classmethod
    def of(
        cls,
        task_sessions: Sequence[float],
        of_tasks: Sequence[Sequence[float]],
        step_sessions: Sequence[float],
        of_steps: Sequence[Sequence[float]],
    ) -> BlockSums:
        """Sum what a simulation has counted.

        `of_tasks`: the waits and slowdowns of tasks, each with its session's number in
        `task_sessions`. `of_steps`: the same for the TTFT of requests, and 1 if it attained.
        """
        tasks, steps = (np.array(x, np.int64) for x in (task_sessions, step_sessions))
        places, size = np.union1d(tasks, steps), 1
        while len(places) > _MOST_BLOCKS:
            places, size = np.unique(places // 2), size * 2

        def summed(numbers: npt.NDArray[np.int64], values: Sequence[float] | None) -> Array:
            weights = np.ones(len(numbers)) if values is None else values
            at = np.searchsorted(places, numbers // size)
            return np.bincount(at, weights, len(places)).astype(np.float64)

        columns = [summed(tasks, values) for values in (None, *of_tasks)]
        columns += [summed(steps, values) for values in (None, *of_steps)]
        sums = np.stack(columns, axis=1)
        rows = [[float(f"{value:.6g}") for value in row] for row in sums.tolist()]
        return cls(size, rows, places.tolist())

    def places_of(self, sessions: int) -> npt.NDArray[np.int64]:
        """Return for each block the number of the larger one that it is in: `[blocks]`."""
        places = range(len(self.sums)) if self.places is None else self.places
        return np.array(places, np.int64) // (sessions // self.sessions)


class Ratio(NamedTuple):
    """A mean over that of a reference, and its 95 % confidence interval."""

    value: float
    low: float
    high: float

    @property
    def is_sure(self) -> bool:
        """True if the interval is on one side of 1."""
        return self.low > 1.0 or self.high < 1.0


def paired_ratio(
    found: Sequence[BlockSums], reference: Sequence[BlockSums], figure: str
) -> Ratio | str:
    """Compare a figure of `MEANS` over the same seeds, and so over the same sessions.

    Returns the reason if there is nothing to compare.
    """
    pair = _joined(found, reference)
    if pair.shape[1] < _LEAST_BLOCKS:
        return "too few sessions"
    value, number = _COLUMNS.index(figure), _COLUMNS.index(MEANS[figure])
    rng = np.random.default_rng(0)
    blocks = pair.shape[1]
    weights = rng.multinomial(blocks, [1 / blocks] * blocks, _DRAWS)
    weights = np.concatenate([np.ones((1, blocks)), weights])
    ours, theirs = (weights @ sums[:, [value, number]] for sums in pair)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.log(ours[:, 0] / ours[:, 1]) - np.log(theirs[:, 0] / theirs[:, 1])
    if not np.isfinite(ratios).all():
        return "a mean is 0"
    low, high = np.percentile(ratios[1:], [2.5, 97.5])
    return Ratio(*(float(x) for x in np.exp([ratios[0], low, high])))


def _joined(found: Sequence[BlockSums], reference: Sequence[BlockSums]) -> npt.NDArray[Any]:
    """Return `[2, blocks, columns]`: equal blocks of both, each summed over all seeds."""
    every = [*found, *reference]
    size = max(one.sessions for one in every)
    places = np.unique(np.concatenate([one.places_of(size) for one in every]))
    total = np.zeros((2, len(places), len(_COLUMNS)))
    for at, side in enumerate((found, reference)):
        for one in side:
            sums = np.array(one.sums).reshape(-1, len(_COLUMNS))
            np.add.at(total[at], np.searchsorted(places, one.places_of(size)), sums)
    return total[:, (total[:, :, 0] + total[:, :, 3]).any(axis=0)]
