"""Pending claims: sealed artifacts whose ownership claim has not been answered yet.

They are not queued for their write meanwhile: what another worker owns is not written a second
time. An answer that does not come in time is not waited for. Nothing waits while the worker is not
registered, or while the store is flushed. A private part of `Catalog`, which holds the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero_connector.store.catalog.nodes import Artifact

_PATIENCE_S = 1.0


class PendingClaims:
    """Artifacts in the order in which they were set aside, which is parents first."""

    def __init__(self, clock: Callable[[], float], offer: Callable[[Artifact], None]) -> None:
        """`offer` queues an artifact's write."""
        self.joined = False
        """True while the worker is registered: an answer may come."""
        self._clock = clock
        self._offer = offer
        self._until_s: dict[Artifact, float] = {}

    def __len__(self) -> int:
        return len(self._until_s)

    def sift(self, due: Sequence[Artifact], *, at_once: bool) -> list[Artifact]:
        """Return those to write now; set aside those that wait, drop those of other workers."""
        now_s, kept = self._clock(), []
        for artifact in due:
            overdue = self._until_s.pop(artifact, now_s + _PATIENCE_S) <= now_s
            if artifact.replica:
                continue
            decided = artifact.token or overdue or at_once or not self.joined
            if decided and not self._continues_one(artifact):
                kept.append(artifact)
            else:
                self._until_s[artifact] = now_s + _PATIENCE_S
        return kept

    def _continues_one(self, artifact: Artifact) -> bool:
        """Return whether its parent still waits: written before it, it would be out of reach."""
        return _above(artifact) in self._until_s

    def resolve_owned(self, artifact: Artifact) -> None:
        """Queue its write, and before it those of its parents: a restart needs them to find it."""
        chain = []
        above: Artifact | None = artifact
        while above is not None and above in self._until_s:
            chain.append(above)
            above = _above(above)
        for waiting in reversed(chain):
            self._until_s[waiting] = 0.0
            self._offer(waiting)

    def discard(self, artifact: Artifact) -> None:
        """Stop waiting for an answer; it is not written."""
        self._until_s.pop(artifact, None)

    def clear(self) -> None:
        """Stop waiting for every answer; nothing is written."""
        self._until_s.clear()

    def offer_overdue(self, *, at_once: bool) -> None:
        """Queue the writes that have waited for long enough."""
        now_s = self._clock()
        for artifact, until_s in list(self._until_s.items()):
            if until_s > 0.0 and (until_s <= now_s or at_once or not self.joined):
                self._until_s[artifact] = 0.0
                self._offer(artifact)


def _above(artifact: Artifact) -> Artifact | None:
    """Return the parent chunk's artifact of the same type."""
    parent = artifact.node.parent
    return None if parent is None else parent.artifacts.get(artifact.state_type)
