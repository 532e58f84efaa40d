"""The directory's side of leases, in memory: epochs, who they are, and until when."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from hetero_connector.errors import DirectoryError, StaleEpochError
from ownership.directory.contract import EpochStatus, Lease, Worker, WorkerState
from ownership.directory.generations import FleetGeneration
from ownership.directory.identifiers import Epoch


class ForwardClock:
    """Seconds that never go back: a clock set back stands still for a moment, then goes on.

    So an ended lease stays ended, and a running one ends `lease_s` after it was last renewed,
    not a day later because the clock lost a day.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._raw_s = clock()
        self._now_s = self._raw_s

    def __call__(self) -> float:
        """Now, in seconds."""
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
    """The fleet's generation that the worker shares state in."""


class LeaseTable:
    """Every epoch that lives, or ended not long ago. Times are the caller's."""

    def __init__(self, max_workers: int) -> None:
        self._max_workers = max_workers
        self._entries: dict[Epoch, _Entry] = {}
        self._current: dict[str, Epoch] = {}
        """The latest epoch of each worker's name."""
        self._generation = 0

    def add(self, worker: Worker, lease: Lease, now_s: float) -> None:
        """A new epoch; the worker's earlier one is retired.

        Raises DirectoryError when there are as many unended epochs as may be.
        """
        if len(self._entries) >= self._max_workers:
            self._make_room(now_s)
        earlier = self._entries.get(self._current.get(worker.name, lease.epoch))
        if earlier is not None:
            earlier.retired = True
        self._entries[lease.epoch] = _Entry(worker, lease, now_s + lease.lease_s)
        self._current[worker.name] = lease.epoch

    def renew(self, epoch: Epoch, now_s: float) -> None:
        """Raises StaleEpochError unless the epoch is live."""
        self.require_live(epoch, now_s)
        entry = self._entries[epoch]
        entry.deadline_s = now_s + entry.lease.lease_s

    def end(self, epoch: Epoch, now_s: float) -> None:
        """End it now; no effect on one that has ended."""
        entry = self._entries.get(epoch)
        if entry is not None:
            entry.deadline_s = min(entry.deadline_s, now_s)

    def status(self, epoch: Epoch, now_s: float) -> EpochStatus:
        """What the epoch may do."""
        entry = self._entries.get(epoch)
        if entry is None or entry.deadline_s <= now_s:
            return EpochStatus.ENDED
        return EpochStatus.RETIRED if entry.retired else EpochStatus.LIVE

    def require_live(self, epoch: Epoch, now_s: float) -> None:
        """Raises StaleEpochError, saying why, unless the epoch is live."""
        status = self.status(epoch, now_s)
        if status is EpochStatus.RETIRED:
            name = self._entries[epoch].worker.name
            raise StaleEpochError(epoch, f"worker {name!r} has registered again")
        if status is EpochStatus.ENDED:
            raise StaleEpochError(epoch)

    def ended_before(self, epoch: Epoch, moment_s: float) -> bool:
        """Whether the epoch ended at or before `moment_s`; an unknown one did."""
        entry = self._entries.get(epoch)
        return entry is None or entry.deadline_s <= moment_s

    def states(self, now_s: float) -> dict[Epoch, WorkerState]:
        """Every known epoch."""
        return {
            epoch: WorkerState(e.worker.name, e.worker.storage, self.status(epoch, now_s))
            for epoch, e in self._entries.items()
        }

    def live(self, now_s: float) -> Iterator[tuple[Epoch, Worker]]:
        """Live epochs and their workers."""
        for epoch, entry in self._entries.items():
            if self.status(epoch, now_s) is EpochStatus.LIVE:
                yield epoch, entry.worker

    def reset_generation(self) -> int:
        """A new generation of the fleet's. Never behind the clock: a table that starts anew must
        not come to a number that workers have had already."""
        self._generation = max(self._generation + 1, int(time.time() * 1e6))
        return self._generation

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        """Note what a live epoch has adopted; returns the fleet's generation."""
        self._entries[epoch].adopted = adopted
        if self._generation < floor:
            self._generation = floor + 1 if self._generation else floor
        return self._generation

    def generation(self, now_s: float) -> FleetGeneration:
        """The fleet's, and what live workers have adopted."""
        adopted = {worker.name: self._entries[epoch].adopted for epoch, worker in self.live(now_s)}
        return FleetGeneration(self._generation, adopted)

    def forget_before(self, moment_s: float) -> None:
        """Forget epochs that ended at or before `moment_s`."""
        for epoch in [e for e in self._entries if self.ended_before(e, moment_s)]:
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
