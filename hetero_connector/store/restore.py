"""The handle of artifacts being brought into DRAM and held there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.index import Artifact
from hetero_connector.artifacts.record import ROOT, ArtifactId, StoredChunk, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.hold import Hold
from hetero_connector.store.state import Load, StoreState

_offsets = attrgetter("offsets")
_NOWHERE = np.full(len(StateType), -1, np.int64).tobytes()
_stale = attrgetter("stale")


class ArtifactRestore:
    """Implements `base.Restore` over a `StoreState`. Used by the scheduler's thread."""

    def __init__(self, state: StoreState, wanted: Sequence[Wanted]) -> None:
        """Needs the lock. Holds what is in DRAM first, so that no slot for a read evicts it."""
        self._state = state
        self._wanted = wanted
        self._hold = Hold(wanted)
        self._places: dict[ArtifactId, list[tuple[int, int]]] = {}
        """Where in the columns an artifact that was not ready in DRAM belongs."""
        self._failed: dict[ArtifactId, Failure] = {}
        self._pending: dict[ArtifactId, Load] = {}
        self._deadline_s = state.clock() + state.config.load_deadline_s
        self._released = False
        state.tiers.hold(self._hold)
        self._columns = self._in_dram()
        for position, column in sorted(self._not_ready()):  # in chain order
            kind, chunks = wanted[column]
            artifact_id = ArtifactId(chunks[position].chunk.key, kind)
            self._load(artifact_id, (column, position))
        if self._pending:
            state.lock.notify_all()

    @property
    def done(self) -> bool:
        """Whether all have arrived or failed. At the deadline what is still missing fails."""
        if not self._pending:
            return True
        with self._state.lock:
            if self._pending and self._state.clock() >= self._deadline_s:
                self._state.fail(Failure.DEADLINE, Tier.SSD, len(self._pending))
                self._failed.update(dict.fromkeys(self._pending, Failure.DEADLINE))
                self._abandon_pending()
            return not self._pending

    @property
    def columns(self) -> Sequence[Sequence[int]]:
        """See `base.Restore.columns`."""
        return self._columns

    @property
    def offsets(self) -> Mapping[ArtifactId, int]:
        """See `base.Restore.offsets`."""
        return {
            ArtifactId(stored.chunk.key, kind): at
            for (kind, chunks), column in zip(self._wanted, self._columns, strict=True)
            for stored, at in zip(chunks, column, strict=True)
            if at >= 0
        }

    @property
    def failed(self) -> Mapping[ArtifactId, Failure]:
        """Artifacts that did not arrive, and why. Final once `done`."""
        return self._failed

    def release(self) -> None:
        """Let go, and mark the artifacts as used. Idempotent."""
        state = self._state
        with state.lock:
            if self._released:
                return
            self._released = True
            self._abandon_pending()
            used, now = list(self._used()), state.tiers.tick()
            for artifact in used:
                artifact.last_used = now
                artifact.uses += 1
            self._count_dram_hits(used)
            state.tiers.let_go(self._hold)
            if state.config.ssd_dir is not None:
                state.used.append(used)

    def arrived(self, artifact: Artifact, failure: Failure | None) -> None:
        """Called with the lock held when a load this restore waits for has ended."""
        artifact_id = artifact.id
        del self._pending[artifact_id]
        if failure is not None:
            self._failed[artifact_id] = failure
            return
        for column, position in self._places[artifact_id]:
            self._columns[column][position] = artifact.dram_offset

    def _in_dram(self) -> list[list[int]]:
        """The columns as far as they lie in DRAM, ready to be used.

        A long prompt has thousands of artifacts, nearly always all in DRAM and as the match
        of a moment ago said: no look at each of them then.
        """
        if self._state.config.verify == "all":
            return [[-1] * len(chunks) for _, chunks in self._wanted]
        tables: dict[int, npt.NDArray[np.int64]] = {}
        columns: list[list[int]] = []
        for kind, chunks in self._wanted:
            if id(chunks) not in tables:  # columns over one and the same list share theirs
                packed = b"".join(map(_offsets, self._current(chunks)))
                tables[id(chunks)] = np.frombuffer(packed, np.int64).reshape(-1, len(StateType))
            columns.append(tables[id(chunks)][:, kind.position].tolist())
        return columns

    def _current(self, chunks: Sequence[StoredChunk]) -> Sequence[StoredChunk]:
        """What `match` would answer for the chunks by now."""
        if True not in map(_stale, chunks):
            return chunks
        nodes = self._state.tiers.index.nodes
        gone = StoredChunk(nodes[ROOT].chunk, {}, _NOWHERE)
        found = (nodes.get(stored.chunk.key) for stored in chunks)
        return [gone if node is None else node.stored or gone for node in found]

    def _not_ready(self) -> Iterator[tuple[int, int]]:
        """(position, column) of what has no place in DRAM yet."""
        for column, offsets in enumerate(self._columns):
            if offsets and min(offsets) < 0:
                yield from ((at, column) for at, offset in enumerate(offsets) if offset < 0)

    def _load(self, artifact_id: ArtifactId, place: tuple[int, int]) -> None:
        state = self._state
        self._places.setdefault(artifact_id, []).append(place)
        if artifact_id in self._pending:
            return  # asked for twice
        artifact = state.tiers.index.find(artifact_id)
        if artifact is None or not artifact.sealed:
            self._failed[artifact_id] = Failure.GONE
            state.fail(Failure.GONE, Tier.DRAM)
            return
        if not state.io_alive:
            self._failed[artifact_id] = Failure.IO_ERROR
            state.fail(Failure.IO_ERROR, Tier.SSD)
            return
        load = state.loading.get(artifact)
        if load is None:
            load = self._start(artifact)
        if load is None:
            self._failed[artifact_id] = Failure.NO_SLOT
            state.fail(Failure.NO_SLOT, Tier.DRAM)
            return
        load.waiting.append(self)
        self._pending[artifact_id] = load

    def _start(self, artifact: Artifact) -> Load | None:
        """Queue a read, or a check of what is in DRAM; None if there is no slot to read into."""
        state = self._state
        artifact.pins += 1
        target = None
        if artifact.dram is None:
            target = state.tiers.take_dram(artifact.state_type)
            if target is None:
                state.tiers.unpin(artifact)
                return None
            state.reading_bytes += artifact.size_bytes
        load = state.loading[artifact] = Load(artifact, target)
        state.loads.append(load)
        return load

    def _used(self) -> Iterator[Artifact]:
        """What arrived or was there, as far as the index still knows it."""
        nodes = self._state.tiers.index.nodes
        for (kind, chunks), offsets in zip(self._wanted, self._columns, strict=True):
            for stored, offset in zip(chunks, offsets, strict=True):
                node = nodes.get(stored.chunk.key)
                if offset >= 0 and node is not None and kind in node.artifacts:
                    yield node.artifacts[kind]

    def _count_dram_hits(self, used: Sequence[Artifact]) -> None:
        read: dict[StateType, int] = {}
        for artifact in used:
            if not self._places or artifact.id not in self._places:
                kind = artifact.state_type
                read[kind] = read.get(kind, 0) + artifact.size_bytes
        for kind, size_bytes in read.items():
            self._state.count_read(Tier.DRAM, kind, size_bytes)

    def _abandon_pending(self) -> None:
        """Wait for nothing more; the loads go on, and what they bring stays cached."""
        for load in self._pending.values():
            load.waiting.remove(self)
        self._pending.clear()
