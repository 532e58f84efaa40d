"""The directory's contract: who owns each artifact of a fleet, and how to read it.

A worker registers and gets an *epoch*, kept alive by one lease: its heartbeat. Ownership
records name the epoch, so a renewal costs the same for one artifact and for a million. An
owner is authoritative while its lease lasts; when it has ended anyone who has the bytes may
take over, and gets a greater *fencing token* than anyone before.

Every method that changes something takes the caller's epoch and raises `StaleEpochError`,
having changed nothing, once that epoch may change nothing any more. An epoch that has ended
never lives again. Every method may be repeated when its answer was lost: the second call
finds what the first has done. Methods take many items, and are one round trip.

Time is the directory's own clock. A worker trusts only its own monotonic clock, by
`held_lease.HeldLease`; `docs/directory.md` has the assumptions. Thread-safe. A remote
directory raises `DirectoryUnavailableError` no later than its deadline.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey
from hetero_connector.spec.state_types import StateType
from ownership.directory.generations import GenerationDirectory
from ownership.directory.identifiers import Epoch, Token
from ownership.directory.sessions import SessionDirectory

CHECKSUM_BYTES = 16


@dataclass(frozen=True)
class DirectoryLimits:
    """What a directory holds at most, and how long it keeps what nobody renews."""

    max_artifacts: int = 4_000_000
    """Artifacts with a record; further claims are answered `FULL`."""
    max_replicas: int = 8
    """Live replicas of one artifact; further ones are answered `FULL`."""
    max_users: int = 1_024
    """Readers of one chunk; further ones are not counted."""
    max_workers: int = 4_096
    """Epochs remembered; of ended ones the oldest are forgotten first."""
    max_sessions: int = 100_000
    """The session not used for longest is forgotten first."""
    max_groups: int = 10_000
    """The coldest group is forgotten first."""
    orphan_ttl_s: float = 3_600.0
    """How long the records of an ended owner are kept for whoever may take over; not at all where
    the directory is full."""
    session_ttl_s: float = 86_400.0
    """A session not used for this long is forgotten."""
    group_half_life_s: float = 600.0
    """A use of a group counts half after this long."""


@dataclass(frozen=True)
class Worker:
    """What a worker tells the fleet about itself. Never changes within an epoch."""

    name: str
    """Unique in the fleet: registering a name again retires its earlier epoch. At most 256
    bytes of UTF-8, not empty."""
    peer: bytes = b""
    """How to read from it (transfer agent's metadata and regions), opaque here. At most 1 MiB."""
    storage: str = ""
    """Names its SSD directory where others can open it too; "" if they cannot. At most 1,024
    bytes."""


@dataclass(frozen=True)
class Lease:
    """A registration. Live until `lease_s` after the last renewal that the directory saw."""

    worker: str
    epoch: Epoch
    lease_s: float
    memory: str = field(default="", compare=False)
    """Names the memory that the directory's records were in, see `renew_lease`."""


class EpochStatus(StrEnum):
    """What an epoch may do."""

    LIVE = "live"
    """Owns what the records say; may claim."""
    RETIRED = "retired"
    """Its worker registered again: it may change nothing and is not read from, but what it
    owned stays its own until its lease would have ended, for it may not know yet."""
    ENDED = "ended"
    """Whoever has the bytes may take over."""


class WorkerState(NamedTuple):
    """A worker of an epoch that records name."""

    name: str
    storage: str
    status: EpochStatus


class Copy(NamedTuple):
    """One worker's copy of an artifact: what bytes, and where.

    The checksum belongs to the copy: bytes that two workers computed may differ in the
    last digit.
    """

    size_bytes: int
    checksum: bytes
    """xxh3-128 seeded with the artifact's id, `CHECKSUM_BYTES` long."""
    dram_offset: int = -1
    """Byte offset in the worker's DRAM arena; -1 when it is on SSD only."""
    generation: int = 0
    """Of the DRAM slot: another one means that the slot holds something else by now."""
    on_ssd: bool = False
    """Whether the worker's SSD directory holds it too."""


class Claim(NamedTuple):
    """An artifact that the caller has."""

    artifact: ArtifactId
    copy: Copy
    parent: ChunkKey = ROOT
    """The chunk before the artifact's, if that is known: records of a chain are kept together,
    so that `lookup` is fast. Says nothing about ownership."""


class GrantOutcome(StrEnum):
    """What became of one artifact's claim, promotion or replica."""

    OWNED = "owned"
    """The caller is the owner, newly or as before."""
    FOREIGN = "foreign"
    """Another epoch owns it and its lease lasts."""
    REPLICA = "replica"
    """The caller's replica is listed."""
    ABSENT = "absent"
    """There is no record, or no replica of the caller's that could be promoted."""
    FULL = "full"
    """The directory holds as many as it may: unlisted."""


class Grant(NamedTuple):
    """The answer to one claim, promotion or replica."""

    outcome: GrantOutcome
    owner: Epoch
    """Who owns it after the call; `NO_EPOCH` if no one."""
    token: Token
    """The owner's, `NO_TOKEN` if there is none."""


class Replica(NamedTuple):
    """A transient copy of an artifact somebody else owns."""

    holder: Epoch
    copy: Copy
    expires_s: float
    """Directory time after which it is not listed any more."""


class ArtifactRecord(NamedTuple):
    """What the directory knows of one artifact."""

    owner: Epoch
    """`NO_EPOCH` after a release; then replicas may be left."""
    token: Token
    """Of the last owner."""
    copy: Copy
    """The owner's; without one, what it was."""
    replicas: tuple[Replica, ...] = ()


class ReadableCopy(NamedTuple):
    """A copy that may be read now: ask `fencing.Fence` with `token` before using the bytes."""

    holder: Epoch
    token: Token
    copy: Copy


ChunkRecords = Mapping[StateType, ArtifactRecord]


@dataclass(frozen=True)
class ChainView:
    """What the directory knows of a chain at one moment."""

    chunks: Sequence[ChunkRecords]
    """For each chunk asked for; empty where nothing is known. May decode when indexed."""
    workers: Mapping[Epoch, WorkerState]
    """Those the records name, at least; an epoch that is missing has ended."""
    now_s: float
    """Directory time of the answer."""

    def status(self, epoch: Epoch) -> EpochStatus:
        """What `epoch` may do."""
        state = self.workers.get(epoch)
        return EpochStatus.ENDED if state is None else state.status

    def copies(self, index: int, state_type: StateType) -> list[ReadableCopy]:
        """Copies of one artifact that may be read, the owner's first."""
        record = self.chunks[index].get(state_type)
        if record is None:
            return []
        found = [(record.owner, record.copy)]
        found += [(r.holder, r.copy) for r in record.replicas if r.expires_s > self.now_s]
        return [
            ReadableCopy(holder, record.token, copy)
            for holder, copy in found
            if self.status(holder) is EpochStatus.LIVE
        ]

    def adoptable(self, index: int, state_type: StateType) -> str:
        """The shared storage on which an ended owner left the artifact; "" if none."""
        record = self.chunks[index].get(state_type)
        if record is None or not record.copy.on_ssd:
            return ""
        state = self.workers.get(record.owner)
        if state is None or state.status is not EpochStatus.ENDED:
            return ""
        return state.storage


class Usage(NamedTuple):
    """Who reads a chunk, and when it was last used."""

    num_users: int
    """Readers whose worker's lease lasts. None left: the chain may be evicted from its end."""
    idle_s: float | None
    """Directory seconds since a reader came or went; None if that is not known."""


class OwnershipDirectory(Protocol):
    """Workers, their leases, and the artifacts they own."""

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        """A new epoch for the worker, live for `lease_s`; its earlier epochs are retired.

        `floor`: the greatest epoch or token the worker has ever seen. The new epoch and all
        later tokens are greater, also when the directory has lost its memory. Raises
        ValueError for a bad name or lease, and DirectoryError when `max_workers` live.
        """
        ...

    def renew_lease(self, epoch: Epoch) -> str:
        """Live for another `lease_s` from now. O(1) in artifacts. Raises StaleEpochError.

        Returns the name of the memory that the records are in. Once that is another one than at
        the last call, records may be lost, or be those of a moment ago: claim again what you have,
        and repeat the releases of the last lease.
        """
        ...

    def end_lease(self, epoch: Epoch) -> None:
        """The worker has stopped serving: what it owned is free at once. Idempotent."""
        ...

    def workers(self) -> Mapping[Epoch, Worker]:
        """All live workers, with what is needed to read from them."""
        ...

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        """Everything known about a chain's chunks, in one round trip. Changes nothing."""
        ...

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        """Own each artifact unless another epoch's ownership lasts: compare-and-set.

        The caller has the bytes: computed, restored, or adopted from an ended owner's SSD. A
        change of owner takes a new token. An artifact that is owned already keeps its token
        and takes the new copy: so a worker tells that bytes have moved. The same artifact twice
        in a call: as if in two calls. Raises StaleEpochError.
        """
        ...

    def release(self, epoch: Epoch, owned: Mapping[ArtifactId, Token]) -> None:
        """Give up ownership, or replicas (token `NO_TOKEN`). Live replicas may be promoted.

        Stop acting as the owner first. What the epoch does not own under that very token stays as
        it is, so that a late message does not undo a newer claim. When the answer is lost, repeat
        the call until it is answered before claiming again: the claim would find the old token,
        and the lost release could still arrive. Raises StaleEpochError.
        """
        ...

    def replicate_readonly(
        self, epoch: Epoch, copies: Sequence[Claim], ttl_s: float
    ) -> list[Grant]:
        """List transient replicas for `ttl_s`; again: refresh. Raises StaleEpochError.

        `ABSENT` where there is no record, `OWNED` where the caller is the owner (nothing
        changes), `FULL` where `max_replicas` others are listed.
        """
        ...

    def add_chain_user(self, epoch: Epoch, reader: str, chunks: Sequence[ChunkKey]) -> None:
        """`reader` (a session or request, at most 256 bytes) uses chains up to these chunks.

        Name the deepest chunk of each owner only: eviction eats leaves. Counted until
        `remove_chain_user` or the epoch's end. Raises StaleEpochError.
        """
        ...

    def remove_chain_user(
        self, epoch: Epoch, reader: str, chunks: Sequence[ChunkKey]
    ) -> list[ChunkKey]:
        """The reader is done; returns those chunks that nobody reads any more."""
        ...

    def usage(self, chunks: Sequence[ChunkKey]) -> list[Usage]:
        """Who reads each chunk now. Changes nothing."""
        ...

    def sweep(self, limit: int) -> int:
        """Forget what nobody can use any more; looks at about `limit` records.

        Called now and then by any worker. Records of an owner that ended `orphan_ttl_s` ago and
        that no live replica backs, expired replicas, readers of ended epochs. Returns how many
        artifacts' records went.
        """
        ...


class Directory(OwnershipDirectory, SessionDirectory, GenerationDirectory, Protocol):
    """Everything a fleet shares: workers, artifacts, sessions, hot groups, resets."""

    def close(self) -> None:
        """Let go of connections. Leases run out by themselves. Idempotent."""
        ...
