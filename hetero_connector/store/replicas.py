"""Replicas: transient copies of what other workers own, with a time to live.

One that no restore has used for `ttl_s` is the first to leave DRAM, before any state of our own:
its owner still has it. Nothing is dropped while there is room, so until then it can be read, and
promoted when its owner dies.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from itertools import count

from hetero_connector.artifacts.index import Artifact
from hetero_connector.artifacts.record import Tier
from hetero_connector.metrics import Recorder
from hetero_connector.store.demoted import Demoted
from hetero_connector.store.moments import Moments

_NOT_YET = -1


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
        """(when to look, order of arrival, artifact): a heap, parents first."""
        self._order = count()
        self._expired_at: dict[Artifact, int] = {}
        """Each that is looked after, and its last use when it expired."""
        self.look_s = math.inf
        """When `expire` has something to do. May be read without the lock."""

    def __len__(self) -> int:
        """How many are looked after."""
        return len(self._expired_at)

    def add(self, artifact: Artifact) -> None:
        """It is another worker's. Of a chain add parents first; twice changes nothing."""
        if artifact not in self._expired_at:
            self._expired_at[artifact] = _NOT_YET
            self._look(artifact, self._clock() + self._ttl_s)

    def is_ours(self, artifact: Artifact) -> None:
        """It is not a replica any more: it leaves when its turn comes."""
        if self._expired_at.pop(artifact, None) is not None:
            self._demoted.used([artifact])

    def expire(self) -> None:
        """Let those whose time is over leave first."""
        now_s = self._clock()
        while self._looks and self._looks[0][0] <= now_s:
            *_, artifact = heapq.heappop(self._looks)
            if artifact not in self._expired_at:
                continue
            if artifact.forgotten:
                del self._expired_at[artifact]
                continue
            until_s = self._moments.when_s(artifact.last_used) + self._ttl_s
            if until_s <= now_s:
                self._expire(artifact)
                until_s = now_s + self._ttl_s
            self._look(artifact, until_s)
        self.look_s = self._looks[0][0] if self._looks else math.inf

    def clear(self) -> None:
        """Forget every artifact."""
        self._looks.clear()
        self._expired_at.clear()
        self.look_s = math.inf

    def _expire(self, artifact: Artifact) -> None:
        """Counted once for each time that it goes unused."""
        if self._expired_at[artifact] != artifact.last_used:
            self._expired_at[artifact] = artifact.last_used
            self._recorder.add("heterocache_replicas_expired")
        if artifact.dram is not None:
            # Each time anew: what deeper chunks rested on when room was needed is passed over.
            self._demoted.add(artifact, Tier.DRAM)

    def _look(self, artifact: Artifact, when_s: float) -> None:
        heapq.heappush(self._looks, (when_s, next(self._order), artifact))
        self.look_s = min(self.look_s, when_s)
