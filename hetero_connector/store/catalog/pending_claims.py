"""Sealed artifacts of which the fleet has not said yet whose they are.

They wait beside the queue of writes: what another worker owns is not written a second time. An
answer that does not come in time is not waited for; neither is one while the worker is not
registered, or when the store is flushed. Guarded by the store's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero_connector.store.catalog.nodes import Artifact

_PATIENCE_S = 1.0


class Unjudged:
    """Artifacts in the order they were set aside, which is parents first."""

    def __init__(self, clock: Callable[[], float], offer: Callable[[Artifact], None]) -> None:
        """`offer`: queues an artifact's write."""
        self.joined = False
        """Whether an answer is to be expected."""
        self._clock = clock
        self._offer = offer
        self._until_s: dict[Artifact, float] = {}

    def __bool__(self) -> bool:
        return bool(self._until_s)

    def sift(self, due: Sequence[Artifact], *, at_once: bool) -> list[Artifact]:
        """Those to write now; the others are set aside, or not ours to write."""
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
        """Whether what it continues still waits: written before that it would be out of reach."""
        return _above(artifact) in self._until_s

    def is_ours(self, artifact: Artifact) -> None:
        """Queue it, and before it what it continues: a restart finds nothing without that."""
        chain = []
        above: Artifact | None = artifact
        while above is not None and above in self._until_s:
            chain.append(above)
            above = _above(above)
        for waiting in reversed(chain):
            self._until_s[waiting] = 0.0
            self._offer(waiting)

    def is_not_ours(self, artifact: Artifact) -> None:
        """It is not written."""
        self._until_s.pop(artifact, None)

    def clear(self) -> None:
        """Wait for no answer: nothing is written."""
        self._until_s.clear()

    def offer_overdue(self, *, at_once: bool) -> None:
        """Queue what has waited for long enough."""
        now_s = self._clock()
        for artifact, until_s in list(self._until_s.items()):
            if until_s > 0.0 and (until_s <= now_s or at_once or not self.joined):
                self._until_s[artifact] = 0.0
                self._offer(artifact)


def _above(artifact: Artifact) -> Artifact | None:
    """The parent chunk's artifact of the same type."""
    parent = artifact.node.parent
    return None if parent is None else parent.artifacts.get(artifact.state_type)
