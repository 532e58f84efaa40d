"""Replicas: transient copies of what other workers own, with a time to live.

One that no restore has used for `ttl_s` is the first to leave DRAM, before any state of our own:
its owner still has it. It is not dropped while there is room, so until then it can be read, and
promoted when its owner dies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hetero_connector.artifacts.record import Tier
from hetero_connector.containers import ExpiringHeap
from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.eviction import EvictFirst
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.tick_times import TickTimes

_NOT_YET = -1
_LOOKS_AT_ONCE = 256
"""Replicas looked at in one call: a millisecond or two of the lock."""


@dataclass(eq=False)
class _Watch:
    expired_at: int = _NOT_YET
    """The tick of its last use when it expired."""


class Replicas:
    """Looks at each replica about once in its time to live, so that a use costs nothing here.

    A private part of `Catalog`, which holds the lock.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        tick_times: TickTimes,
        evict_first: EvictFirst,
        recorder: Recorder,
    ) -> None:
        """`tick_times`: when the ticks of `Artifact.last_used` were, by `clock`, in seconds."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._tick_times = tick_times
        self._evict_first = evict_first
        self._recorder = recorder
        self._watches: dict[Artifact, _Watch] = {}
        self._looks = ExpiringHeap[Artifact, _Watch](self._watches)

    def __len__(self) -> int:
        return len(self._watches)

    @property
    def look_s(self) -> float:
        """The clock when `expire` has something to do. May be read without the lock."""
        return self._looks.next_s

    def add(self, artifact: Artifact) -> None:
        """Watch a replica. Of a chain add parents first; adding twice changes nothing."""
        if artifact not in self._watches:
            watch = self._watches[artifact] = _Watch()
            self._looks.push(self._clock() + self._ttl_s, artifact, watch)

    def promote(self, artifact: Artifact) -> None:
        """Stop watching an artifact that became ours: it leaves when its turn comes."""
        if self._watches.pop(artifact, None) is not None:
            self._looks.prune()
            self._evict_first.discard([artifact])

    def expire(self, looks: int = _LOOKS_AT_ONCE) -> bool:
        """Let some replicas whose time is over leave first; return whether more are due."""
        now_s = self._clock()
        for _ in range(looks):
            artifact = self._looks.pop_due(now_s)
            if artifact is None:
                break
            self._look_at(artifact, self._watches[artifact], now_s)
        return self._looks.next_s <= now_s

    def clear(self) -> None:
        """Forget every replica."""
        self._looks.clear()
        self._watches.clear()

    def _look_at(self, artifact: Artifact, watch: _Watch, now_s: float) -> None:
        if artifact.forgotten:
            del self._watches[artifact]
            return
        until_s = self._tick_times.time_s(artifact.last_used) + self._ttl_s
        if until_s <= now_s:
            self._expire(artifact, watch)
            until_s = now_s + self._ttl_s
        self._looks.push(until_s, artifact, watch)

    def _expire(self, artifact: Artifact, watch: _Watch) -> None:
        """Count it once for each time that it goes unused."""
        if watch.expired_at != artifact.last_used:
            watch.expired_at = artifact.last_used
            self._recorder.add("heterocache_replicas_expired")
        if artifact.dram is not None:
            # Each time anew: eviction drops from the list what deeper chunks depended on.
            self._evict_first.add(artifact, Tier.DRAM)
