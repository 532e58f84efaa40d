"""The handle of artifacts being brought into DRAM and pinned there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hetero_connector.artifacts.index import Artifact
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.state import Load, StoreState


class _Absent:
    """Stands in for the node and for the artifact that the index does not have."""

    artifacts: ClassVar[dict[StateType, Artifact]] = {}
    dram_offset = -1
    sealed = False
    pins = 0


class ArtifactRestore:
    """Implements `base.Restore` over a `StoreState`. Used by the scheduler's thread."""

    def __init__(self, state: StoreState, wanted: Sequence[Wanted]) -> None:
        """Needs the lock. Pins what is in DRAM first, so that no slot for a read evicts it."""
        self._state = state
        self._wanted = wanted
        self._columns: list[list[int]] = [[] for _ in wanted]
        self._places: dict[ArtifactId, list[tuple[int, int]]] = {}
        """Where in the columns an artifact that was not in DRAM belongs."""
        self._failed: dict[ArtifactId, Failure] = {}
        self._pinned: list[Artifact] = []
        self._pending: dict[ArtifactId, Load] = {}
        self._deadline_s = state.clock() + state.config.load_deadline_s
        self._released = False
        rest = self._pin_dram()
        self._num_dram_hits = len(self._pinned)
        for position, column in sorted(rest):  # in chain order
            kind, keys = wanted[column]
            self._load(ArtifactId(keys[position], kind), (column, position))
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
            ArtifactId(key, kind): at
            for (kind, keys), column in zip(self._wanted, self._columns, strict=True)
            for key, at in zip(keys, column, strict=True)
            if at >= 0
        }

    @property
    def failed(self) -> Mapping[ArtifactId, Failure]:
        """Artifacts that did not arrive, and why. Final once `done`."""
        return self._failed

    def release(self) -> None:
        """Drop the pins and mark the artifacts as used. Idempotent."""
        state = self._state
        with state.lock:
            if self._released:
                return
            self._released = True
            self._abandon_pending()
            self._count_dram_hits()
            now = state.tiers.tick()
            unpin = state.tiers.unpin
            for artifact in self._pinned:
                artifact.last_used = now
                artifact.uses += 1
                unpin(artifact)
            if state.config.ssd_dir is not None:
                state.used.append(self._pinned)
            self._pinned = []

    def arrived(self, artifact: Artifact, failure: Failure | None) -> None:
        """Called with the lock held when a load this restore waits for has ended."""
        artifact_id = artifact.id
        del self._pending[artifact_id]
        if failure is None:
            self._pin(artifact_id, artifact)
        else:
            self._failed[artifact_id] = failure

    def _pin_dram(self) -> list[tuple[int, int]]:
        """Pin what can be used as it lies in DRAM; returns (position, column) of the rest."""
        state = self._state
        nodes, pin = state.tiers.index.nodes, self._pinned.append
        none: Any = _Absent
        check_all = state.config.verify == "all"
        rest = []
        for keys, columns in self._by_keys():
            for position, key in enumerate(keys):
                artifacts = nodes.get(key, none).artifacts
                for column, kind, offsets in columns:
                    artifact = artifacts.get(kind, none)
                    offset = artifact.dram_offset  # -1 where it is not in DRAM
                    if offset < 0 or check_all or not artifact.sealed:
                        rest.append((position, column))
                        offset = -1
                    else:
                        artifact.pins += 1
                        pin(artifact)
                    offsets.append(offset)
        return rest

    def _by_keys(self) -> list[tuple[Sequence[ChunkKey], list[tuple[int, StateType, list[int]]]]]:
        """Columns over one and the same list of keys together: a node is looked up once."""
        shared: dict[int, tuple[Sequence[ChunkKey], list[tuple[int, StateType, list[int]]]]] = {}
        for column, (kind, keys) in enumerate(self._wanted):
            entry = (column, kind, self._columns[column])
            shared.setdefault(id(keys), (keys, []))[1].append(entry)
        return list(shared.values())

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
        load = state.loading[artifact] = Load(artifact, target)
        state.loads.append(load)
        return load

    def _count_dram_hits(self) -> None:
        read: dict[StateType, int] = {}
        for artifact in self._pinned[: self._num_dram_hits]:
            kind = artifact.state_type
            read[kind] = read.get(kind, 0) + artifact.size_bytes
        for kind, size_bytes in read.items():
            self._state.count_read(Tier.DRAM, kind, size_bytes)

    def _pin(self, artifact_id: ArtifactId, artifact: Artifact) -> None:
        artifact.pins += 1
        self._pinned.append(artifact)
        for column, position in self._places[artifact_id]:
            self._columns[column][position] = artifact.dram_offset

    def _abandon_pending(self) -> None:
        """Wait for nothing more; the loads go on, and what they bring stays cached."""
        for load in self._pending.values():
            load.waiting.remove(self)
        self._pending.clear()
