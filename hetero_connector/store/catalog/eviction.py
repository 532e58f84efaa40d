"""Eviction policies: the order in which artifacts leave a full tier.

To add a policy: implement `EvictionPolicy`, name it in `make_policy`, in `base.EvictionName` and in
the help of the key in `config`, and add it to `POLICIES` in tests/store/test_eviction_contract.py.
Every policy is deterministic: the same calls give the same victims.

A full tier asks for a victim in this order: `EvictFirst`, then the policy over the artifacts of
chains that no session uses, then the policy over the others (`UsersLast`).
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from math import log2
from typing import Protocol

from hetero_connector.artifacts.record import Tier
from hetero_connector.containers import BoundedDict
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.evictability import Evictability
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.seconds_saved import SecondsSaved


class EvictionPolicy(Protocol):
    """Orders the artifacts of one state type in one tier. The caller holds the store's lock."""

    def offer(self, artifact: Artifact) -> None:
        """Note that the artifact may be evictable now. Cheap; a second offer changes nothing."""
        ...

    def pop(self, evictability: Callable[[Artifact], Evictability]) -> Artifact | None:
        """Return the next victim; None if all are blocked. Those are offered again later.

        The caller evicts the victim: the policy no longer knows it.
        """
        ...

    def soon(self, count: int) -> list[Artifact]:
        """Return about the next `count` victims; some of them may be blocked. O(count)."""
        ...

    def clear(self) -> None:
        """Forget every artifact."""
        ...


def make_policy(
    name: EvictionName, seconds_saved: SecondsSaved, now: Callable[[], int]
) -> EvictionPolicy:
    """Return the policy of that name. `now`: the logical clock that `Artifact.last_used` is of."""
    match name:
        case "leaf_lru":
            return LeafLru()
        case "value":
            return Value(seconds_saved.in_prefills, now)


Rank = tuple[float, int]
"""The lowest leaves first. May change only when the artifact is used, and then only grow."""
_SWEEP_FROM = 64
EVICT_FIRST_CAPACITY = 16_384
_MAX_MOMENTS = 4096


class LazyHeap:
    """Artifacts by rank. An entry's place is checked when it is popped.

    So using an artifact costs nothing here, and every entry popped in vain was paid for by
    one `push` or one use: O(log n) amortised. What the index has forgotten meanwhile is
    dropped whenever the heap has doubled, for a tier that is never short of slots pops nothing.
    """

    def __init__(self, rank: Callable[[Artifact], Rank]) -> None:
        self._rank = rank
        self._entries: list[tuple[float, int, int, int, Artifact]] = []
        """(*rank, order of arrival, recency that the rank is of, artifact)"""
        self._members: set[Artifact] = set()
        self._order = count()
        self._kept = 0
        """Entries after the last `keep`."""

    def __len__(self) -> int:
        return len(self._entries)

    def push(self, artifact: Artifact) -> None:
        """Add it, unless it is there."""
        if artifact not in self._members:
            if len(self._entries) > 2 * self._kept + _SWEEP_FROM:
                self.keep(lambda other: not other.forgotten)
            self._members.add(artifact)
            heapq.heappush(self._entries, self._entry(artifact))

    def pop(self) -> Artifact | None:
        """Remove the lowest; entries used since they were placed move to their new place."""
        while self._entries:
            *_, ranked_at, artifact = self._entries[0]
            if artifact.last_used == ranked_at:
                heapq.heappop(self._entries)
                self._members.discard(artifact)
                return artifact
            heapq.heapreplace(self._entries, self._entry(artifact))
        return None

    def low(self, count: int) -> list[Artifact]:
        """Return about `count` of the lowest: those nearest to the heap's top."""
        return [entry[-1] for entry in self._entries[:count]]

    def keep(self, wanted: Callable[[Artifact], bool]) -> None:
        """Remove all others. O(n)."""
        self._entries = [entry for entry in self._entries if wanted(entry[-1])]
        heapq.heapify(self._entries)
        self._members = {entry[-1] for entry in self._entries}
        self._kept = len(self._entries)

    def clear(self) -> None:
        """Remove all."""
        self._entries.clear()
        self._members.clear()
        self._kept = 0

    def _entry(self, artifact: Artifact) -> tuple[float, int, int, int, Artifact]:
        return (*self._rank(artifact), next(self._order), artifact.last_used, artifact)


