"""Replicas: transient copies of what other workers own, with a time to live.

One that no restore has used for `ttl_s` is the first to leave DRAM, before any state of our own:
its owner still has it. Nothing is dropped while there is room, so until then it can be read, and
promoted when its owner dies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from hetero_connector.artifacts.record import Tier
from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.evict_first import Demoted
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.tick_times import Moments

_NOT_YET = -1
_LOOKS_AT_ONCE = 256
"""While the store's lock is held once: a millisecond or two."""
_SWEEP_FROM = 64


@dataclass
class _Watched:
    look: int = 0
    """Number of the look that counts; others of the artifact are not current any more."""
    expired_at: int = _NOT_YET
    """Its last use when it expired."""


class Replicas:
    """Looks at each replica about once in its time to live. The caller holds the store's lock.

    So using one costs nothing here.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float],
        moments: Moments,
        demoted: Demoted,
        recorder: Recorder,
    ) -> None:
        """`moments`: when the ticks of `Artifact.last_used` were, by `clock`, in seconds."""
        self._ttl_s = ttl_s
        self._clock = clock
        self._moments = moments
        self._demoted = demoted
        self._recorder = recorder
        self._looks: list[tuple[float, int, Artifact]] = []
        """(when to look, number of the look, artifact): a heap, parents first."""
        self._order = count()
        self._watched: dict[Artifact, _Watched] = {}
        """Each that is looked after."""
        self.look_s = math.inf
        """When `expire` has something to do. May be read without the lock."""

    def __len__(self) -> int:
        """How many are looked after."""
        return len(self._watched)

    def add(self, artifact: Artifact) -> None:
        """It is another worker's. Of a chain add parents first; twice changes nothing."""
        if artifact not in self._watched:
            watched = self._watched[artifact] = _Watched()
            self._look(artifact, watched, self._clock() + self._ttl_s)

    def is_ours(self, artifact: Artifact) -> None:
        """It is not a replica any more: it leaves when its turn comes."""
        if self._watched.pop(artifact, None) is not None:
            self._demoted.used([artifact])

    def expire(self, looks: int = _LOOKS_AT_ONCE) -> bool:
        """Let some of those whose time is over leave first; whether others are left to look at."""
        now_s = self._clock()
        for _ in range(looks):
            if not self._looks or self._looks[0][0] > now_s:
                break
            _, number, artifact = heapq.heappop(self._looks)
            if self._is_current(number, artifact):
                self._look_at(artifact, self._watched[artifact], now_s)
        self.look_s = self._looks[0][0] if self._looks else math.inf
        return self.look_s <= now_s

    def clear(self) -> None:
        """Forget every artifact."""
        self._looks.clear()
        self._watched.clear()
        self.look_s = math.inf

    def _look_at(self, artifact: Artifact, watched: _Watched, now_s: float) -> None:
        if artifact.forgotten:
            del self._watched[artifact]
            return
        until_s = self._moments.when_s(artifact.last_used) + self._ttl_s
        if until_s <= now_s:
            self._expire(artifact, watched)
            until_s = now_s + self._ttl_s
        self._look(artifact, watched, until_s)

    def _expire(self, artifact: Artifact, watched: _Watched) -> None:
        """Counted once for each time that it goes unused."""
        if watched.expired_at != artifact.last_used:
            watched.expired_at = artifact.last_used
            self._recorder.add("heterocache_replicas_expired")
        if artifact.dram is not None:
            # Each time anew: what deeper chunks rested on when room was needed is passed over.
            self._demoted.add(artifact, Tier.DRAM)

    def _look(self, artifact: Artifact, watched: _Watched, when_s: float) -> None:
        watched.look = next(self._order)
        heapq.heappush(self._looks, (when_s, watched.look, artifact))
        if len(self._looks) > 2 * len(self._watched) + _SWEEP_FROM:
            self._looks = [x for x in self._looks if self._is_current(x[1], x[2])]
            heapq.heapify(self._looks)
        self.look_s = min(self.look_s, when_s)

    def _is_current(self, look: int, artifact: Artifact) -> bool:
        watched = self._watched.get(artifact)
        return watched is not None and watched.look == look
