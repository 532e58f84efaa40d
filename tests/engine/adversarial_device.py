"""A device whose copies run as late, or as early, as the ordering calls allow.

Work is issued to four streams, for the forward, loads, parked loads and saves, as on a GPU. It runs
only when a call waits for it, or asks if it has ended. Work that no call has ordered may run in any
order, and each copy is randomly early or late. So a missing wait shows at once, also on a CPU,
whatever the timing is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from functools import partial
from itertools import count

from hetero_connector.engine.worker.copy_plan import Copies
from hetero_connector.engine.worker.devices import SaveLayers, StartTimer, Wait
from hetero_connector.engine.worker.host_device import HostDevice

Run = Callable[[], None]


class Stream(Enum):
    """A sequence of work; each piece runs after the one before."""

    FORWARD = auto()
    LOADS = auto()
    PARKED_LOADS = auto()
    SAVES = auto()


class _Turn(IntEnum):
    """The order in which runnable work is run."""

    EARLY_COPY = 0
    FORWARD = 1
    LATE_COPY = 2


@dataclass(frozen=True)
class _Work:
    run: Run
    after: frozenset[int]
    turn: _Turn


class AdversarialDevice(HostDevice):
    """Host memory that orders copies like a device: see `worker.devices.Device`."""

    overlaps_by_thread = False
    layers_per_copy = 2

    def __init__(self, early: Callable[[], bool], *, eager_forward: bool = False) -> None:
        """`early` decides for each copy. `eager_forward`: the forward is a real one on this
        thread, which has run whenever we are called; else it is what `forward` is given."""
        super().__init__()
        self._early = early
        self._eager_forward = eager_forward
        self._numbers = count()
        self._issued: dict[int, _Work] = {}
        """Work that has not run."""
        self._tails: dict[Stream, frozenset[int]] = dict.fromkeys(Stream, frozenset())
        """The work that a stream's next piece runs after."""

    def forward(self, run: Run) -> None:
        """Issue a piece of the forward, after the earlier pieces."""
        self._issue(Stream.FORWARD, run, _Turn.FORWARD)

    def copy(self, stream: Stream, run: Run) -> None:
        """Issue a copy."""
        turn = _Turn.EARLY_COPY if self._early() else _Turn.LATE_COPY
        number = self._issue(stream, run, turn)
        if self._eager_forward and turn is _Turn.EARLY_COPY:
            self._complete({number})

    def synchronize(self) -> None:
        """Run everything."""
        self._complete(set(self._issued))

    # As `Device`

    def detach(self) -> None:
        self.finish()
        super().detach()

    def finish(self) -> None:
        self._complete(self._ends_of(Stream.LOADS, Stream.PARKED_LOADS, Stream.SAVES))

    def load(
        self, copies: Sequence[Copies], batches: Sequence[Sequence[str]], time: StartTimer
    ) -> list[Wait]:
        self.make_copies_wait(Stream.LOADS)
        waits: list[Wait] = []
        for run in super().load(copies, batches, time):
            self.copy(Stream.LOADS, run)
            waits.append(partial(self.make_forward_wait, self._tails[Stream.LOADS]))
        return waits

    def load_parked(self, copies: Sequence[Copies], time: StartTimer) -> Callable[[], bool]:
        self.make_copies_wait(Stream.PARKED_LOADS)
        (run,) = super().load(copies, [list(self._layers)], time)
        self.copy(Stream.PARKED_LOADS, run)
        return self._fence(Stream.PARKED_LOADS)

    def prepare_saves(self, copies: Sequence[Copies]) -> SaveLayers:
        save = super().prepare_saves(copies)

        def save_later(layers: Sequence[str]) -> None:
            self.make_copies_wait(Stream.SAVES)
            self.copy(Stream.SAVES, partial(save, list(layers)))

        return save_later

    def make_forward_wait_for_saves(self) -> None:
        self.make_forward_wait(self._tails[Stream.SAVES])

    def clear(self, blocks: Mapping[int, Sequence[int]]) -> None:
        if self._eager_forward:
            super().clear(blocks)
        else:
            self.forward(partial(super().clear, blocks))

    def fence(self) -> Callable[[], bool]:
        return self._fence(Stream.LOADS, Stream.SAVES)

    def _fence(self, *streams: Stream) -> Callable[[], bool]:
        copies = self._ends_of(*streams)

        def has_ended() -> bool:
            if self._early():
                self._complete(copies)
            return copies.isdisjoint(self._issued)

        return has_ended

    def _ends_of(self, *streams: Stream) -> frozenset[int]:
        return frozenset[int]().union(*(self._tails[stream] for stream in streams))

    # The ordering calls

    def make_copies_wait(self, stream: Stream) -> None:
        """Run a stream's later copies after the forward's work so far."""
        self._tails[stream] |= self._tails[Stream.FORWARD]

    def make_forward_wait(self, copies: frozenset[int]) -> None:
        """Run the forward's later work after some copies."""
        if self._eager_forward:
            self._complete(copies)
        else:
            self._tails[Stream.FORWARD] |= copies

    def _issue(self, stream: Stream, run: Run, turn: _Turn) -> int:
        number = next(self._numbers)
        after = self._tails[stream].intersection(self._issued)
        self._issued[number] = _Work(run, after, turn)
        self._tails[stream] = frozenset({number})
        return number

    def _complete(self, wanted: Collection[int]) -> None:
        """Run the wanted work, and the work whose turn is before it."""
        left = set(wanted).intersection(self._issued)
        while left:
            number = min(
                (n for n, work in self._issued.items() if work.after.isdisjoint(self._issued)),
                key=lambda n: (self._issued[n].turn, n),
            )
            left.discard(number)
            self._issued.pop(number).run()
