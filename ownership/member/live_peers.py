"""The other workers of the fleet: how to read from them, and whether to accept their copies.

Answers come from memory, because the store asks on its I/O thread, between transfers. They are as
old as the last answer of the directory, and are used for no longer than a lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId
from ownership.directory import Worker
from ownership.directory.identifiers import Epoch, Token
from ownership.member.fencing import HORIZON_S, Fence


class LivePeers:
    """Implements the `Peers` port of `hetero_connector.store.peers`. Thread-safe."""

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
        self._fence = Fence(clock, horizon_s)
        self._cards: dict[int, bytes] = {}
        """The cards of live workers, by epoch."""
        self._asked_s = float("-inf")

    @property
    def num_live(self) -> int:
        """Workers that were live when the directory was last asked."""
        return len(self._cards)

    def card(self, holder: int) -> bytes | None:
        """Return what the worker of this epoch published; None unless its lease lasts."""
        return None if self._is_outdated() else self._cards.get(holder)

    def may_use(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Return True if the copy may become visible now: its holder lives and still has it."""
        if self.card(copy.holder) is None:
            return False
        with self._lock:
            return self._fence.admit(artifact, Epoch(copy.holder), Token(copy.token), copy.asked_s)

    def may_adopt(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Return True if a copy that an ended holder left may become visible now.

        Its holder must have ended, and no takeover may have been seen.
        """
        if self._is_outdated() or copy.holder in self._cards:
            return False
        with self._lock:
            return self._fence.admit_orphan(artifact, Token(copy.token), copy.asked_s)

    def was_live(self, holder: Epoch) -> bool:
        """Return True if the epoch was live when the directory was last asked."""
        return holder in self._cards

    def refresh(self, workers: Mapping[Epoch, Worker], asked_s: float) -> None:
        """Replace the live workers by those that the directory named when asked at `asked_s`."""
        with self._lock:
            for epoch in self._cards.keys() - workers.keys():
                self._fence.note_end(Epoch(epoch))
            self._cards = {epoch: worker.peer for epoch, worker in workers.items() if worker.peer}
            self._asked_s = asked_s

    def note_tokens(self, tokens: Mapping[ArtifactId, Token]) -> None:
        """Record the tokens that the artifacts' owners have."""
        with self._lock:
            self._fence.note_tokens(tokens)

    def _is_outdated(self) -> bool:
        return self._clock() >= self._asked_s + self._lease_s
