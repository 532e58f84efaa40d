"""Lifetimes: chunks that are to leave early, because the requests that stored them said so.

When its time is over a chunk leaves first (`EvictFirst`) or is forgotten. A request that comes to
the chunk and says nothing of the kind lifts that, also if it is to leave first already: what others
use is theirs, too. What a session uses or a pin keeps when its time is over is looked at again
later, and so is what should be forgotten and another chunk follows. What leaves first leaves with
the deepest chunk first, though chunks before it were kept for longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetero_connector.artifacts.record import Tier
from hetero_connector.containers import BoundedDict, ExpiringHeap
from hetero_connector.store.catalog.eviction import EVICT_FIRST_CAPACITY
from hetero_connector.store.catalog.forgetting import forget_node
from hetero_connector.store.catalog.loads import Loads
from hetero_connector.store.catalog.nodes import Node
from hetero_connector.store.catalog.tiers import Tiers

_AT_ONCE = 64
"""Chunks that leave in one call: a millisecond or so of the lock."""
_RETRY_S = 1.0
"""Pause before a chunk is looked at again that could not leave."""
_SWEEP_FROM = 1024


@dataclass(eq=False)
class _Life:
    until_s: float
    is_forgotten: bool
    """True if the chunk is forgotten at the end, False if it leaves first from then on."""
    is_late: bool = False
    """True once the chunk could not leave when its time was over."""


class Lifetimes:
    """Limits the lives of chunks. A private part of `Catalog`, which holds the lock."""

    def __init__(self, tiers: Tiers, loads: Loads) -> None:
        self._tiers = tiers
        self._loads = loads
        self._lives: dict[Node, _Life] = {}
        self._ends = ExpiringHeap[Node, _Life](self._lives)
        self._swept = 0
        """Lives that the last sweep kept."""
        self._first = BoundedDict[Node, None](EVICT_FIRST_CAPACITY)
        """Chunks that are to leave first, in the order in which `EvictFirst` has them."""

    def __bool__(self) -> bool:
        """Return whether there is anything to lift.

        Needs no lock: a chunk is among those that leave first before its life is removed.
        """
        return bool(self._lives or self._first)

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
        while node is not None and self:
            life = self._lives.get(node)
            if life is not None and not (life.is_forgotten and life.until_s <= now_s):
                del self._lives[node]
            if node in self._first:
                del self._first[node]
                self._tiers.evict_first.discard(node.artifacts.values())
            node = node.parent
        self._ends.prune()

    def expire(self, now_s: float) -> bool:
        """End some lives whose time is over; return whether others are left."""
        late = dict[Node, None]()
        for _ in range(_AT_ONCE):
            if (node := self._ends.pop_due(now_s)) is None:
                break
            life = self._lives[node]
            if self._tiers.index.nodes.get(node.key) is node and not self._end(node, life):
                life.is_late = True
                self._ends.push(now_s + _RETRY_S, node, life)
                continue
            del self._lives[node]
            if life.is_late and node in self._first:
                late[node] = None
        if late:
            self._renew_below(late)
        return self._ends.next_s <= now_s

    def on_forgotten(self, node: Node) -> None:
        """Note that an artifact of the chunk was forgotten."""
        if not node.artifacts:
            self._first.pop(node, None)

    def clear(self) -> None:
        """Forget all lives: everything stored was forgotten."""
        self._lives.clear()
        self._ends.clear()
        self._first.clear()

    def _end(self, node: Node, life: _Life) -> bool:
        """Return False if the chunk cannot leave yet."""
        artifacts = list(node.artifacts.values())
        is_kept = node.users > 0 or node in self._tiers.timed_pins
        if is_kept or not all(artifact.sealed for artifact in artifacts):
            return False
        if life.is_forgotten:
            if node.num_children:
                return False
            forget_node(self._tiers, self._loads, node)
            return True
        if artifacts:
            self._first[node] = None
        for artifact in artifacts:
            for tier in (Tier.DRAM, Tier.SSD):
                if artifact.slot(tier) is not None:
                    self._tiers.evict_first.add(artifact, tier)
        return True

    def _renew_below(self, late: Mapping[Node, None]) -> None:
        """Let what comes after these chunks leave before them, though it was to leave first before.

        O(chunks that are to leave first): a millisecond or so.
        """
        above = set(late)
        for node in list(self._first):  # parents first
            if node.parent in above and node not in late:
                above.add(node)
                self._first[node] = None
                self._tiers.evict_first.renew(node.artifacts.values())

    def _sweep(self) -> None:
        """Drop chunks that have left the index, whenever there are twice as many."""
        if len(self._lives) > 2 * self._swept + _SWEEP_FROM:
            nodes = self._tiers.index.nodes
            for node in [node for node in self._lives if nodes.get(node.key) is not node]:
                del self._lives[node]
            self._ends.prune()
            self._swept = len(self._lives)
