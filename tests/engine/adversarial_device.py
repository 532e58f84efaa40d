"""A device whose copies run as late, or as early, as the ordering calls allow.

Work is issued to two streams, the forward's and the copies', as on a GPU. It runs only when a call
waits for it. Work that no call has ordered may run in any order, and each copy is randomly early or
late. So a missing wait shows at once, also on a CPU, whatever the timing is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

import torch

from hetero_connector.engine.worker.devices import HostDevice
from hetero_connector.engine.worker.pages import ArenaRows, ByteArray, HostPages, IndexArray
from hetero_connector.spec import LayerSpec

Run = Callable[[], None]


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

    def __init__(self, early: Callable[[], bool], *, eager_forward: bool = False) -> None:
        """`early` decides for each copy. `eager_forward`: the forward is a real one on this
        thread, which has run whenever we are called; else it is what `forward` is given."""
        super().__init__()
        self._early = early
        self._eager_forward = eager_forward
        self._numbers = count()
        self._issued: dict[int, _Work] = {}
        """Work that has not run."""
        self._last_forward: frozenset[int] = frozenset()
        self._copies_wait: frozenset[int] = frozenset()
        self._forward_waits: frozenset[int] = frozenset()

    def forward(self, run: Run) -> None:
        """Issue a piece of the forward, after the earlier pieces."""
        number = self._issue(run, self._last_forward | self._forward_waits, _Turn.FORWARD)
        self._last_forward = frozenset({number})

    def copy(self, run: Run) -> None:
        """Issue a copy."""
        turn = _Turn.EARLY_COPY if self._early() else _Turn.LATE_COPY
        number = self._issue(run, self._copies_wait, turn)
        if self._eager_forward and turn is _Turn.EARLY_COPY:
            self._complete({number})

    def synchronize(self) -> None:
        """Run everything."""
        self._complete(set(self._issued))

    # As `Device`

    def pages(self, spec: LayerSpec, view: torch.Tensor) -> _Pages:
        """Pages whose copies are issued here."""
        return _Pages(self, HostPages(view))

    def unpin(self) -> None:
        self.finish()

    def make_copies_wait(self) -> None:
        self._copies_wait = self._last_forward | self._copies()

    def make_forward_wait(self) -> None:
        self._let_forward_wait(self._copies())

    def mark(self) -> Run:
        marked = self._copies()
        return lambda: self._let_forward_wait(marked)

    def finish(self) -> None:
        self._complete(self._copies())

    def _let_forward_wait(self, copies: frozenset[int]) -> None:
        if self._eager_forward:
            self._complete(copies)
        else:
            self._forward_waits |= copies

    def _copies(self) -> frozenset[int]:
        return frozenset(n for n, work in self._issued.items() if work.turn is not _Turn.FORWARD)

    def _issue(self, run: Run, after: Collection[int], turn: _Turn) -> int:
        number = next(self._numbers)
        self._issued[number] = _Work(run, frozenset(after).intersection(self._issued), turn)
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


class _Pages:
    """`Pages` whose copies run when the device allows."""

    def __init__(self, device: AdversarialDevice, pages: HostPages) -> None:
        self._device = device
        self._pages = pages

    def load(self, arena: ByteArray, rows: ArenaRows, block_ids: IndexArray) -> None:
        self._device.copy(lambda: self._pages.load(arena, rows, block_ids))

    def save(self, arena: ByteArray, rows: ArenaRows, block_ids: IndexArray) -> None:
        self._device.copy(lambda: self._pages.save(arena, rows, block_ids))

    def clear(self, block_ids: IndexArray) -> None:
        self._device.copy(lambda: self._pages.clear(block_ids))
