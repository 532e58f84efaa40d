"""Who reads which chain: what has readers leaves its tier last.

A reader is a session that may come back, or one of another engine. It reads its chain from the
root to a chunk; forks share the chunks they have in common, and each counts its readers. When the
last one goes, the chunk leaves when its turn comes. Readers order evictions and forbid none: where
everything has readers the eviction policy chooses among all. Each reads for a time at most. What is
of little use to anybody (`demoted`) leaves first all the same.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from itertools import count

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.store.catalog.evictability import Standing
from hetero_connector.store.catalog.eviction import EvictionPolicy
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.nodes import Artifact, Node

_CAPACITY = 4_096
_SWEEP_FROM = 64
_MAX_ENDS = 8
_ELSEWHERE = b"elsewhere"
"""The tenant that other engines' readers are."""
_CHUNKS_AT_ONCE = 512
"""Whose readers are counted down while the store's lock is held once: a millisecond or so."""


@dataclass(frozen=True)
class _Reading:
    node: Node
    """The last chunk of the chain that is read."""
    until_s: float


@dataclass(frozen=True)
class _Elsewhere:
    """All that other engines' sessions read of a chain."""

    chunk: ChunkKey


class Readers:
    """Counts on the index's nodes. The caller holds the store's lock.

    The newest `capacity` readers count, of each tenant its share. Coming and going cost O(chunks of
    the chain).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        unread: Callable[[Node], None],
        capacity: int = _CAPACITY,
    ) -> None:
        """`unread`: told of chunks that nobody reads any more."""
        self._clock = clock
        self._unread = unread
        self._capacity = capacity
        self._shares = FairShares(capacity)
        self._readings: dict[Hashable, _Reading] = {}
        self._ends: list[tuple[float, int, Hashable, _Reading]] = []
        """A heap. May hold readings that are not in `_readings` any more."""
        self._order = count()
        self.changed: dict[Hashable, None] = {}
        """Readers of this engine that came, went on or left since the fleet was told last."""
        self.look_s = math.inf
        """When `expire` may have something to do. May be read without the lock."""

    def __len__(self) -> int:
        return len(self._readings)

    def reads(self, reader: Hashable, node: Node, until_s: float, tenant: bytes = b"") -> None:
        """It reads the chain up to this chunk, until then by the clock; no other any more."""
        before = self._readings.pop(reader, None)
        self._note_change(reader)
        reading = self._readings[reader] = _Reading(node, until_s)
        for read in _chain(node):
            read.readers += 1
        if before is not None:
            self._end(before)
        heapq.heappush(self._ends, (until_s, next(self._order), reader, reading))
        if (oldest := self._shares.add(reader, tenant)) is not None:
            self.leaves(oldest)
        if len(self._ends) > 2 * len(self._readings) + _SWEEP_FROM:
            self._ends = [x for x in self._ends if self._readings.get(x[2]) is x[3]]
            heapq.heapify(self._ends)
        self.look_s = min(self.look_s, until_s)

    def leaves(self, reader: Hashable) -> int:
        """It reads nothing any more; how many chunks it read. Idempotent."""
        reading = self._readings.pop(reader, None)
        if reading is None:
            return 0
        self._shares.remove(reader)
        self._note_change(reader)
        return self._end(reading)

    def ends(self, reader: Hashable) -> tuple[ChunkKey, ...]:
        """The last chunk it reads of each owner's, deepest first; empty if it reads nothing.

        Owners are told apart as ours and others'. With a short chunk at the end the full one
        before it, too: the short one may have left its owner. O(chunks of the chain).
        """
        reading, ends = self._readings.get(reader), []
        below: Node | None = None
        for node in _chain(None if reading is None else reading.node):
            if node.artifacts:
                if below is None or _is_tail(below) or _is_theirs(node) is not _is_theirs(below):
                    ends.append(node.key)
                below = node
        return tuple(ends[:_MAX_ENDS])

    def reads_elsewhere(self, node: Node, until_s: float, now: int) -> None:
        """Readers of other engines read the chain up to this chunk.

        `now`, by the clock of `Artifact.last_used`: when they come that is a use of it.
        """
        reader = _Elsewhere(node.key)
        if reader not in self._readings:
            for read in _chain(node):
                for artifact in read.artifacts.values():
                    artifact.last_used = now
        self.reads(reader, node, until_s, _ELSEWHERE)

    def leave_elsewhere(self, chunk: ChunkKey) -> None:
        """No other engine's reader reads up to this chunk any more."""
        self.leaves(_Elsewhere(chunk))

    def read_elsewhere(self) -> list[ChunkKey]:
        """Up to which chunks other engines' readers read."""
        return [reader.chunk for reader in self._readings if isinstance(reader, _Elsewhere)]

    def expire(self, chunks: int = _CHUNKS_AT_ONCE) -> bool:
        """Some of those whose time is over read nothing any more; whether others are left.

        At least one, and no further one once so many chunks were counted down.
        """
        now_s, counted = self._clock(), 0
        while self._ends and self._ends[0][0] <= now_s and counted < chunks:
            *_, reader, reading = heapq.heappop(self._ends)
            counted += 1
            if self._readings.get(reader) is reading:
                counted += self.leaves(reader)
        self.look_s = self._ends[0][0] if self._ends else math.inf
        return self.look_s <= now_s

    def clear(self) -> None:
        """The index was cleared: nobody reads anything."""
        for reader in list(self._readings):
            self._note_change(reader)
        self._readings.clear()
        self._shares.clear()
        self._ends.clear()
        self.look_s = math.inf

    def _note_change(self, reader: Hashable) -> None:
        if not isinstance(reader, _Elsewhere):
            self.changed[reader] = None
            if len(self.changed) > 2 * self._capacity:  # nobody asks: there is no fleet
                del self.changed[next(iter(self.changed))]

    def _end(self, reading: _Reading) -> int:
        """Chunks counted down."""
        counted = 0
        for node in _chain(reading.node):
            counted += 1
            node.readers -= 1
            if not node.readers:
                self._unread(node)
        return counted


