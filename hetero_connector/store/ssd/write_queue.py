"""What waits to be written to SSD. Runs on the I/O thread."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from hetero_connector.store.catalog.jobs import Spill
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.ssd.admission import could_be_written

_BATCH_BYTES = 16 << 20
"""In flight at once: what a restore that comes in between may have to wait for."""
_SUMMED_BYTES = 4 << 20
"""Summed at once beside reads: half a millisecond in which none is polled."""
_DRAM_SHARE = 4
"""A batch takes a quarter of the DRAM slots at most: a write that never ends keeps them."""
_RETRY_S = 1.0
_PATIENCE_S = 1.0
"""How long a write that is due waits for reads."""


class SpillQueue:
    """`StoreState.spills`, oldest first. What is taken from it is pinned until it is let go."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._most_chunks = max(1, state.tiers.dram.geometry.count // _DRAM_SHARE)

    @property
    def waits_too_long(self) -> bool:
        """Return whether the next write has waited for reads for long enough."""
        state = self._state
        with state.lock:
            return bool(state.spills) and state.spills.first.due_s + _PATIENCE_S <= state.clock()

    def take_unsummed(self, reading: bool) -> list[Artifact]:
        """The next artifacts that are due and have no checksum, pinned; few if reads go on."""
        state, size_bytes = self._state, 0
        limit = _SUMMED_BYTES if reading else _BATCH_BYTES
        taken = list[Artifact]()
        with state.lock:
            now = self._now_s
            while state.unsummed and state.unsummed.first.due_s <= now:
                artifact = state.unsummed.first.artifact
                if size_bytes >= limit and artifact.node is not taken[-1].node:
                    break
                state.unsummed.popleft()
                if artifact.checksum is None and artifact.dram is not None:
                    artifact.pins += 1
                    size_bytes += artifact.size_bytes
                    taken.append(artifact)
        return taken

    def summed(self, artifacts: Sequence[Artifact]) -> None:
        """Their checksums are known: peers may read them from now."""
        state = self._state
        feed = state.tiers.feed
        with state.lock:
            for artifact in artifacts:
                if feed is not None and not artifact.forgotten:
                    feed.here(artifact)
                state.tiers.unpin(artifact)

    def take_due(self) -> list[Artifact]:
        """The next batch from the queue, pinned; parents first. All of it has checksums."""
        state, size_bytes, chunks = self._state, 0, 0
        taken: dict[Artifact, None] = {}
        chunk = None
        with state.lock:
            now = self._now_s
            while state.spills and state.spills.first.due_s <= now:
                artifact = state.spills.first.artifact
                is_full = size_bytes >= _BATCH_BYTES or chunks >= self._most_chunks
                if is_full and artifact.node is not chunk:
                    break
                if artifact in state.unsummed:
                    break
                state.spills.popleft()
                if artifact.dram is None or artifact.ssd is not None:
                    continue  # it was written, and has left DRAM since
                artifact.pins += 1
                size_bytes += artifact.size_bytes
                taken[artifact] = None
                chunks += artifact.node is not chunk
                chunk = artifact.node
            state.spilling += len(taken)
            if not taken:
                state.lock.notify_all()
        return sorted(taken, key=lambda a: (a.node.chunk.end, a.node.key))

    def put_back(self, artifacts: Sequence[Artifact]) -> None:
        """To the head of the queue, for a moment later: chunks below depend on them."""
        state = self._state
        due_s = state.clock() + _RETRY_S
        with state.lock:
            if state.wants_spills:
                for artifact in reversed(artifacts):
                    if not artifact.forgotten:
                        state.spills.append_first(artifact, Spill(artifact, due_s))

    def add(self, artifacts: Iterable[Artifact]) -> None:
        """Queue those of them that could be written, parents first; needs the lock."""
        now = self._state.clock()
        again = (a for a in artifacts if could_be_written(a))
        for artifact in sorted(again, key=lambda a: (a.node.chunk.end, a.node.key)):
            self._state.queue_write(artifact, now)

    def let_go(self, artifacts: Collection[Artifact]) -> None:
        """They are written, or never will be."""
        state = self._state
        with state.lock:
            for artifact in artifacts:
                state.tiers.unpin(artifact)
            state.spilling -= len(artifacts)
            state.lock.notify_all()

    @property
    def _now_s(self) -> float:
        """Until when what is due is taken: all of it while the store is flushed."""
        return float("inf") if self._state.flushing else self._state.clock()
