"""Pins on whole chains, while workers copy from them.

A long prompt has thousands of artifacts. To pin and unpin each one would cost the scheduler's
thread a millisecond between two steps. So a restore pins its chunks as one, and they are counted
only once an eviction or a reset asks whether an artifact is pinned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Wanted
from hetero_connector.store.catalog.nodes import Artifact

_MAX_UNCOUNTED = 8192
"""Artifacts of pins that are not counted yet: half a millisecond for the eviction that asks."""
_COST_OF_PIN = 64
"""To count a pin takes as long as to count so many artifacts, besides its own."""


class ChainPin:
    """Forbids the eviction of the artifacts of some chunks, present or to come."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._keys: list[tuple[StateType, list[ChunkKey]]] | None = None

    def __len__(self) -> int:
        return sum(len(chunks) for _, chunks in self._wanted)

    def by_type(self) -> Sequence[tuple[StateType, Sequence[ChunkKey]]]:
        """Return the chunks' names by state type. The first call costs O(chunks)."""
        if self._keys is None:
            self._keys = [(kind, [s.chunk.key for s in chunks]) for kind, chunks in self._wanted]
        return self._keys


class ChainPins:
    """Counts the pins of each artifact. A private part of `Catalog`, which holds the lock.

    Each pin is counted at most once, so asking costs O(1), amortised, however many there are.
    """

    def __init__(self) -> None:
        self._num_pins = 0
        self._uncounted: dict[ChainPin, int] = {}
        """The cost of counting each, in artifacts; oldest first."""
        self._num_uncounted = 0
        """The sum of these costs."""
        self._counts: defaultdict[StateType, Counter[ChunkKey]] = defaultdict(Counter)
        """Pins of each artifact. No zeros."""
        self._passed_over: defaultdict[StateType, dict[ChunkKey, list[Artifact]]]
        self._passed_over = defaultdict(dict)

    def __len__(self) -> int:
        return self._num_pins

    def add(self, pin: ChainPin) -> None:
        """Begin a pin. O(1) as a rule: it is counted later."""
        self._num_pins += 1
        self._uncounted[pin] = cost = len(pin) + _COST_OF_PIN
        self._num_uncounted += cost
        while self._num_uncounted > _MAX_UNCOUNTED:
            self._count(next(iter(self._uncounted)))

    def remove(self, pin: ChainPin) -> list[Artifact]:
        """End a pin; return the artifacts that were passed over and are not pinned any more."""
        self._num_pins -= 1
        if pin in self._uncounted:
            self._num_uncounted -= self._uncounted.pop(pin)
            return []
        released: list[Artifact] = []
        for kind, keys in pin.by_type():
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
        """Return whether a chain pin covers the artifact."""
        while self._uncounted:
            self._count(next(iter(self._uncounted)))
        return artifact.node.chunk.key in self._counts[artifact.state_type]

    def pass_over(self, artifact: Artifact) -> bool:
        """Return `has`; if True the artifact is among the result of the `remove` that frees it."""
        if not self.has(artifact):
            return False
        passed_over = self._passed_over[artifact.state_type]
        waiting = passed_over.setdefault(artifact.node.chunk.key, [])
        if artifact not in waiting:
            waiting.append(artifact)
        return True

    def _count(self, pin: ChainPin) -> None:
        self._num_uncounted -= self._uncounted.pop(pin)
        for kind, keys in pin.by_type():
            self._counts[kind].update(keys)
