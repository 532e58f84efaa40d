"""The directory of one process: no network, and lost when the process ends.

It is the default of a single engine, and the reference that other directories are tested against.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.spec.state_types import StateType
from ownership.directory.contract import (
    ArtifactRecord,
    ChainView,
    ChunkRecords,
    Claim,
    DirectoryLimits,
    EpochStatus,
    Grant,
    GrantOutcome,
    Lease,
    Replica,
    Worker,
)
from ownership.directory.generations import FleetGeneration
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch, Token
from ownership.directory.lease_table import ForwardClock, LeaseTable
from ownership.directory.memory_chain_users import MemoryChainUsers
from ownership.directory.validation import (
    check_claims,
    check_lease,
    check_name,
    check_ttl,
    check_worker,
)

_ABSENT = Grant(GrantOutcome.ABSENT, NO_EPOCH, NO_TOKEN)
_FULL = Grant(GrantOutcome.FULL, NO_EPOCH, NO_TOKEN)
_NOTHING: ChunkRecords = {}


class MemoryDirectory:
    """A `Directory` in the memory of this process. Its one lock is never held while waiting."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        limits: DirectoryLimits | None = None,
    ) -> None:
        """`clock`: seconds. It may jump, see `lease_table.ForwardClock`."""
        self._clock = ForwardClock(clock)
        self._limits = limits or DirectoryLimits()
        self._lock = threading.RLock()
        self._sequence = 0
        """The last epoch or token handed out. One counter serves all artifacts, so a token is not
        reused for an artifact whose record was forgotten in between."""
        self._leases = LeaseTable(self._limits.max_workers)
        self._chunks: OrderedDict[ChunkKey, dict[StateType, ArtifactRecord]] = OrderedDict()
        self._num_artifacts = 0
        self._chain_users = MemoryChainUsers(self._limits.max_users)

    def register(self, worker: Worker, lease_s: float, floor: int = 0) -> Lease:
        check_worker(worker)
        check_lease(lease_s)
        with self._lock:
            self._sequence = max(self._sequence, floor) + 1
            lease = Lease(worker.name, Epoch(self._sequence), lease_s)
            self._leases.add(worker, lease, self._clock())
            return lease

    def renew_lease(self, epoch: Epoch) -> str:
        # One name is enough: a process forgets everything or nothing.
        with self._lock:
            self._leases.renew(epoch, self._clock())
            return ""

    def end_lease(self, epoch: Epoch) -> None:
        with self._lock:
            self._leases.end(epoch, self._clock())

    def workers(self) -> Mapping[Epoch, Worker]:
        with self._lock:
            return dict(self._leases.live(self._clock()))

    def lookup(self, chain: Sequence[ChunkKey]) -> ChainView:
        with self._lock:
            now_s = self._clock()
            chunks = [dict(self._chunks.get(key, _NOTHING)) for key in chain]
            return ChainView(chunks, self._leases.states(now_s), now_s)

    def claim_owner(self, epoch: Epoch, claims: Sequence[Claim]) -> list[Grant]:
        check_claims(claims)
        with self._lock:
            now_s = self._now_if_live(epoch)
            return [self._claim(epoch, claim, now_s) for claim in claims]

    def _claim(self, epoch: Epoch, claim: Claim, now_s: float) -> Grant:
        key, state_type = claim.artifact
        record = self._chunks.get(key, _NOTHING).get(state_type)
        if record is None:
            if self._num_artifacts >= self._limits.max_artifacts:
                return _FULL
            self._num_artifacts += 1
            made = ArtifactRecord(epoch, self._next_token(), claim.copy)
            self._chunks.setdefault(key, {})[state_type] = made
            return Grant(GrantOutcome.OWNED, epoch, made.token)
        if self._is_foreign(record, epoch, now_s):
            return Grant(GrantOutcome.FOREIGN, record.owner, record.token)
        return self._take(epoch, claim, record)

    def _take(self, epoch: Epoch, claim: Claim, record: ArtifactRecord) -> Grant:
        """Make `epoch` the owner, under a new token unless it is the owner already."""
        token = record.token if record.owner == epoch else self._next_token()
        others = tuple(r for r in record.replicas if r.holder != epoch)
        key, state_type = claim.artifact
        self._chunks[key][state_type] = ArtifactRecord(epoch, token, claim.copy, others)
        return Grant(GrantOutcome.OWNED, epoch, token)

    def release(self, epoch: Epoch, owned: Mapping[ArtifactId, Token]) -> None:
        with self._lock:
            now_s = self._now_if_live(epoch)
            for artifact, token in owned.items():
                self._release(epoch, artifact, token, now_s)

    def _release(self, epoch: Epoch, artifact: ArtifactId, token: Token, now_s: float) -> None:
        record = self._chunks.get(artifact.chunk, _NOTHING).get(artifact.state_type)
        if record is None:
            return
        owner, replicas = record.owner, record.replicas
        if token == NO_TOKEN:
            replicas = tuple(r for r in replicas if r.holder != epoch)
        elif (owner, record.token) == (epoch, token):
            owner = NO_EPOCH
        self._put(artifact, record._replace(owner=owner, replicas=replicas), now_s)

    def replicate_readonly(
        self, epoch: Epoch, copies: Sequence[Claim], ttl_s: float
    ) -> list[Grant]:
        check_claims(copies)
        check_ttl(ttl_s)
        with self._lock:
            now_s = self._now_if_live(epoch)
            return [self._replicate(epoch, claim, ttl_s, now_s) for claim in copies]

    def _replicate(self, epoch: Epoch, claim: Claim, ttl_s: float, now_s: float) -> Grant:
        key, state_type = claim.artifact
        record = self._chunks.get(key, _NOTHING).get(state_type)
        if record is None:
            return _ABSENT
        if record.owner == epoch:
            return Grant(GrantOutcome.OWNED, epoch, record.token)
        others = tuple(r for r in self._listed(record, now_s) if r.holder != epoch)
        is_full = len(others) >= self._limits.max_replicas
        listed = others if is_full else (*others, Replica(epoch, claim.copy, now_s + ttl_s))
        self._put(claim.artifact, record._replace(replicas=listed), now_s)
        outcome = GrantOutcome.FULL if is_full else GrantOutcome.REPLICA
        return Grant(outcome, record.owner, record.token)

    def add_chain_user(self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]) -> None:
        check_name("user", user)
        with self._lock:
            self._now_if_live(epoch)
            self._chain_users.add(epoch, user, chunks)

    def remove_chain_user(
        self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]
    ) -> list[ChunkKey]:
        with self._lock:
            self._now_if_live(epoch)
            return self._chain_users.remove(epoch, user, chunks, self._is_live)

    def count_users(self, chunks: Sequence[ChunkKey]) -> list[int]:
        with self._lock:
            return [self._chain_users.count(chunk, self._is_live) for chunk in chunks]

    def reset_generation(self) -> int:
        with self._lock:
            return self._leases.reset_generation()

    def report_generation(self, epoch: Epoch, adopted: int, floor: int) -> int:
        with self._lock:
            self._now_if_live(epoch)
            return self._leases.report_generation(epoch, adopted, floor)

    def generation(self) -> FleetGeneration:
        with self._lock:
            return self._leases.generation(self._clock())

    def eviction_policy(self) -> str:
        return ""

    def sweep(self, limit: int) -> int:
        with self._lock:
            now_s = self._clock()
            oldest_s = now_s - self._limits.orphan_ttl_s
            before = self._num_artifacts
            is_full = before >= self._limits.max_artifacts  # a full directory keeps no orphans
            oldest_orphan_s = now_s if is_full else oldest_s
            for _ in range(min(limit, len(self._chunks))):
                key = next(iter(self._chunks))
                self._chunks.move_to_end(key)
                self._sweep_chunk(key, now_s, oldest_orphan_s)
            self._leases.forget_before(oldest_s)
            self._chain_users.sweep(self._is_live)
            return before - self._num_artifacts

    def _sweep_chunk(self, key: ChunkKey, now_s: float, oldest_s: float) -> None:
        for state_type, record in list(self._chunks[key].items()):
            listed = self._listed(record, now_s)
            if not listed and self._leases.has_ended_before(record.owner, oldest_s):
                record = record._replace(owner=NO_EPOCH)
            self._put(ArtifactId(key, state_type), record._replace(replicas=listed), now_s)

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def check_integrity(self) -> None:
        """Raise AssertionError if any redundant field disagrees with the records."""
        with self._lock:
            assert all(self._chunks.values()), "a chunk without records"
            assert self._num_artifacts == sum(map(len, self._chunks.values()))
            for records in self._chunks.values():
                for record in records.values():
                    holders = [r.holder for r in record.replicas]
                    assert len(set(holders)) == len(holders)
                    assert record.owner not in holders
                    assert record.token <= self._sequence

    def _now_if_live(self, epoch: Epoch) -> float:
        """Return the time. Raises StaleEpochError unless the epoch is live."""
        now_s = self._clock()
        self._leases.require_live(epoch, now_s)
        return now_s

    def _next_token(self) -> Token:
        self._sequence += 1
        return Token(self._sequence)

    def _is_live(self, epoch: Epoch) -> bool:
        return self._leases.status(epoch, self._clock()) is EpochStatus.LIVE

    def _is_foreign(self, record: ArtifactRecord, epoch: Epoch, now_s: float) -> bool:
        """Return True if another epoch owns the artifact and its lease lasts."""
        owner = record.owner
        if owner in (NO_EPOCH, epoch):
            return False
        return self._leases.status(owner, now_s) is not EpochStatus.ENDED

    def _listed(self, record: ArtifactRecord, now_s: float) -> tuple[Replica, ...]:
        """Return the replicas that have not expired and whose holder has not ended."""
        return tuple(
            r
            for r in record.replicas
            if r.expires_s > now_s and self._leases.status(r.holder, now_s) is not EpochStatus.ENDED
        )

    def _put(self, artifact: ArtifactId, record: ArtifactRecord, now_s: float) -> None:
        """Keep the record, or forget it if it names neither an owner nor a replica."""
        records = self._chunks[artifact.chunk]
        if record.owner != NO_EPOCH or self._listed(record, now_s):
            records[artifact.state_type] = record
            return
        del records[artifact.state_type]
        self._num_artifacts -= 1
        if not records:
            del self._chunks[artifact.chunk]
