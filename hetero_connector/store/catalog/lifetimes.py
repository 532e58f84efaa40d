"""Lifetimes: chunks that are to leave early, because the requests that stored them said so.

When its time is over a chunk leaves first (`EvictFirst`) or is forgotten. A request that comes to
the chunk and says nothing of the kind lifts that: what others use is theirs, too. Nothing leaves
that a session uses, a pin keeps, or another chunk follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import Tier
from hetero_connector.containers import ExpiringHeap
from hetero_connector.store.catalog.forgetting import forget_node
from hetero_connector.store.catalog.loads import Loads
from hetero_connector.store.catalog.nodes import Node
from hetero_connector.store.catalog.tiers import Tiers

_AT_ONCE = 64
"""Chunks that leave in one call: a millisecond or so of the lock."""
_RETRY_S = 1.0
"""Pause before a chunk is looked at again that could not leave."""
_SWEEP_FROM = 1024


@dataclass(frozen=True, eq=False)
class _Life:
    until_s: float
    is_forgotten: bool
    """True if the chunk is forgotten at the end, False if it leaves first from then on."""


class Lifetimes:
    """Limits the lives of chunks. A private part of `Catalog`, which holds the lock."""

    def __init__(self, tiers: Tiers, loads: Loads) -> None:
        self._tiers = tiers
        self._loads = loads
        self._lives: dict[Node, _Life] = {}
        self._ends = ExpiringHeap[Node, _Life](self._lives)
        self._swept = 0
        """Lives that the last sweep kept."""

    def __len__(self) -> int:
        return len(self._lives)

    @property
    def next_s(self) -> float:
        """The clock when the next life ends. May be read without the lock."""
        return self._ends.next_s

    def limit(self, nodes: Sequence[Node], until_s: float, *, is_forgotten: bool) -> None:
        """End the lives of chunks of one chain then. `nodes`: parents first.

        What is to be forgotten stays so if it is to leave first, too.
        """
        self._sweep()
        # The deepest is forgotten first; what leaves first is noted with parents first.
        for node in reversed(nodes) if is_forgotten else nodes:
            before = self._lives.get(node)
            if is_forgotten or before is None or not before.is_forgotten:
                life = self._lives[node] = _Life(until_s, is_forgotten)
                self._ends.push(until_s, node, life)

    def lift(self, node: Node | None, now_s: float) -> None:
        """Let the chunk and those before it live on, but what should be forgotten by now."""
        while self._lives and node is not None:
            life = self._lives.get(node)
            if life is not None and not (life.is_forgotten and life.until_s <= now_s):
                del self._lives[node]
            node = node.parent
        self._ends.prune()

    def expire(self, now_s: float) -> bool:
        """End some lives whose time is over; return whether others are left."""
        again: list[tuple[Node, _Life]] = []
        for _ in range(_AT_ONCE):
            if (node := self._ends.pop_due(now_s)) is None:
                break
            life = self._lives.pop(node)
            self._ends.prune()
            if self._tiers.index.nodes.get(node.key) is node and not self._end(node, life):
                again.append((node, life))
        for node, life in again:
            self._lives[node] = life
            self._ends.push(now_s + _RETRY_S, node, life)
        return self._ends.next_s <= now_s

    def clear(self) -> None:
        """Forget all lives: everything stored was forgotten."""
        self._lives.clear()
        self._ends.clear()

    def _end(self, node: Node, life: _Life) -> bool:
        """Return False if the chunk cannot leave yet."""
        artifacts = list(node.artifacts.values())
        if not all(artifact.sealed for artifact in artifacts):
            return False
        if life.is_forgotten:
            if node.users or node.num_children or node in self._tiers.timed_pins:
                return False
            forget_node(self._tiers, self._loads, node)
            return True
        for artifact in artifacts:
            for tier in (Tier.DRAM, Tier.SSD):
                if artifact.slot(tier) is not None:
                    self._tiers.evict_first.add(artifact, tier)
        return True

    def _sweep(self) -> None:
        """Drop chunks that have left the index, whenever there are twice as many."""
        if len(self._lives) > 2 * self._swept + _SWEEP_FROM:
            nodes = self._tiers.index.nodes
            for node in [node for node in self._lives if nodes.get(node.key) is not node]:
                del self._lives[node]
            self._ends.prune()
            self._swept = len(self._lives)
