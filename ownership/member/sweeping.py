"""A worker's share of sweeping the directory: more often while there is much to forget."""

from __future__ import annotations

from collections.abc import Callable

from ownership.directory import Directory

RECORDS = 1_000
"""Records that one sweep looks at. It keeps a Redis busy for about 10 ms."""
_AGAIN_S = 0.25
"""Seconds between two sweeps of all workers together while sweeps forget many records."""
_MANY = 100
"""A sweep that forgets so many records is followed by another soon."""


class Sweeper:
    """Decides when to sweep. The directory's thread calls it."""

    def __init__(
        self,
        directory: Directory,
        num_workers: Callable[[], int],
        on_swept: Callable[[int], None],
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`num_workers`: the number of workers that share the sweeping. `on_swept`: called with
        the number of records a sweep forgot. `every_s`: seconds between two sweeps that forget
        little.
        """
        self._directory = directory
        self._num_workers = num_workers
        self._on_swept = on_swept
        self._every_s = every_s
        self._clock = clock
        self._full_s = every_s
        """Seconds until the next sweep after a claim was answered `FULL`."""
        self.due_s = clock()
        """The time at which `sweep` has to be called."""

    def on_full(self) -> None:
        """Sweep sooner: a claim found the directory full.

        The interval grows while sweeps forget little.
        """
        self.due_s = min(self.due_s, self._clock() + self._full_s)

    def sweep(self) -> None:
        """Sweep once. After a DirectoryError the next sweep is due as if little was forgotten."""
        soon_s = _AGAIN_S * max(1, self._num_workers())
        self._full_s = min(self._every_s, 2 * max(soon_s, self._full_s))
        self.due_s = self._clock() + self._every_s
        num_forgotten = self._directory.sweep(RECORDS)
        if num_forgotten >= _MANY:
            self._full_s = soon_s
            self.due_s = self._clock() + soon_s
        self._on_swept(num_forgotten)
