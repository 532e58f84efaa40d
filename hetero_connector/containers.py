"""Containers: a dictionary with a bound, and a heap of keys that are due at a time."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Mapping
from itertools import count
from typing import Generic, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_SWEEP_FROM = 64


class BoundedDict(OrderedDict[Key, Value]):
    """A dictionary that drops the key set longest ago when it has more than `capacity`.

    Reading a key does not make it newer. O(1) a call.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def __setitem__(self, key: Key, value: Value) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.capacity:
            self.popitem(last=False)


class ExpiringHeap(Generic[Key, Value]):
    """Keys in the order in which they are due.

    The owner keeps what counts in a mapping of its own: an entry counts while its value is the
    mapping's. So to cancel a key the owner removes it there, and calls `prune`. Entries that do
    not count are dropped when they reach the top, and all of them whenever the heap has grown to
    twice the mapping's size. O(log n) a call, amortised.
    """

    def __init__(self, current: Mapping[Key, Value]) -> None:
        self._current = current
        self._entries: list[tuple[float, int, Key, Value]] = []
        self._order = count()
        self.next_s = math.inf
        """The time when the next key is due; infinite without one. May be read by any thread."""

    def __len__(self) -> int:
        """Return the number of entries, with those that do not count."""
        return len(self._entries)

    def push(self, due_s: float, key: Key, value: Value) -> None:
        """Let a key be due then, if the owner's mapping still has this value when it is."""
        if len(self._entries) > 2 * len(self._current) + _SWEEP_FROM:
            self._entries = [x for x in self._entries if self._counts(x[2], x[3])]
            heapq.heapify(self._entries)
        heapq.heappush(self._entries, (due_s, next(self._order), key, value))
        self.prune()

    def pop_due(self, now_s: float) -> Key | None:
        """Remove and return the next key that is due; None if none is."""
        self.prune()
        if self.next_s > now_s:
            return None
        *_, key, _ = heapq.heappop(self._entries)
        self.prune()
        return key

    def prune(self) -> None:
        """Drop entries from the top that do not count."""
        while self._entries and not self._counts(*self._entries[0][2:]):
            heapq.heappop(self._entries)
        self.next_s = self._entries[0][0] if self._entries else math.inf

    def clear(self) -> None:
        """Forget all entries."""
        self._entries.clear()
        self.next_s = math.inf

    def _counts(self, key: Key, value: Value) -> bool:
        return self._current.get(key) is value
