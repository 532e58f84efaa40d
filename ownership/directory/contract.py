"""The directory's contract: who owns each artifact of a fleet, and how to read it.

A worker registers and gets an *epoch*, which one *lease* keeps alive. Ownership records name the
epoch, so renewing the lease costs the same for one artifact and for a million. An owner is
authoritative while its lease lasts. After that any worker that has the bytes may take over, and
gets a greater *fencing token* than every owner before it.

Rules for every method:

- A method that changes something takes the caller's epoch. It raises StaleEpochError, and changes
  nothing, once that epoch may not act any more: RetiredEpochError if its worker has registered
  again. An epoch that has ended never lives again.
- A call whose answer was lost may be repeated: the second call finds what the first has done.
- A method takes many items and is one round trip.
- Time is the directory's own clock. A worker trusts only its own monotonic clock
  (`member.held_lease`); `docs/internals/directory.md` has the assumptions.
- Methods are thread-safe. A remote directory that does not answer raises
  DirectoryUnavailableError. Its deadline bounds each wait for bytes of the server, but not the
  whole call: `redis.connection` says what may take longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.errors import StaleEpochError
from hetero_connector.spec.state_types import StateType
from ownership.directory.generations import GenerationDirectory
from ownership.directory.identifiers import Epoch, Token

CHECKSUM_BYTES = 16
DEFAULT_DEADLINE_S = 1.0
"""Deadline of one call, as the directory understands it."""


@dataclass(frozen=True)
class DirectoryLimits:
    """Bounds of a directory, and how long it keeps records that are not renewed."""

    max_artifacts: int = 4_000_000
    """Artifacts with a record; further claims are answered `FULL`."""
    max_replicas: int = 8
    """Live replicas of one artifact; further ones are answered `FULL`."""
    max_users: int = 1_024
    """Users of one chunk; further ones are not counted."""
    max_workers: int = 4_096
    """Epochs remembered. The oldest ended ones are forgotten first."""
    orphan_ttl_s: float = 3_600.0
    """Seconds for which the records of an ended owner are kept for a successor. A full directory
    does not keep them."""


@dataclass(frozen=True)
class Worker:
    """A worker as it describes itself to the fleet. It never changes within an epoch."""

    name: str
    """Unique in the fleet: registering a name again retires its earlier epoch. 1 to 256 bytes of
    UTF-8."""
    peer: bytes = b""
    """Its card: the transfer agent's metadata and regions, with which others read from it. Opaque
    here. At most 1 MiB."""
    storage: str = ""
    """Its SSD directory, if other workers can open it; else "". At most 1,024 bytes."""


@dataclass(frozen=True)
class Lease:
    """A registration. It is live until `lease_s` after the last renewal the directory saw."""

    worker: str
    epoch: Epoch
    lease_s: float
    memory: str = field(default="", compare=False)
    """Name of the memory that holds the directory's records, see `renew_lease`."""


class EpochStatus(StrEnum):
    """May an epoch act."""

    LIVE = "live"
    """It owns what the records say, and may claim."""
    RETIRED = "retired"
    """Its worker has registered again. It may change nothing and is not read from. It may not know
    that yet, so its artifacts stay its own until its lease would have ended."""
    ENDED = "ended"
    """Any worker that has the bytes may take over."""


class RetiredEpochError(StaleEpochError):
    """The epoch may not act any more, because its worker's name has been registered again."""


class WorkerState(NamedTuple):
    """The worker of an epoch that records name."""

    name: str
    storage: str
    status: EpochStatus


class Copy(NamedTuple):
    """One worker's copy of an artifact.

    The checksum belongs to the copy: bytes that two workers computed may differ in the last digit.
    """

    size_bytes: int
    checksum: bytes
    """xxh3-128 seeded with the artifact's id, `CHECKSUM_BYTES` long."""
    dram_offset: int = -1
    """Byte offset in the worker's DRAM arena; -1 if the copy is only on SSD."""
    generation: int = 0
    """Generation of the DRAM slot. If the slot has another one by now, it has other contents."""
    on_ssd: bool = False
    """True if it is in the worker's SSD directory, too."""


class Claim(NamedTuple):
    """An artifact that the caller has."""

    artifact: ArtifactId
    copy: Copy
    parent: ChunkKey = ROOT
    """The chunk before the artifact's, if known: the records of a chain are then stored together,
    which makes `lookup` fast. It says nothing about ownership."""


class GrantOutcome(StrEnum):
    """The result of claiming or replicating one artifact."""

    OWNED = "owned"
    """The caller is the owner, newly or as before."""
    FOREIGN = "foreign"
    """Another epoch owns it and its lease lasts."""
    REPLICA = "replica"
    """The caller's replica is listed."""
    ABSENT = "absent"
    """There is no record."""
    FULL = "full"
    """The directory, or its server's memory, is full. What is listed stays as it is, even if it is
    the caller's own; anything else is not listed."""


class Grant(NamedTuple):
    """The answer to one claim or replica."""

    outcome: GrantOutcome
    owner: Epoch
    """The owner after the call; `NO_EPOCH` if there is none."""
    token: Token
    """The owner's token; `NO_TOKEN` if there is no owner."""


class Replica(NamedTuple):
    """A transient copy at a worker that does not own the artifact."""

    holder: Epoch
    copy: Copy
    expires_s: float
    """Directory time after which it is no longer listed."""


class ArtifactRecord(NamedTuple):
    """The directory's record of one artifact."""

    owner: Epoch
    """`NO_EPOCH` after a release; replicas may remain then."""
    token: Token
    """The last owner's."""
    copy: Copy
    """The last owner's."""
    replicas: tuple[Replica, ...] = ()