def recency(artifact: Artifact) -> Rank:
    """The least recently used first; of equally recent ones the deepest."""
    return (artifact.last_used, -artifact.node.chunk.end)


class LeafFirst:
    """Leaves before artifacts that deeper ones rest on; within each, by rank."""

    def __init__(self, rank: Callable[[Artifact], Rank]) -> None:
        self._leaves = LazyHeap(rank)
        self._backed = LazyHeap(rank)
        self._swept = 0
        """Entries that the last sweep of `_backed` kept."""

    def offer(self, artifact: Artifact) -> None:
        """See `EvictionPolicy.offer`. O(log n)."""
        self._leaves.push(artifact)

    def pop(self, evictability: Callable[[Artifact], Evictability]) -> Artifact | None:
        """See `EvictionPolicy.pop`."""
        while (artifact := self._leaves.pop()) is not None:
            found = evictability(artifact)
            if found is Evictability.FREE:
                return artifact
            if found is Evictability.BACKED:
                self._backed.push(artifact)
                self._sweep(evictability)
        while (artifact := self._backed.pop()) is not None:
            if evictability(artifact) is not Evictability.BLOCKED:
                return artifact
        return None

    def soon(self, count: int) -> list[Artifact]:
        """See `EvictionPolicy.soon`."""
        return self._leaves.low(count) or self._backed.low(count)

    def clear(self) -> None:
        """Forget every artifact."""
        self._leaves.clear()
        self._backed.clear()

    def _sweep(self, evictability: Callable[[Artifact], Evictability]) -> None:
        """Drop what left the tier some other way, whenever the heap has doubled."""
        if len(self._backed) > 2 * self._swept + _SWEEP_FROM:
            self._backed.keep(lambda artifact: evictability(artifact) is not Evictability.BLOCKED)
            self._swept = len(self._backed)


class LeafLru(LeafFirst):
    """Leaves first, the least recently used of them."""

    def __init__(self) -> None:
        super().__init__(recency)


class Value(LeafFirst):
    """Leaves first, those with the least seconds saved per byte and use, aged.

    Greedy-Dual-Size-Frequency (Cherkasova, "Improving WWW Proxies Performance with
    Greedy-Dual-Size-Frequency Caching Policy", HP Labs 1998): an artifact ranks by
    clock + (1 + log2(1 + uses)) * worth / bytes, with the clock as it was at its last use; the
    clock rises to the rank of each victim, so that what was precious once and is not used any
    more is overtaken. Worth is seconds saved, in a unit that stays what it is while the engine's
    speed is being learned (`SecondsSaved.in_prefills`): ranks are kept, and the clock is one.

    Uses count by their logarithm, where the paper counts each: all turns of a session use its
    beginning, and none do after its end. With each counted it stayed for as many rounds
    of the clock. All artifacts of a policy fill slots of one size: seconds per slot order them as
    seconds per byte do, and a short tail gets no bonus for the room it wastes.

    Leaves first, because a chunk is worth what rests on it, too.
    """

    def __init__(self, worth: Callable[[Artifact], float], now: Callable[[], int]) -> None:
        """`worth`: of having an artifact, at least 0, the same whenever it is asked.

        `now`: the logical clock that `Artifact.last_used` is of.
        """
        super().__init__(self._value)
        self._worth = worth
        self._now = now
        self._moments: list[int] = []
        """The ticks at which the clock rose, ascending."""
        self._clocks: list[float] = []
        """The values that it rose to, in the unit of worth."""

    def pop(self, evictability: Callable[[Artifact], Evictability]) -> Artifact | None:
        """See `EvictionPolicy.pop`."""
        victim = super().pop(evictability)
        if victim is not None:
            self._raise_clock(self._value(victim)[0])
        return victim

    def _value(self, artifact: Artifact) -> Rank:
        risen = bisect_left(self._moments, artifact.last_used)
        clock = self._clocks[risen - 1] if risen else 0.0
        expected = (1.0 + log2(1.0 + artifact.uses)) * self._worth(artifact)
        return (clock + expected, -artifact.node.chunk.end)

    def _raise_clock(self, to: float) -> None:
        if self._clocks and to <= self._clocks[-1]:
            return
        now = self._now()
        if self._moments and self._moments[-1] == now:
            self._clocks[-1] = to
            return
        self._moments.append(now)
        self._clocks.append(to)
        if len(self._moments) > _MAX_MOMENTS:
            # Every second one goes: what was used in between counts as a little older.
            del self._moments[1::2], self._clocks[1::2]


