"""Chain users: the sessions that may come back to a chain. Chunks with users leave a tier last.

A user is a session of this engine, or all sessions of other engines that go up to one chunk. It
uses its chain from the root to a chunk. Forks share the chunks they have in common, and each chunk
counts its users. When the last one goes, the chunk leaves when its turn comes. Users order
evictions and forbid none: where every chunk has users the eviction policy chooses among all. Each
uses its chain for a limited time. Artifacts in `EvictFirst` leave first all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import BoundedDict, ExpiringHeap
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.nodes import Node

_CAPACITY = 4_096
_MAX_ENDS = 8
_FOREIGN = b"other engines"
"""The tenant of other engines' sessions."""
_CHUNKS_AT_ONCE = 512
"""Chunks whose users are counted down in one call: a millisecond or so of the lock."""


@dataclass(frozen=True, eq=False)
class _Use:
    """A user's time on a chain: a new object each time, because `ExpiringHeap` compares by it."""

    node: Node
    """The last chunk of the chain that is used."""


@dataclass(frozen=True)
class _Foreign:
    """All sessions of other engines that use a chain up to this chunk."""

    chunk: ChunkKey


class ChainUsers:
    """Counts users on the index's nodes. A private part of `Catalog`, which holds the lock.

    The newest `capacity` users count, of each tenant its share. To add, move or remove one costs
    O(chunks of its chain); one that goes on with the same chain costs O(log users).
    """

    def __init__(
        self,
        clock: Callable[[], float],
        on_unused: Callable[[Node], None],
        capacity: int = _CAPACITY,
    ) -> None:
        """`on_unused` is called with chunks that have lost their last user."""
        self.changed = BoundedDict[Hashable, None](2 * capacity)
        """Sessions of this engine that were added, moved or removed since the fleet asked. Without
        a fleet nothing takes them, hence the bound."""
        self._clock = clock
        self._on_unused = on_unused
        self._capacity = capacity
        self._shares = FairShares(capacity)
        self._uses: dict[Hashable, _Use] = {}
        self._ends = ExpiringHeap[Hashable, _Use](self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def look_s(self) -> float:
        """The clock when `expire` has something to do. May be read without the lock."""
        return self._ends.next_s

    def add(self, user: Hashable, node: Node, until_s: float, tenant: bytes = b"") -> None:
        """Let a user use the chain up to this chunk, and no other, until then by the clock."""
        before = self._uses.pop(user, None)
        self._note_change(user)
        use = self._uses[user] = _Use(node)
        if before is None or before.node is not node:
            for used in _chain(node):
                used.users += 1
            if before is not None:
                self._count_down(before)
        self._ends.push(until_s, user, use)
        if (oldest := self._shares.add(user, tenant)) is not None:
            self.remove(oldest)

    def remove(self, user: Hashable) -> int:
        """Let a user use nothing; return the length of its chain in chunks. Idempotent."""
        use = self._uses.pop(user, None)
        if use is None:
            return 0
        self._ends.prune()
        self._shares.remove(user)
        self._note_change(user)
        return self._count_down(use)

    def names_where(self, is_meant: Callable[[Hashable, bytes], bool]) -> list[Hashable]:
        """Return the users whose name and tenant are meant."""
        return [user for user, tenant in self._shares.tenants.items() if is_meant(user, tenant)]

    def chain_ends(self, user: Hashable) -> tuple[ChunkKey, ...]:
        """Return the last chunk of each owner's in the user's chain, deepest first.

        Owners are this engine and all others. A short chunk at the end may have left its owner, so
        the full chunk before it is there too. O(chunks of the chain).
        """
        use, ends = self._uses.get(user), []
        below: Node | None = None
        for node in _chain(None if use is None else use.node):
            if node.artifacts:
                if below is None or _is_short(below) or _is_replica(node) != _is_replica(below):
                    ends.append(node.key)
                below = node
        return tuple(ends[:_MAX_ENDS])

    def add_foreign(self, node: Node, until_s: float, now: int) -> None:
        """Let sessions of other engines use the chain up to this chunk.

        If they are new that is a use of its artifacts, at tick `now` of the logical clock.
        """
        user = _Foreign(node.key)
        if user not in self._uses:
            for used in _chain(node):
                for artifact in used.artifacts.values():
                    artifact.last_used = now
        self.add(user, node, until_s, _FOREIGN)

    def remove_foreign(self, chunk: ChunkKey) -> None:
        """Let no session of another engine use the chain up to this chunk."""
        self.remove(_Foreign(chunk))

    def foreign_ends(self) -> list[ChunkKey]:
        """Return the chunks up to which sessions of other engines use a chain."""
        return [user.chunk for user in self._uses if isinstance(user, _Foreign)]

    def expire(self, chunks: int = _CHUNKS_AT_ONCE) -> bool:
        """Remove users whose time is over; return whether others are left.

        At least one is removed, and no further one once so many chunks were counted down.
        """
        now_s, counted = self._clock(), 0
        while counted < chunks and (user := self._ends.pop_due(now_s)) is not None:
            counted += 1 + self.remove(user)
        return self._ends.next_s <= now_s

    def clear(self) -> None:
        """Forget all users: the index was cleared."""
        for user in self._uses:
            self._note_change(user)
        self._uses.clear()
        self._shares.clear()
        self._ends.clear()

    def take_changed(self) -> list[Hashable]:
        """Return the sessions in `changed`, and start it anew."""
        changed = list(self.changed)
        self.changed.clear()
        return changed

    def _note_change(self, user: Hashable) -> None:
        if not isinstance(user, _Foreign):
            self.changed[user] = None

    def _count_down(self, use: _Use) -> int:
        """Return the number of chunks that were counted down."""
        counted = 0
        for node in _chain(use.node):
            counted += 1
            node.users -= 1
            if not node.users:
                self._on_unused(node)
        return counted


def _chain(node: Node | None) -> Iterator[Node]:
    """Yield the chunk and all before it, also those that have left the index since."""
    while node is not None:
        yield node
        node = node.parent


def _is_replica(node: Node) -> bool:
    return any(artifact.replica for artifact in node.artifacts.values())


def _is_short(node: Node) -> bool:
    above = node.parent
    assert above is not None
    return node.chunk.end - node.chunk.start < above.chunk.end - above.chunk.start
