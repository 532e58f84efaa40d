"""Timed pins: chains that clients and operators keep in place until a time.

Nothing of a pinned chain leaves the tier it is in, whatever the eviction policy says. Pins name the
chunks that are stored when they begin, and state of these that is stored later, or again, is kept
as far as the bounds allow; chunks that several pins share are counted once. Pins are
bounded in bytes, together and for each tenant, so that they fill no tier, and in number. They end
with the process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import ExpiringHeap
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Pinned, PinRefusal, PinUse, TimedPin
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.nodes import Artifact, Node

MOST_PINNED = 1 / 2
"""Share of the smallest tier that all pins together may keep."""
MOST_PINNED_BY_TENANT = 1 / 4
"""Share of it that the clients of one tenant may keep."""
_CAPACITY = 4_096


@dataclass(frozen=True, eq=False)
class _Pin:
    node: Node
    """The last chunk of the chain."""
    num_chunks: int
    """The chain may grow at its beginning: a chunk may learn its parent later."""
    tenant: bytes
    until_s: float
    is_bounded: bool

    @property
    def chain(self) -> Iterator[Node]:
        return islice(_chain(self.node), self.num_chunks)


@dataclass
class _Count:
    pins: int
    kinds: set[StateType]
    """The state that is kept: what is stored later is added when eviction meets it."""
    tenant: bytes
    """The tenant of its first pin."""
    is_bounded: bool
    """True if that pin is within the tenant's share."""


