"""Keep artifacts in place while workers copy from them.

A long prompt has thousands of artifacts. To pin each one, and to unpin it, would cost the
scheduler's thread about a millisecond between two steps; so a restore holds its chunks as a
whole, and they are counted only once an eviction or a reset asks what is held.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Wanted
from hetero_connector.store.catalog.nodes import Artifact

_MAX_UNCOUNTED = 8192
"""Artifacts of holds that are not counted yet: half a millisecond for the eviction that asks."""
_HOLD_ITSELF = 64
"""To count a hold takes as long as to count so many artifacts, besides its own."""


class Hold:
    """The artifacts of some chunks, present or to come."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._keys: list[tuple[StateType, list[ChunkKey]]] | None = None

    def __len__(self) -> int:
        return sum(len(chunks) for _, chunks in self._wanted)

    @property
    def keys(self) -> Sequence[tuple[StateType, Sequence[ChunkKey]]]:
        """The chunks' names by state type. The first call costs O(chunks)."""
        if self._keys is None:
            self._keys = [(kind, [s.chunk.key for s in chunks]) for kind, chunks in self._wanted]
        return self._keys


class Holds:
    """Counts who holds which artifact. The caller holds the store's lock.

    Each hold is counted at most once, so asking costs O(1) however many there are, amortised.
    """

    def __init__(self) -> None:
        self._num_holds = 0
        self._uncounted: dict[Hold, int] = {}
        """What it takes to count each, in artifacts; oldest first."""
        self._num_uncounted = 0
        """The same of all."""
        self._counts: defaultdict[StateType, Counter[ChunkKey]] = defaultdict(Counter)
        """Holds of each artifact. No zeros."""
        self._passed_over: defaultdict[StateType, dict[ChunkKey, list[Artifact]]]
        self._passed_over = defaultdict(dict)

    def __len__(self) -> int:
        return self._num_holds

    def add(self, hold: Hold) -> None:
        """The hold begins. O(1) as a rule: it is counted when somebody asks."""
        self._num_holds += 1
        self._uncounted[hold] = cost = len(hold) + _HOLD_ITSELF
        self._num_uncounted += cost
        while self._num_uncounted > _MAX_UNCOUNTED:
            self._count(next(iter(self._uncounted)))

    def remove(self, hold: Hold) -> list[Artifact]:
        """The hold ends; return what was passed over and is held no more, to be looked at again."""
        self._num_holds -= 1
        if hold in self._uncounted:
            self._num_uncounted -= self._uncounted.pop(hold)
            return []
        released: list[Artifact] = []
        for kind, keys in hold.keys:
            counts, passed_over = self._counts[kind], self._passed_over[kind]
            for key in keys:
                left = counts[key] - 1
                if left:
                    counts[key] = left
                else:
                    del counts[key]
                    released += passed_over.pop(key, ())
        return released

    def has(self, artifact: Artifact) -> bool:
        """Return whether a restore needs the artifact where it is."""
        while self._uncounted:
            self._count(next(iter(self._uncounted)))
        return artifact.node.chunk.key in self._counts[artifact.state_type]

    def pass_over(self, artifact: Artifact) -> bool:
        """Like `has`; if so, the `remove` after which it is held no more returns the artifact."""
        if not self.has(artifact):
            return False
        passed_over = self._passed_over[artifact.state_type]
        waiting = passed_over.setdefault(artifact.node.chunk.key, [])
        if artifact not in waiting:
            waiting.append(artifact)
        return True

    def _count(self, hold: Hold) -> None:
        self._num_uncounted -= self._uncounted.pop(hold)
        for kind, keys in hold.keys:
            self._counts[kind].update(keys)
