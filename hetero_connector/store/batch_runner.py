"""The loop that moves artifacts in batches: begin, poll, give up at the deadline, settle.

One `BatchRunner` for each of the four devices: reads from SSD, writes to SSD, reads from peers and
reads of orphaned storage. Runs on the I/O thread; nothing here waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar


class Batch(Protocol):
    """Artifacts on their way, begun together."""

    @property
    def deadline_s(self) -> float:
        """Clock time at which it is given up; infinite: not before something else has ended."""
        ...

    @property
    def is_done(self) -> bool:
        """Return whether everything is settled and nothing touches memory or files any more."""
        ...

    def poll(self) -> bool:
        """Settle in the catalog what has ended; return whether anything had. Never blocks."""
        ...


B = TypeVar("B", bound=Batch)


class Device(Protocol[B]):
    """One way to move artifacts."""

    def tend(self) -> bool:
        """Do what is due besides batches; return whether anything changed. Called every step."""
        ...

    def may_begin(self, active: Sequence[B], late: Sequence[B]) -> bool:
        """Return whether another batch may begin while these are under way."""
        ...

    def begin(self) -> list[B]:
        """Take the next jobs from the catalog and begin them; empty if there are none."""
        ...

    def give_up(self, batch: B) -> None:
        """Fail what is not settled of a batch at its deadline. It stays until it is done."""
        ...

    def on_late_end(self, batch: B) -> None:
        """A batch that was given up is done."""
        ...


class BatchRunner(Generic[B]):
    """The batches of one device."""

    def __init__(self, device: Device[B], clock: Callable[[], float]) -> None:
        self.device = device
        self.active: list[B] = []
        """Batches under way, before their deadline."""
        self.late: list[B] = []
        """Given up, but not done: the device may still touch their memory."""
        self._clock = clock
        self.on_end: Callable[[float, float], None] | None = None
        """Called with the begin and the end of every batch that ended before its deadline. Any
        thread may set it."""
        self._began_s: dict[int, float] = {}
        """By identity, for batches under way."""

    def step(self) -> bool:
        """Begin what fits, settle what has ended; return whether anything changed."""
        moved = self.device.tend()
        while self.device.may_begin(self.active, self.late):
            batches = self.device.begin()
            if not batches:
                break
            for batch in batches:
                self.add(batch)
            moved = True
        for batch in list(self.active):
            moved = batch.poll() or moved
            if batch.is_done:
                self.active.remove(batch)
                began_s, on_end = self._began_s.pop(id(batch)), self.on_end
                if on_end is not None:
                    on_end(began_s, self._clock())
            elif self._clock() >= batch.deadline_s:
                self.active.remove(batch)
                del self._began_s[id(batch)]
                self.late.append(batch)
                self.device.give_up(batch)
                moved = True
        for batch in list(self.late):
            moved = batch.poll() or moved
            if batch.is_done:
                self.late.remove(batch)
                self.device.on_late_end(batch)
        return moved

    def add(self, batch: B) -> None:
        """Run a batch that was begun elsewhere."""
        self.active.append(batch)
        self._began_s[id(batch)] = self._clock()
