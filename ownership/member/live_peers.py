"""The other workers as this one knows them: how to read from them, and whether to accept it.

Answers come from memory: the store asks on its I/O thread, between transfers. What is known is as
old as the last answer of the directory, and is not believed for longer than a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from hetero_connector.artifacts.peer_copy import PeerCopy
from hetero_connector.artifacts.record import ArtifactId
from ownership.directory import Worker
from ownership.directory.identifiers import Epoch, Token
from ownership.member.fencing import HORIZON_S, Fence

_CAPACITY = 1 << 18
"""Artifacts remembered: one chain of a million tokens has some 20,000, and each lookup is noted."""


class LivePeers:
    """Implements `hetero_connector.store.peers.ports.Peers`. Thread-safe."""

    def __init__(
        self,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
        horizon_s: float = HORIZON_S,
    ) -> None:
        """`clock`: monotonic seconds. `horizon_s`: see `Fence`; longer than any restore."""
        self._lease_s = lease_s
        self._clock = clock
        self._lock = threading.Lock()
        self._fence = Fence(clock, horizon_s, _CAPACITY)
        self._cards: dict[int, bytes] = {}
        """By epoch, of those that were live."""
        self._asked_s = float("-inf")
        self._ended: set[Epoch] = set()
        """Epochs that were live and are not any more, until they are taken."""

    @property
    def num_live(self) -> int:
        """Workers that were live when the directory was last asked."""
        return len(self._cards)

    def card(self, holder: int) -> bytes | None:
        """What the worker of this epoch published; None unless its lease lasts."""
        if self._clock() >= self._asked_s + self._lease_s:
            return None
        return self._cards.get(holder)

    def admits(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Whether the copy may become visible now: its holder lives and was not taken over."""
        if self.card(copy.holder) is None:
            return False
        with self._lock:
            return self._fence.admits(artifact, Epoch(copy.holder), Token(copy.token), copy.asked_s)

    def may_adopt(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Whether what an ended holder left may become visible: nobody was seen to take it over."""
        if self._clock() >= self._asked_s + self._lease_s or copy.holder in self._cards:
            return False
        with self._lock:
            return self._fence.is_latest(artifact, Token(copy.token), copy.asked_s)

    def knows(self, holder: Epoch) -> bool:
        """Whether it was live when the directory was last asked."""
        return holder in self._cards

    def refresh(self, workers: Mapping[Epoch, Worker], asked_s: float) -> None:
        """The live workers, as the directory said when asked at `asked_s`, by our clock."""
        with self._lock:
            for epoch in self._cards.keys() - workers.keys():
                self._fence.saw_end(Epoch(epoch))
                self._ended.add(Epoch(epoch))
            self._cards = {epoch: worker.peer for epoch, worker in workers.items() if worker.peer}
            self._asked_s = asked_s

    def take_ended(self) -> set[Epoch]:
        """Epochs that were seen to have ended since the last call."""
        with self._lock:
            ended, self._ended = self._ended, set()
        return ended

    def saw(self, artifact: ArtifactId, token: Token) -> None:
        """An owner of the artifact has this token."""
        with self._lock:
            self._fence.saw(artifact, token)