class UsersLast:
    """An `EvictionPolicy` made of two alike: chunks without users leave first.

    An artifact with users is set aside when it is met, so an eviction costs O(log n), amortised.
    """

    def __init__(self, unused: EvictionPolicy, used: EvictionPolicy) -> None:
        self._first = unused
        self._last = used
        self._aside: set[Artifact] = set()
        """Artifacts in `_last`, for their users."""
        self._swept = 0
        """Artifacts that the last sweep of `_aside` kept."""

    def offer(self, artifact: Artifact) -> None:
        """See `EvictionPolicy.offer`."""
        self._first.offer(artifact)

    def on_unused(self, artifact: Artifact) -> None:
        """Let an artifact leave when its turn comes: its last user has gone."""
        if artifact in self._aside:
            self._aside.remove(artifact)
            self._first.offer(artifact)

    def pop(self, evictability: Callable[[Artifact], Evictability]) -> Artifact | None:
        """See `EvictionPolicy.pop`."""

        def unless_used(artifact: Artifact) -> Evictability:
            found = evictability(artifact)
            if found is Evictability.BLOCKED or not artifact.node.users:
                return found
            self._set_aside(artifact)
            return Evictability.BLOCKED

        victim = self._first.pop(unless_used)
        if victim is None and (victim := self._last.pop(evictability)) is not None:
            self._aside.discard(victim)
        return victim

    def soon(self, count: int) -> list[Artifact]:
        """See `EvictionPolicy.soon`. Without what has been set aside."""
        return self._first.soon(count)

    @property
    def lowest(self) -> Artifact | None:
        """Return about the next victim, which may be blocked; None if there is none."""
        return next(iter(self._first.soon(1) or self._last.soon(1)), None)

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


class EvictFirst:
    """Artifacts that leave their tier before the eviction policy is asked.

    State that is cheaper to compute than to load, prefetched state whose session did not come,
    other workers' state that was not used for a while, and what is to leave early (`lifetimes`).
    Nothing is dropped while there is room. Of each tier and state type the newest count. A private
    part of `Catalog`, which holds the lock.
    """

    def __init__(self) -> None:
        self._places: defaultdict[tuple[Tier, StateType], BoundedDict[Artifact, None]]
        self._places = defaultdict(partial(BoundedDict, EVICT_FIRST_CAPACITY))

    def add(self, artifact: Artifact, tier: Tier) -> None:
        """Let an artifact leave `tier` first. Of a chain add parents first."""
        self._places[tier, artifact.state_type][artifact] = None

    def discard(self, artifacts: Iterable[Artifact]) -> None:
        """Let artifacts leave when their turn comes: they were used after all."""
        if not any(self._places.values()):
            return
        for artifact in artifacts:
            for tier in (Tier.DRAM, Tier.SSD):
                self._places[tier, artifact.state_type].pop(artifact, None)

    def renew(self, artifacts: Iterable[Artifact]) -> None:
        """Let artifacts, where they are to leave first, leave before all others that are."""
        for artifact in artifacts:
            for tier in (Tier.DRAM, Tier.SSD):
                place = self._places[tier, artifact.state_type]
                if artifact in place:
                    place.move_to_end(artifact)

    def has_any(self, tier: Tier, state_type: StateType) -> bool:
        """Return whether anything is to leave first, though it may be blocked by now."""
        return bool(self._places.get((tier, state_type)))

    def pop(
        self,
        tier: Tier,
        state_type: StateType,
        evictability: Callable[[Artifact], Evictability],
    ) -> Artifact | None:
        """Remove and return the next to leave; drop those that deeper chunks depend on by now."""
        place = self._places[tier, state_type]
        while place:
            artifact, _ = place.popitem()
            if evictability(artifact) is Evictability.FREE:
                return artifact
        return None

    def clear(self) -> None:
        """Forget every artifact."""
        self._places.clear()