class ReadableCopy(NamedTuple):
    """A copy that may be read now. Ask `member.fencing.Fence` before its bytes are used."""

    holder: Epoch
    token: Token
    copy: Copy


ChunkRecords = Mapping[StateType, ArtifactRecord]


@dataclass(frozen=True)
class ChainView:
    """The records of a chain at one moment."""

    chunks: Sequence[ChunkRecords]
    """For each chunk asked for; empty where there is no record. May decode when indexed."""
    workers: Mapping[Epoch, WorkerState]
    """All that the directory remembers, also those that the records do not name. An epoch that is
    missing has ended."""
    now_s: float
    """Directory time of the answer."""

    def status(self, epoch: Epoch) -> EpochStatus:
        """Return whether `epoch` may act."""
        state = self.workers.get(epoch)
        return EpochStatus.ENDED if state is None else state.status

    def copies_in(self, record: ArtifactRecord) -> list[ReadableCopy]:
        """Return the copies that a record names and that may be read, the owner's first."""
        found = []
        if self.status(record.owner) is EpochStatus.LIVE:
            found.append(ReadableCopy(record.owner, record.token, record.copy))
        for replica in record.replicas:
            if replica.expires_s > self.now_s and self.status(replica.holder) is EpochStatus.LIVE:
                found.append(ReadableCopy(replica.holder, record.token, replica.copy))
        return found

    def adoptable_in(self, record: ArtifactRecord) -> str:
        """Return the shared storage on which the record's owner left it; "" if that has not ended,
        or left it on none.
        """
        if not record.copy.on_ssd:
            return ""
        state = self.workers.get(record.owner)
        if state is None or state.status is not EpochStatus.ENDED:
            return ""
        return state.storage


class OwnershipDirectory(Protocol):
    """Workers, their leases, and the artifacts they own."""

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        """Return a new epoch for the worker, live for `lease_s`; its earlier epochs are retired.

        `floor`: the greatest epoch or token that the worker remembers. The new epoch and all
        later tokens are greater, also when the directory has lost its memory. Raises
        ValueError for a bad name or lease, and DirectoryError when `max_workers` are live.
        """
        ...

    def renew_lease(self, epoch: Epoch) -> str:
        """Extend the lease to `lease_s` from now; return the name of the directory's memory.

        Costs the same for any number of artifacts. If the name differs from that of the last call,
        records may be lost or be some moments old: the worker has to claim again what it has, and
        to repeat the releases of the last lease. Raises StaleEpochError.
        """
        ...

    def end_lease(self, epoch: Epoch) -> None:
        """End the epoch now: the worker has stopped serving, its artifacts are free. Idempotent."""
        ...

    def workers(self) -> Mapping[Epoch, Worker]:
        """Return all live workers, with what is needed to read from them."""
        ...

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        """Return the records of a chain's chunks, in one round trip. Changes nothing."""
        ...

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        """Become the owner of each artifact unless another epoch owns it: compare-and-set.

        The caller has the bytes: computed, restored, or adopted from an ended owner's SSD. A
        change of owner takes a new token. An artifact that the caller owns already keeps its token
        and takes the new copy: so a worker reports that bytes have moved. The same artifact twice
        in one call counts as two calls. Raises StaleEpochError.
        """
        ...

    def release(self, epoch: Epoch, owned: Mapping[ArtifactId, Token]) -> None:
        """Give up ownership, or replicas (token `NO_TOKEN`). A replica's holder may then claim.

        Stop acting as the owner first. An artifact that the epoch does not own under exactly that
        token stays as it is, so a late message cannot undo a newer claim. If the answer is lost,
        repeat the call until it is answered before claiming the artifact again: the claim would
        find the old token, and the lost release could still arrive. Raises StaleEpochError.
        """
        ...

    def replicate_readonly(
        self, epoch: Epoch, copies: Sequence[Claim], ttl_s: float
    ) -> list[Grant]:
        """List transient replicas for `ttl_s`; a repeated call refreshes them.

        Answers `ABSENT` if there is no record, `OWNED` if the caller is the owner (nothing
        changes), `FULL` if `max_replicas` others are listed. Raises StaleEpochError.
        """
        ...

    def add_chain_user(self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]) -> None:
        """Count `user` (a session or request, at most 256 bytes) as using these chains.

        Name only the deepest chunk of each owner, because eviction starts at a chain's end. The
        user counts until `remove_chain_user` or the end of the epoch. Raises StaleEpochError.
        """
        ...

    def remove_chain_user(
        self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]
    ) -> list[ChunkKey]:
        """Stop counting the user; return those chunks that have no user any more.

        Raises StaleEpochError.
        """
        ...

    def count_users(self, chunks: Sequence[ChunkKey]) -> list[int]:
        """Return the number of users of each chunk whose worker's lease lasts. Changes nothing.

        A chain that none uses may be evicted from its end.
        """
        ...

    def eviction_policy(self) -> str:
        """Return the policy by which its server may delete records; "" if it deletes none."""
        ...

    def sweep(self, limit: int) -> int:
        """Forget records without a use; look at about `limit` of them.

        Any worker calls it from time to time. It forgets records of an owner that ended
        `orphan_ttl_s` ago unless a live replica backs them, expired replicas, and users of ended
        epochs. Returns the number of artifacts whose records it forgot.
        """
        ...


class Directory(OwnershipDirectory, GenerationDirectory, Protocol):
    """Everything a fleet shares: workers, artifacts, chain users, resets."""

    def close(self) -> None:
        """Close connections. Leases run out by themselves. Idempotent."""
        ...
