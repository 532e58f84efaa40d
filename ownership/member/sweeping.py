"""When a worker sweeps the directory: more often while there is something to forget."""

from __future__ import annotations

from collections.abc import Callable

from ownership.directory import Directory

RECORDS = 1_000
"""Looked at by one sweep, which keeps a Redis busy for some 10 ms."""
_AGAIN_S = 0.25
"""Between two sweeps of all workers together, while they find their fill."""
_FILL = 100
"""So many records that nobody can use are many: there are others."""


class Sweeper:
    """One worker's share of the sweeping. Used by the directory's thread."""

    def __init__(
        self,
        directory: Directory,
        num_workers: Callable[[], int],
        swept: Callable[[int], None],
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`num_workers`: who all sweep. `swept`: told how many records were forgotten.
        `every_s`: between two sweeps that find little.
        """
        self._directory = directory
        self._num_workers = num_workers
        self._swept = swept
        self._every_s = every_s
        self._clock = clock
        self._full_s = every_s
        """Until the next sweep where the directory is full."""
        self.due_s = clock()
        """When to call `sweep`."""

    def found_full(self) -> None:
        """A claim found no room. The longer sweeps find nothing to forget, the rarer they are."""
        self.due_s = min(self.due_s, self._clock() + self._full_s)

    def sweep(self) -> None:
        """Raises DirectoryError; the next one is due as if nothing had been found."""
        soon_s = _AGAIN_S * max(1, self._num_workers())
        self._full_s = min(self._every_s, 2 * max(soon_s, self._full_s))
        self.due_s = self._clock() + self._every_s
        num_forgotten = self._directory.sweep(RECORDS)
        if num_forgotten >= _FILL:
            self._full_s = soon_s
            self.due_s = self._clock() + soon_s
        self._swept(num_forgotten)
