"""The handle of artifacts being brought into DRAM and held there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkRange, StoredChunk, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.catalog.hold import Hold
from hetero_connector.store.catalog.jobs import Load
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.staging_timer import StagingTimer

_offsets = attrgetter("offsets")
_NOWHERE = np.full(len(StateType), -1, np.int64).tobytes()
_stale = attrgetter("stale")


class ArtifactRestore:
    """Implements `base.Restore` over a `StoreState`. Used by the scheduler's thread."""

    def __init__(
        self,
        state: StoreState,
        wanted: Sequence[Wanted],
        copies: Mapping[ArtifactId, PeerCopy],
    ) -> None:
        """Needs the lock. Holds what is in DRAM first, so that no slot for a read evicts it."""
        self._state = state
        self._wanted = wanted
        self._copies = copies
        self._hold = Hold(wanted)
        self._places: dict[ArtifactId, list[tuple[int, int]]] = {}
        """Where in the columns an artifact that was not ready in DRAM belongs."""
        self._failed: dict[ArtifactId, Failure] = {}
        self._pending: dict[ArtifactId, Load] = {}
        started_s = state.clock()
        self._timer = StagingTimer(started_s, state.reading_bytes)
        self._deadline_s = started_s + state.config.load_deadline_s
        self._congested = state.is_congested
        self._released = False
        self._staged_s = 0.0
        state.tiers.hold(self._hold)
        self._columns = self._in_dram()
        for place in sorted(self._not_ready(), key=self._begins_at):  # parents first
            column, position = place
            kind, chunks = wanted[column]
            self._load(chunks[position].chunk, kind, place)
        if self._pending:
            state.lock.notify_all()

    @property
    def done(self) -> bool:
        """Whether all have arrived or failed. At the deadline what is still missing fails."""
        if not self._pending:
            return True
        with self._state.lock:
            now_s = self._state.clock()
            if self._pending and now_s >= self._deadline_s:
                self._give_up(now_s)
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

    @property
    def staged_s(self) -> float:
        """See `base.Restore.staged_s`."""
        return self._staged_s

    def release(self) -> None:
        """Let go, and mark the artifacts as used. Idempotent."""
        state = self._state
        with state.lock:
            if self._released:
                return
            self._released = True
            self._abandon_pending()
            used = list(self._used())
            state.tiers.used(used, state.tick())
            self._count_dram_hits(used)
            if state.config.verify == "sample" and state.io_alive:
                state.samples.hit(used)
            state.tiers.let_go(self._hold)
            if state.config.ssd_dir is not None and state.io_alive:
                state.used.update(dict.fromkeys(used))

    def arrived(self, artifact: Artifact, failure: Failure | None) -> None:
        """Called with the lock held when a load this restore waits for has ended."""
        artifact_id = artifact.id
        load = self._pending.pop(artifact_id)
        state = self._state
        now_s = state.clock()
        self._staged_s = now_s - self._timer.started_s
        timing = self._timer.ended(
            load.tier, artifact.size_bytes, now_s, failed=failure is not None
        )
        if timing is not None and failure is Failure.DEADLINE:
            state.learn_given_up(timing, self._timer.started_s)
        elif timing is not None:
            state.timings.append(timing)
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
        """(column, position) of what has no place in DRAM yet."""
        for column, offsets in enumerate(self._columns):
            if offsets and min(offsets) < 0:
                yield from ((column, at) for at, offset in enumerate(offsets) if offset < 0)

    def _begins_at(self, place: tuple[int, int]) -> int:
        """Where in the chain the artifact of a place begins, in tokens."""
        column, position = place
        return self._wanted[column].chunks[position].chunk.start

    def _load(self, chunk: ChunkRange, kind: StateType, place: tuple[int, int]) -> None:
        state, artifact_id = self._state, ArtifactId(chunk.key, kind)
        self._places.setdefault(artifact_id, []).append(place)
        if artifact_id in self._pending:
            return  # asked for twice
        artifact = state.tiers.index.find(artifact_id)
        load, failure, tier, joined = None, None, Tier.DRAM, False
        if not state.serves_loads:
            failure, tier = Failure.IO_ERROR, Tier.SSD
        elif artifact is None:
            load, failure = self._fetch(chunk, kind)
            tier = Tier.PEER if failure is Failure.BAD_RECORD else tier
        elif artifact in state.loading:
            load, joined = state.loading[artifact], True
            if load.late:  # its slot is all there is, and nobody knows until when
                load, failure, tier = None, Failure.DEADLINE, Tier.SSD
        elif not artifact.sealed:
            failure = Failure.GONE
        elif artifact.dram is None and not state.ssd_readable:
            failure, tier = Failure.IO_ERROR, Tier.SSD
        elif artifact.dram is None and self._congested:
            failure, tier = Failure.CONGESTED, Tier.SSD
        else:
            load = self._start(artifact)
            failure = Failure.NO_SLOT if load is None else None
        if load is None:
            assert failure is not None
            self._failed[artifact_id] = failure
            state.fail(failure, tier)
            return
        if joined or load.adopts:  # a file's time says nothing of peers' DRAM
            self._timer.untold(load.tier)
        else:
            self._timer.begun(load.tier, kind, load.artifact.size_bytes)
        load.waiting.append(self)
        self._pending[artifact_id] = load

    def _fetch(self, chunk: ChunkRange, kind: StateType) -> tuple[Load | None, Failure | None]:
        """Queue a read from a peer of what is not stored here; else why there is none."""
        state, index = self._state, self._state.tiers.index
        copy = self._copies.get(ArtifactId(chunk.key, kind))
        if copy is None or not state.reads_peers:
            return None, Failure.GONE
        if not 0 < copy.size_bytes <= state.tiers.dram.geometry.stride_bytes.get(kind, 0):
            return None, Failure.BAD_RECORD
        if not index.has_place_for(chunk):
            return None, Failure.GONE  # nobody could reach the chunk
        # The artifact enters the index first: that keeps its parents.
        artifact = index.add(chunk, kind, copy.size_bytes)
        artifact.replica = not copy.storage  # what a dead engine left becomes ours
        artifact.pins = 1
        target = state.tiers.take_dram(kind)
        if target is None:
            state.tiers.forget(artifact)
            state.tiers.unpin(artifact)
            return None, Failure.NO_SLOT
        load = state.begin(artifact, target, copy)
        (state.orphan_loads if load.adopts else state.peer_loads).append(artifact, load)
        return load, None

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
        load = state.begin(artifact, target)
        state.loads.append(artifact, load)
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

    def _give_up(self, now_s: float) -> None:
        for load in self._pending.values():
            self._state.fail(Failure.DEADLINE, load.tier)
        self._failed.update(dict.fromkeys(self._pending, Failure.DEADLINE))
        for timing in self._timer.given_up(now_s):
            self._state.learn_given_up(timing, self._timer.started_s)
        self._abandon_pending()

    def _abandon_pending(self) -> None:
        """Wait for nothing more; loads that have begun go on, and what they bring stays cached."""
        for load in self._pending.values():
            load.waiting.remove(self)
            self._state.withdraw(load)
        self._pending.clear()