def _chain(node: Node | None) -> Iterator[Node]:
    """The chunk and all before it, also those that have left the index since."""
    while node is not None:
        yield node
        node = node.parent


def _is_theirs(node: Node) -> bool:
    return any(artifact.replica for artifact in node.artifacts.values())


def _is_tail(node: Node) -> bool:
    above = node.parent
    assert above is not None
    return node.chunk.end - node.chunk.start < above.chunk.end - above.chunk.start


class ReadersLast:
    """An `EvictionPolicy` made of two alike: what nobody reads leaves first.

    What has readers is set aside when it is met, so an eviction costs what it did, amortised.
    """

    def __init__(self, unread: EvictionPolicy, read: EvictionPolicy) -> None:
        self._first = unread
        self._last = read
        self._aside: set[Artifact] = set()
        """In `_last` for its readers."""
        self._swept = 0
        """Artifacts that the last sweep of `_aside` kept."""

    def offer(self, artifact: Artifact) -> None:
        """See `EvictionPolicy.offer`."""
        self._first.offer(artifact)

    def unread(self, artifact: Artifact) -> None:
        """Its last reader has gone."""
        if artifact in self._aside:
            self._aside.remove(artifact)
            self._first.offer(artifact)

    def pop(self, standing: Callable[[Artifact], Standing]) -> Artifact | None:
        """See `EvictionPolicy.pop`."""

        def without_readers(artifact: Artifact) -> Standing:
            found = standing(artifact)
            if found is Standing.HELD or not artifact.node.readers:
                return found
            self._set_aside(artifact)
            return Standing.HELD

        victim = self._first.pop(without_readers)
        if victim is None and (victim := self._last.pop(standing)) is not None:
            self._aside.discard(victim)
        return victim

    def soon(self, count: int) -> list[Artifact]:
        """See `EvictionPolicy.soon`. Without what has been set aside."""
        return self._first.soon(count)

    def clear(self) -> None:
        """See `EvictionPolicy.clear`."""
        self._first.clear()
        self._last.clear()
        self._aside.clear()

    def _set_aside(self, artifact: Artifact) -> None:
        if len(self._aside) > 2 * self._swept + _SWEEP_FROM:
            self._aside = {other for other in self._aside if not other.forgotten}
            self._swept = len(self._aside)
        self._aside.add(artifact)
        self._last.offer(artifact)