class TimedPins:
    """Counts the timed pins of chunks. A private part of `Catalog`, which holds the lock.

    To begin or to end a pin costs O(chunks of its chain).
    """

    def __init__(
        self,
        capacity_bytes: int,
        slot_bytes: Mapping[StateType, int],
        offer: Callable[[Artifact], None],
    ) -> None:
        """`capacity_bytes`: of the smallest tier. `offer` lets eviction have an artifact again."""
        self._slot_bytes = slot_bytes
        self._capacity_bytes = capacity_bytes
        self._offer = offer
        self._pins: dict[Hashable, _Pin] = {}
        self._ends = ExpiringHeap[Hashable, _Pin](self._pins)
        self._shares = {is_bounded: FairShares(_CAPACITY) for is_bounded in (True, False)}
        """Clients' pins and operators', apart: those of clients push none of an operator out."""
        self._counts: dict[ChunkKey, _Count] = {}
        self._bytes_by_tenant: dict[bytes, int] = {}
        self._passed_over: dict[ChunkKey, dict[Artifact, None]] = {}
        """Artifacts that eviction met and passed over."""

    def __len__(self) -> int:
        return len(self._pins)

    def __contains__(self, node: Node) -> bool:
        return node.key in self._counts

    @property
    def size_bytes(self) -> int:
        """Return the bytes of everything that is pinned."""
        return sum(self._bytes_by_tenant.values())

    @property
    def next_s(self) -> float:
        """The clock when the next pin ends. May be read without the lock."""
        return self._ends.next_s

    def describe(self) -> PinUse:
        """Return all pins, and how much of their bounds they use."""
        return PinUse(
            [
                TimedPin(name, x.node.chunk.end, x.until_s, x.tenant, x.is_bounded)
                for name, x in self._pins.items()
            ],
            self.size_bytes,
            int(self._capacity_bytes * MOST_PINNED),
            dict(self._bytes_by_tenant),
            int(self._capacity_bytes * MOST_PINNED_BY_TENANT),
        )

    def add(
        self, name: Hashable, node: Node, until_s: float, tenant: bytes, *, is_bounded: bool
    ) -> Pinned | PinRefusal:
        """Pin the chain up to this chunk in place of the earlier pin of that name.

        A refused pin leaves the earlier one. `is_bounded`: within the tenant's share.
        """
        chunks = list(_chain(node))
        new_bytes = sum(self._size_bytes(x) for x in chunks if x.key not in self._counts)
        if (refusal := self._refusal(new_bytes, tenant, is_bounded=is_bounded)) is not None:
            return refusal
        pin = _Pin(node, len(chunks), tenant, until_s, is_bounded)
        self._count_up(pin)
        self.remove(name)
        self._pins[name] = pin
        self._ends.push(until_s, name, pin)
        if (oldest := self._shares[is_bounded].add(name, tenant)) is not None:
            self.remove(oldest)
        return Pinned(node.chunk.end, sum(map(self._size_bytes, chunks)))

    def remove(self, name: Hashable) -> int:
        """End a pin; return the tokens that it kept in place. Idempotent."""
        pin = self._pins.pop(name, None)
        if pin is None:
            return 0
        self._ends.prune()
        self._shares[pin.is_bounded].remove(name)
        self._count_down(pin)
        return pin.node.chunk.end

    def remove_where(self, is_meant: Callable[[Hashable, bytes], bool]) -> None:
        """End the pins whose name and tenant are meant."""
        for name in [name for name, pin in self._pins.items() if is_meant(name, pin.tenant)]:
            self.remove(name)

    def move(self, name: Hashable, node: Node) -> None:
        """Let a pin keep the chain up to this chunk, within the same bounds and until its end."""
        if (pin := self._pins.get(name)) is not None:
            self.add(name, node, pin.until_s, pin.tenant, is_bounded=pin.is_bounded)

    def expire(self, now_s: float) -> bool:
        """End one pin whose time is over; return whether others are left."""
        if (name := self._ends.pop_due(now_s)) is not None:
            self.remove(name)
        return self._ends.next_s <= now_s

    def pass_over(self, artifact: Artifact) -> bool:
        """Return whether the artifact is pinned; if so eviction has it again when the pin ends.

        One that was stored after its chunk was pinned is pinned now, if there is room for it.
        """
        if (count := self._counts.get(artifact.node.key)) is None:
            return False
        kind = artifact.state_type
        if kind not in count.kinds:
            size_bytes = self._slot_bytes[kind]
            if self._refusal(size_bytes, count.tenant, is_bounded=count.is_bounded) is not None:
                return False
            count.kinds.add(kind)
            self._add_bytes(count.tenant, size_bytes)
        self._passed_over.setdefault(artifact.node.key, {})[artifact] = None
        return True

    def clear(self) -> None:
        """End all pins: everything stored was forgotten."""
        self._pins.clear()
        self._ends.clear()
        for shares in self._shares.values():
            shares.clear()
        self._counts.clear()
        self._bytes_by_tenant.clear()
        self._passed_over.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError unless the counts are those of the pins."""
        pins = Counter(node.key for pin in self._pins.values() for node in pin.chain)
        assert pins == {key: count.pins for key, count in self._counts.items()}
        sizes = Counter[bytes]()
        for count in self._counts.values():
            sizes[count.tenant] += self._sum(count.kinds)
        assert +sizes == self._bytes_by_tenant
        assert self._passed_over.keys() <= self._counts.keys()
        assert self.size_bytes <= self._capacity_bytes * MOST_PINNED

    def _count_up(self, pin: _Pin) -> None:
        for node in pin.chain:
            if (count := self._counts.get(node.key)) is not None:
                count.pins += 1
                continue
            kinds = set(node.artifacts)
            self._counts[node.key] = _Count(1, kinds, pin.tenant, pin.is_bounded)
            self._add_bytes(pin.tenant, self._sum(kinds))

    def _count_down(self, pin: _Pin) -> None:
        for node in pin.chain:
            count = self._counts[node.key]
            count.pins -= 1
            if not count.pins:
                del self._counts[node.key]
                self._add_bytes(count.tenant, -self._sum(count.kinds))
                for artifact in self._passed_over.pop(node.key, ()):
                    self._offer(artifact)

    def _size_bytes(self, node: Node) -> int:
        """Return the bytes of the slots that the chunk's state takes in a tier."""
        return self._sum(node.artifacts)

    def _sum(self, kinds: Iterable[StateType]) -> int:
        return sum(self._slot_bytes[kind] for kind in kinds)

    def _refusal(self, new_bytes: int, tenant: bytes, *, is_bounded: bool) -> PinRefusal | None:
        """Return why so much more cannot be pinned; None if it can."""
        own_bytes = self._bytes_by_tenant.get(tenant, 0) + new_bytes
        if is_bounded and own_bytes > self._capacity_bytes * MOST_PINNED_BY_TENANT:
            return PinRefusal.TENANT_FULL
        if self.size_bytes + new_bytes > self._capacity_bytes * MOST_PINNED:
            return PinRefusal.STORE_FULL
        return None

    def _add_bytes(self, tenant: bytes, size_bytes: int) -> None:
        left = self._bytes_by_tenant.pop(tenant, 0) + size_bytes
        if left:
            self._bytes_by_tenant[tenant] = left


def _chain(node: Node) -> Iterator[Node]:
    """Yield the chunk and those before it, without the root."""
    while node.parent is not None:
        yield node
        node = node.parent
