"""The order of one engine's event batches: losses are noticed by their numbers, and repeated.

An engine that has started again counts from 0. That is noticed by an answer that lacks the last
batch that is known here, and without an answer by a lower number. With one, a lower number says
nothing: a batch may be repeated before it arrives by itself.
"""

from __future__ import annotations

import math
from enum import Enum, auto

import msgspec
import xxhash

from ownership.router.view.block_index import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
)

SILENT_S = 10.0
"""Seconds without a batch or an answer after which an engine's blocks are uncertain."""
_MOST_WAITING = 100_000


class Step(Enum):
    """The next thing to do for a stream."""

    NOTHING = auto()
    REPLAY = auto()
    """Ask for batches that were published, as `EventStream.on_asked` says."""


class EventStream:
    """Applies one publisher's batches to its index, in order. Pure but for the index's lock."""

    def __init__(self, now_s: float) -> None:
        self.index = BlockIndex()
        self.expected = 0
        """The number of the next batch."""
        self.is_whole = False
        """True if every batch since the engine's start, or since it was cleared, is known."""
        self.restarts = 0
        """Starts of the engine that were noticed."""
        self.is_readable = True
        """False after events in a form that is not understood."""
        self._heard_s = now_s
        self._asked_s = -math.inf
        self._last = b""
        """The digest of the last batch."""
        self._is_same = True
        """False until an answer has shown that the publisher has sent that one."""
        self._waiting: list[tuple[int, bytes]] | None = []
        """Batches that arrived while earlier ones are asked for; None while none are."""

    def is_silent(self, now_s: float) -> bool:
        """Return True if the engine may have published what is not known here."""
        return now_s - self._heard_s > SILENT_S

    def on_batch(self, number: int, payload: bytes, now_s: float) -> Step:
        """A batch was published."""
        if self._waiting is not None:
            if len(self._waiting) < _MOST_WAITING:
                self._waiting.append((number, payload))
            return Step.NOTHING
        if number == self.expected:
            self._skip_to(number)
            self._apply(payload, now_s)
            return Step.NOTHING
        self._waiting = [(number, payload)]
        return Step.REPLAY

    def on_asked(self, now_s: float) -> int:
        """Batches are asked for from the returned number on: the last one that is known."""
        self._asked_s = now_s
        self._waiting = self._waiting or []
        self._is_same = not self.expected
        return max(0, self.expected - 1)

    def on_repeated(self, number: int, payload: bytes, now_s: float) -> None:
        """A batch was published again."""
        if number == self.expected - 1:
            self._is_same |= _digest(payload) == self._last
        elif number >= self.expected and self._is_same:
            self._skip_to(number)
            self._apply(payload, now_s)

    def on_all_repeated(self, now_s: float) -> Step:
        """No more are repeated: these are all that the publisher still has."""
        if not self._is_same:  # it does not have the last one that is known here
            self._start_again()
            return Step.REPLAY
        if not self.expected and not self._waiting:
            self.is_whole = True  # nothing was published
        self._heard_s = now_s
        self._take_waiting(now_s)
        return Step.NOTHING

    def on_unanswered(self, now_s: float) -> None:
        """Nothing is repeated. What is known is uncertain, and goes on with the next batch."""
        heard_s = self._heard_s
        if not self._is_same and any(x < self.expected for x, _ in self._waiting or ()):
            self._start_again()  # it counts from 0 again
        self._take_waiting(now_s)
        self.is_whole, self._heard_s = False, heard_s

    def _take_waiting(self, now_s: float) -> None:
        waiting, self._waiting = self._waiting or [], None
        for number, payload in waiting:
            if number >= self.expected:
                self._skip_to(number)
                self._apply(payload, now_s)

    def has_waited(self, now_s: float, seconds: float) -> bool:
        """Return True if an answer has not come for so long."""
        return self._waiting is not None and now_s - self._asked_s > seconds

    def is_unchecked(self, now_s: float, seconds: float) -> bool:
        """Return True if nothing was asked for so long."""
        return self._waiting is None and now_s - self._asked_s > seconds

    def _start_again(self) -> None:
        self.restarts += 1
        self.index.clear()
        self.expected, self.is_whole = 0, True

    def _skip_to(self, number: int) -> None:
        """Go on with this batch; those between are lost."""
        if number > self.expected:
            self.index.clear()
            self.is_whole = False
        elif not number:
            self.is_whole = True
        self.expected = number

    def _apply(self, payload: bytes, now_s: float) -> None:
        self.expected, self._heard_s = self.expected + 1, now_s
        self._last = _digest(payload)
        try:
            events = msgspec.msgpack.decode(payload, type=_Batch).events
        except msgspec.MsgspecError:
            self.is_readable = False
            return
        for raw in events:
            try:
                event = _EVENT.decode(raw)
                if isinstance(event, AllBlocksCleared):
                    self.is_whole = self.is_readable = True
                self.index.apply(event)
            except (msgspec.MsgspecError, ValueError):
                self.is_readable = False


def _digest(payload: bytes) -> bytes:
    return xxhash.xxh3_128_digest(payload)


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]


_EVENT = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared)
