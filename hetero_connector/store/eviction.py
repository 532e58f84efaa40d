"""Which artifact leaves a tier next.

To add a policy: implement `EvictionPolicy` and add it to `POLICIES` in
tests/store/test_eviction_contract.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count
from typing import Protocol

from hetero_connector.artifacts.index import Artifact, Standing


class EvictionPolicy(Protocol):
    """Orders the artifacts of one state type in one tier. The caller holds the store's lock."""

    def offer(self, artifact: Artifact) -> None:
        """The artifact may have become evictable. Cheap; offering twice changes nothing."""
        ...

    def pop(self, standing: Callable[[Artifact], Standing]) -> Artifact | None:
        """The next victim, or None if all are held. A held artifact is offered again later.

        The caller evicts the victim: the policy no longer knows it.
        """
        ...

    def clear(self) -> None:
        """Forget every artifact."""
        ...


_Entry = tuple[int, int, int, Artifact]
_SWEEP_FROM = 64


class LeafLru:
    """Leaves before artifacts that deeper ones rest on; within each, the least recently used.

    Among equally recent ones the deepest goes first. Two lazy heaps: an entry's place is
    checked when it is popped, so pinning and using an artifact cost nothing here, and
    every entry popped in vain was paid for by one `offer` or one use: O(log n) amortised.
    """

    def __init__(self) -> None:
        self._leaves: list[_Entry] = []
        self._backed: list[_Entry] = []
        self._in_leaves: set[Artifact] = set()
        self._in_backed: set[Artifact] = set()
        self._order = count()
        self._swept = 0
        """Entries that the last sweep of `_backed` kept."""

    def offer(self, artifact: Artifact) -> None:
        """See `EvictionPolicy.offer`. O(log n)."""
        if artifact not in self._in_leaves:
            self._in_leaves.add(artifact)
            heapq.heappush(self._leaves, self._entry(artifact))

    def pop(self, standing: Callable[[Artifact], Standing]) -> Artifact | None:
        """See `EvictionPolicy.pop`."""
        while (artifact := self._pop(self._leaves)) is not None:
            self._in_leaves.discard(artifact)
            found = standing(artifact)
            if found is Standing.LEAF:
                return artifact
            if found is Standing.BACKED and artifact not in self._in_backed:
                self._in_backed.add(artifact)
                heapq.heappush(self._backed, self._entry(artifact))
                self._sweep(standing)
        while (artifact := self._pop(self._backed)) is not None:
            self._in_backed.discard(artifact)
            if standing(artifact) is not Standing.HELD:
                return artifact
        return None

    def clear(self) -> None:
        """Forget every artifact."""
        for entries in (self._leaves, self._backed, self._in_leaves, self._in_backed):
            entries.clear()

    def _sweep(self, standing: Callable[[Artifact], Standing]) -> None:
        """Drop what left the tier some other way, whenever the heap has doubled."""
        if len(self._backed) <= 2 * self._swept + _SWEEP_FROM:
            return
        self._backed = [e for e in self._backed if standing(e[3]) is not Standing.HELD]
        heapq.heapify(self._backed)
        self._in_backed = {entry[3] for entry in self._backed}
        self._swept = len(self._backed)

    def _entry(self, artifact: Artifact) -> _Entry:
        return (artifact.last_used, -artifact.node.chunk.end, next(self._order), artifact)

    def _pop(self, heap: list[_Entry]) -> Artifact | None:
        """The artifact with the oldest recency; entries used since move to their place."""
        while heap:
            last_used, *_, artifact = heap[0]
            if artifact.last_used == last_used:
                return heapq.heappop(heap)[3]
            heapq.heapreplace(heap, self._entry(artifact))
        return None
