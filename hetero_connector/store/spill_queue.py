"""What waits to be written to SSD. Runs on the I/O thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from hetero_connector.artifacts.nodes import Artifact
from hetero_connector.store.admission import could_be_written
from hetero_connector.store.state import Spill, StoreState

_BATCH_BYTES = 16 << 20
"""In flight at once: what a restore that comes in between may have to wait for."""
_RETRY_S = 1.0


class SpillQueue:
    """`StoreState.spills`, oldest first. What is taken from it is pinned until it is let go."""

    def __init__(self, state: StoreState) -> None:
        self._state = state

    def take_due(self) -> list[Artifact]:
        """The next batch from the queue, pinned; parents first."""
        state, size_bytes = self._state, 0
        taken: dict[Artifact, None] = {}
        chunk = None
        with state.lock:
            now = float("inf") if state.flushing else state.clock()
            while state.spills and state.spills[0].due_s <= now:
                artifact = state.spills[0].artifact
                if size_bytes >= _BATCH_BYTES and artifact.node is not chunk:
                    break
                state.spills.popleft()
                if artifact.forgotten or artifact.dram is None:
                    continue  # evicted while it waited
                if artifact.ssd is not None or artifact in taken:
                    continue  # asked for twice
                artifact.pins += 1
                size_bytes += artifact.size_bytes
                taken[artifact] = None
                chunk = artifact.node
            state.spilling += len(taken)
            if not taken:
                state.lock.notify_all()
        return sorted(taken, key=lambda a: (a.node.chunk.end, a.node.key))

    def put_back(self, artifacts: Iterable[Artifact]) -> None:
        """To the head of the queue, for a moment later: chunks below depend on them."""
        state = self._state
        due_s = state.clock() + _RETRY_S
        with state.lock:
            if state.wants_spills:
                again = [Spill(a, due_s) for a in artifacts if not a.forgotten]
                state.spills.extendleft(reversed(again))

    def add(self, artifacts: Iterable[Artifact]) -> None:
        """Queue those of them that could be written, parents first; needs the lock."""
        now = self._state.clock()
        again = (a for a in artifacts if could_be_written(a))
        parents_first = sorted(again, key=lambda a: (a.node.chunk.end, a.node.key))
        self._state.spills.extend(Spill(a, now) for a in parents_first)

    def let_go(self, artifacts: Collection[Artifact]) -> None:
        """They are written, or never will be."""
        state = self._state
        with state.lock:
            for artifact in artifacts:
                state.tiers.unpin(artifact)
            state.spilling -= len(artifacts)
            state.lock.notify_all()
