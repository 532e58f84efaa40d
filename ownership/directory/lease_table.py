"""The leases of a directory in memory: each epoch with its worker and its deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetero_connector.errors import DirectoryError, StaleEpochError
from ownership.directory.contract import (
    EpochStatus,
    Lease,
    RetiredEpochError,
    Worker,
    WorkerState,
)
from ownership.directory.generations import FleetGeneration
from ownership.directory.identifiers import Epoch


class ForwardClock:
    """A clock in seconds that never goes back: set back, it stops for one reading, then goes on.

    So an ended lease stays ended, and a running lease ends `lease_s` after its last renewal, not a
    day later because the clock lost a day.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._raw_s = clock()
        self._now_s = self._raw_s

    def __call__(self) -> float:
        raw_s = self._clock()
        self._now_s += max(0.0, raw_s - self._raw_s)
        self._raw_s = raw_s
        return self._now_s


@dataclass(slots=True)
class _Entry:
    worker: Worker
    lease: Lease
    deadline_s: float
    retired: bool = False
    adopted: int = 0
    """The generation in which the worker shares state; 0: none."""


class LeaseTable:
    """Every live epoch, and those that ended a short time ago. The caller passes the time."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._entries: dict[Epoch, _Entry] = {}
        self._current: dict[str, Epoch] = {}
        """The latest epoch of each worker's name."""
        self._generation = 0

    def add(self, worker: Worker, lease: Lease, now_s: float) -> None:
        """Add an epoch and retire the worker's earlier one.

        Raises DirectoryError when `max_workers` epochs have not ended.
        """
        if len(self._entries) >= self._max_workers:
            self._make_room(now_s)
        earlier = self._entries.get(self._current.get(worker.name, lease.epoch))
        if earlier is not None:
            earlier.retired = True
        self._entries[lease.epoch] = _Entry(worker, lease, now_s + lease.lease_s)
        self._current[worker.name] = lease.epoch

    def renew(self, epoch: Epoch, now_s: float) -> None:
        """Extend the lease from `now_s`. Raises StaleEpochError unless the epoch is live."""
        self.require_live(epoch, now_s)
        entry = self._entries[epoch]
        entry.deadline_s = now_s + entry.lease.lease_s

    def end(self, epoch: Epoch, now_s: float) -> None:
        """End the epoch now. Idempotent."""
        entry = self._entries.get(epoch)
        if entry is not None:
            entry.deadline_s = min(entry.deadline_s, now_s)

    def status(self, epoch: Epoch, now_s: float) -> EpochStatus:
        """Return whether the epoch may act."""
        entry = self._entries.get(epoch)
        if entry is None or entry.deadline_s <= now_s:
            return EpochStatus.ENDED
        return EpochStatus.RETIRED if entry.retired else EpochStatus.LIVE

    def require_live(self, epoch: Epoch, now_s: float) -> None:
        """Raise StaleEpochError, with the reason, unless the epoch is live."""
        status = self.status(epoch, now_s)
        if status is EpochStatus.RETIRED:
            name = self._entries[epoch].worker.name
            raise RetiredEpochError(epoch, f"worker {name!r} has registered again")
        if status is EpochStatus.ENDED:
            raise StaleEpochError(epoch)

    def has_ended_before(self, epoch: Epoch, moment_s: float) -> bool:
        """Return True if the epoch ended at or before `moment_s`, or is unknown."""
        entry = self._entries.get(epoch)
        return entry is None or entry.deadline_s <= moment_s

    def states(self, now_s: float) -> dict[Epoch, WorkerState]:
        """Return the worker of every known epoch."""
        return {
            epoch: WorkerState(e.worker.name, e.worker.storage, self.status(epoch, now_s))
            for epoch, e in self._entries.items()
        }

    def live(self, now_s: float) -> Iterator[tuple[Epoch, Worker]]:
        """Iterate over the live epochs and their workers."""
        for epoch, entry in self._entries.items():
            if self.status(epoch, now_s) is EpochStatus.LIVE:
                yield epoch, entry.worker

    def reset_generation(self) -> int:
        """Begin a new generation of the fleet.

        Its number is never behind the clock: a table that starts empty must not come to a number
        that workers have seen already.
        """
        self._generation = max(self._generation + 1, int(time.time() * 1e6))
        return self._generation

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        """Record the generation a live epoch has adopted; return the fleet's."""
        self._entries[epoch].adopted = adopted
        if self._generation < floor:
            self._generation = floor + 1 if self._generation else floor
        return self._generation

    def generation(self, now_s: float) -> FleetGeneration:
        """Return the fleet's generation, and those that live workers have adopted."""
        adopted = {worker.name: self._entries[epoch].adopted for epoch, worker in self.live(now_s)}
        return FleetGeneration(self._generation, adopted)

    def forget_before(self, moment_s: float) -> None:
        """Forget epochs that ended at or before `moment_s`."""
        for epoch in [e for e in self._entries if self.has_ended_before(e, moment_s)]:
            self._forget(epoch)

    def _make_room(self, now_s: float) -> None:
        ended = [e for e in self._entries if self.status(e, now_s) is EpochStatus.ENDED]
        if not ended:
            raise DirectoryError(
                f"{self._max_workers} workers are registered already: raise max_workers, or "
                "give each worker a fixed name"
            )
        self._forget(min(ended, key=lambda epoch: self._entries[epoch].deadline_s))

    def _forget(self, epoch: Epoch) -> None:
        name = self._entries.pop(epoch).worker.name
        if self._current.get(name) == epoch:
            del self._current[name]
