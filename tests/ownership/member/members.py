"""Members over a store that is a list, and over a directory that can fail."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from hetero_connector.artifacts.copies import ExportChange, ExportedCopy
from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import GAUGES, Recorder
from hetero_connector.spec.state_types import StateType
from ownership.directory import (
    ArtifactRecord,
    Claim,
    Copy,
    Directory,
    DirectoryLimits,
    Grant,
    Lease,
    Worker,
)
from ownership.directory.identifiers import NO_EPOCH, Epoch, Token
from ownership.directory.memory import MemoryDirectory
from ownership.member.fleet_worker import FleetWorker, MemberTimes

KV = StateType.DENSE_KV


TTL_S = 0.3
LOOKUP_S = 60.0
"""A busy machine answers late."""


def change(number: int, offset: int | None = 0) -> ExportChange:
    """Return a change: the artifact is at `offset`, or it has left (None)."""
    key = ChunkKey(number.to_bytes(16, "big"))
    copy = None if offset is None else ExportedCopy(offset, 1, 64, bytes(16))
    return ExportChange(ChunkRange(key, ROOT, 0, 64), KV, copy)


class ListedStore:
    """A `SharedStore` whose artifacts the test sets."""

    card = b"card"
    storage = ""

    def __init__(self) -> None:
        self.here: dict[ArtifactId, ExportChange] = {}
        self.tokens: dict[ArtifactId, int] = {}
        self.replicas: set[ArtifactId] = set()
        self.epochs: list[int] = []
        self.readers: dict[str, tuple[ChunkKey, ...]] = {}
        self.soon: list[ChunkKey] = []
        self.elsewhere: dict[ChunkKey, bool] = {}
        self.has_lost = False
        self._changes: list[ExportChange] = []
        self.generation = FIRST

    @property
    def adopted(self) -> int:
        return self.generation.adopted

    def note_fleet_generation(self, number: int, asked_in: Generation) -> None:
        if asked_in is self.generation:
            self.generation = asked_in.with_fleet(number)

    def put(self, *changes: ExportChange) -> None:
        for made in changes:
            self.here[made.id] = made
            self._changes.append(made)

    def drop(self, number: int) -> None:
        gone = change(number, None)
        del self.here[gone.id]
        token = self.tokens.pop(gone.id, 0)
        self._changes.append(ExportChange(gone.chunk, KV, None, token))

    def may_adopt_from(self, storage: str) -> bool:
        return storage != self.storage

    def serve_under(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def take_exports(self) -> list[ExportChange]:
        taken, self._changes = self._changes, []
        return taken

    def take_export_loss(self) -> bool:
        has_lost, self.has_lost = self.has_lost, False
        return has_lost

    def inventory(self) -> Iterator[list[ExportChange]]:
        yield [replace(made, token=self.tokens.get(a, 0)) for a, made in self.here.items()]

    def take_changed_users(self) -> dict[str, tuple[ChunkKey, ...]]:
        taken, self.readers = self.readers, {}
        return taken

    def next_victims(self, count: int) -> list[ChunkKey]:
        return self.soon[:count]

    def set_foreign_users(self, has_users: Mapping[ChunkKey, bool], for_s: float) -> None:
        self.elsewhere.update(has_users)

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], foreign: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        gone = [a for a in (*owned, *foreign) if a not in self.here]
        for artifact, token in owned.items():
            self.tokens[artifact] = token
            self.replicas.discard(artifact)
        self.replicas.update(foreign)
        return gone

    def find_gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        return [a for a in artifacts if a not in self.here]


class BreakableDirectory(MemoryDirectory):
    """Unavailable on demand."""

    def __init__(self, limits: DirectoryLimits | None = None) -> None:
        super().__init__(limits=limits)
        self.gone = False
        self.claimed: set[ArtifactId] = set()
        self.calls: list[str] = []
        """Answered calls that change artifacts."""

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        self._check()
        return super().register(worker, lease_s, floor)

    def renew_lease(self, epoch: Epoch) -> str:
        self._check()
        return super().renew_lease(epoch)

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        self._check()
        self.calls.append("claim")
        self.claimed.update(claim.artifact for claim in claims)
        return super().claim_owner(epoch, claims)

    def release(self, epoch: Epoch, owned: Mapping[ArtifactId, Token]) -> None:
        self._check()
        self.calls.append("release")
        super().release(epoch, owned)

    def _check(self) -> None:
        if self.gone:
            raise DirectoryUnavailableError("it is gone")


class RunningWorker:
    """A running worker over a `ListedStore`."""

    def __init__(self, directory: MemoryDirectory, lease_s: float = 5.0) -> None:
        self.store = ListedStore()
        self.recorder = Recorder()
        times = MemberTimes(lease_s, call_s=0.1, lookup_s=LOOKUP_S, listing_ttl_s=TTL_S)
        self.worker = FleetWorker(directory, "ann", times, self.recorder)
        self.worker.start(self.store)

    def put(self, *changes: ExportChange) -> None:
        self.store.put(*changes)
        self.worker.wake()

    def replicas(self, **gauges: float) -> bool:
        """Return True if the gauges were set to these values since the last call."""
        set_now = (self.recorder.drain() or {}).get(GAUGES, {})
        return set_now.items() >= {f"heterocache_{k}{{}}": v for k, v in gauges.items()}.items()

    def drop(self, number: int) -> None:
        self.store.drop(number)
        self.worker.wake()


def record_of(directory: Directory, number: int) -> ArtifactRecord | None:
    artifact = change(number).id
    return directory.lookup([artifact.chunk]).chunks[0].get(KV)


def is_free(directory: MemoryDirectory, number: int) -> bool:
    held = record_of(directory, number)
    return held is None or held.owner == NO_EPOCH


def owned_by_bob(directory: Directory, *numbers: int) -> Epoch:
    epoch = directory.register(Worker("bob", b"bob's card"), 60.0).epoch
    copy = Copy(64, bytes(16), 0, 1)
    directory.claim_owner(epoch, [Claim(change(number).id, copy) for number in numbers])
    return epoch
