"""Retention: the chains that stay longer than others, or leave before them, as clients want it.

A part of `Catalog`, whose lock its methods take. Sessions make their chains leave last
(`chain_users`), pins keep chains in place (`timed_pins`), some chunks live for a limited time
(`lifetimes`), and a session that is forgotten leaves at once (`forgetting`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Sequence

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.store.base import Pinned, PinRefusal, PinUse
from hetero_connector.store.catalog.chain_users import ChainUsers
from hetero_connector.store.catalog.forgetting import forget_up_from
from hetero_connector.store.catalog.lifetimes import Lifetimes
from hetero_connector.store.catalog.loads import Loads
from hetero_connector.store.catalog.nodes import Node
from hetero_connector.store.catalog.prefetch import Prefetcher
from hetero_connector.store.catalog.tiers import Tiers


class Retention:
    """See the module."""

    def __init__(
        self,
        lock: threading.Condition,
        tiers: Tiers,
        loads: Loads,
        users: ChainUsers,
        prefetcher: Prefetcher,
        clock: Callable[[], float],
    ) -> None:
        """`lock`: the catalog's."""
        self._lock = lock
        self._tiers = tiers
        self._loads = loads
        self._users = users
        self._prefetcher = prefetcher
        self._clock = clock
        self._pins = tiers.timed_pins
        self._lifetimes = Lifetimes(tiers, loads)

    @property
    def look_s(self) -> float:
        """The clock when `expire` has something to do. May be read without the lock."""
        return min(self._users.look_s, self._pins.next_s, self._lifetimes.next_s)

    def expire(self) -> bool:
        """End some uses, a pin and some lives whose time is over; return whether more are due.

        Takes the lock for each of the three: a millisecond or so.
        """
        now_s = self._clock()
        with self._lock:
            is_left = self._users.expire()
        with self._lock:
            is_left |= self._pins.expire(now_s)
        with self._lock:
            return self._lifetimes.expire(now_s) or is_left

    def expire_due(self) -> bool:
        """Do `expire` if anything is due. Takes the lock only then."""
        return self.look_s <= self._clock() and self.expire()

    def clear(self) -> None:
        """End all lives and pins: everything stored was forgotten."""
        self._lifetimes.clear()
        self._pins.clear()

    def on_forgotten(self, node: Node) -> None:
        """Note that an artifact of the chunk was forgotten. Called with the lock held."""
        self._lifetimes.on_forgotten(node)

    def protect_chain(
        self, session: Hashable, leaves: Sequence[ChunkKey], until_s: float, tenant: bytes = b""
    ) -> None:
        """Evict the session's chain last, until then by the store's clock.

        `leaves`: where the chain may end, deepest first; the first of them that is stored counts.
        Forks share their common chunks. Replaces the session's earlier chain. A bounded number of
        sessions is remembered, of which each `tenant` has its share.
        """
        with self._lock:
            node = self._find(leaves)
            if node is None:
                self._users.remove(session)
            else:
                self._users.add(session, node, until_s, tenant)

    def pin_chain(
        self,
        name: Hashable,
        leaves: Sequence[ChunkKey],
        seconds: float,
        tenant: bytes,
        *,
        is_bounded: bool = True,
    ) -> Pinned | PinRefusal:
        """Evict nothing of the chain for so long: it stays in the tiers where it is.

        `leaves`: where the chain may end, deepest first; the first of them that is stored counts.
        Replaces an earlier pin of that name, unless it is refused. `is_bounded`: within the share
        of `tenant`. A reset and the end of the session of that name end pins, and so does the end
        of the process.
        """
        with self._lock:
            node = self._find(leaves)
            if node is None:
                return PinRefusal.NOT_STORED
            until_s = self._clock() + seconds
            return self._pins.add(name, node, until_s, tenant, is_bounded=is_bounded)

    def unpin_chain(self, name: Hashable) -> int:
        """End a pin; return the tokens that it kept in place."""
        with self._lock:
            return self._pins.remove(name)

    def pins(self) -> PinUse:
        """Return the pins under way. O(pins), of which there are a few thousand at most."""
        with self._lock:
            return self._pins.describe()

    def release(self, is_meant: Callable[[Hashable, bytes], bool]) -> None:
        """End the pins, the uses and the expected returns whose name and tenant are meant."""
        with self._lock:
            self._pins.remove_where(is_meant)
            self._prefetcher.cancel_where(is_meant)
            users = self._users.names_where(is_meant)
        for user in users:
            with self._lock:  # O(chunks of its chain)
                self._users.remove(user)

    def limit_life(self, chunks: Iterable[ChunkKey], seconds: float, *, is_forgotten: bool) -> None:
        """Forget these chunks of a chain after so long, or evict them first from then on.

        Parents come first. Until `lift_limits` of a chain that goes through them. What something
        else needs then is looked at again until nothing does.
        """
        with self._lock:
            nodes = list(filter(None, map(self._tiers.index.nodes.get, chunks)))
            until_s = self._clock() + seconds
            self._lifetimes.limit(nodes, until_s, is_forgotten=is_forgotten)

    def lift_limits(self, leaves: Iterable[ChunkKey]) -> None:
        """Limit no life of a chain any more, up to the first of these chunks that is known.

        What was to leave first for such a limit leaves in its turn. What should be forgotten by now
        is forgotten all the same.
        """
        if self._lifetimes:  # a request that finds none takes no lock
            with self._lock:
                self._lifetimes.lift(self._find(leaves), self._clock())

    def retire_session(self, session: Hashable, leaves: Iterable[ChunkKey]) -> None:
        """Let the session use, expect and pin nothing, and its own chunks leave first.

        Those are the ones after which no other chain goes on, and which nothing else keeps.
        """
        with self._lock:
            own = list[Node]()
            for node in self.end_session(session, leaves)[:1]:
                while node.parent is not None and node.num_children <= bool(own):
                    if node.users or node in self._pins:
                        break
                    own.append(node)
                    node = node.parent
            self._lifetimes.limit(own[::-1], self._clock(), is_forgotten=False)

    def move_pin(self, name: Hashable, leaves: Sequence[ChunkKey]) -> None:
        """Let a pin of that name, if there is one, keep a chain that has grown, until its end.

        If that is more than it may keep, it stays as it is.
        """
        if self._pins:  # a request without pins takes no lock
            with self._lock:
                if (node := self._find(leaves)) is not None:
                    self._pins.move(name, node)

    def end_session(self, session: Hashable, leaves: Iterable[ChunkKey]) -> Sequence[Node]:
        """Let the session use, expect and pin nothing; return those of `leaves` that are known."""
        with self._lock:
            self._users.remove(session)
            self._pins.remove(session)
            self._prefetcher.schedule.cancel(session)
            return list(filter(None, map(self._tiers.index.nodes.get, leaves)))

    def forget_up_from(self, nodes: Sequence[Node], limit: int) -> tuple[int, Sequence[Node]]:
        """Forget up to `limit` chunks that nothing else needs; see `forgetting`."""
        with self._lock:
            forgotten = forget_up_from(self._tiers, self._loads, nodes, limit)
            self._lock.notify_all()  # the I/O thread deletes the journal's rows
            return forgotten

    def _find(self, leaves: Iterable[ChunkKey]) -> Node | None:
        """Return the first of the chunks that is known."""
        return next(filter(None, map(self._tiers.index.nodes.get, leaves)), None)
