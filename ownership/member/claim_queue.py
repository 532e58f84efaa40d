"""Keeps the directory's records of one worker's artifacts in step with its store.

Every artifact that the store reports is claimed. An artifact that another worker owns is listed as
a replica for a time. Its claim is repeated before that time ends: the answer either renews the
listing or, if the owner has released the artifact, makes this worker the owner. Claims for which
the directory was full are repeated with them. An artifact that leaves the store is released.

`record_audit` finds records that were lost, and changes that were never sent.

Only the directory's thread calls it.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from itertools import islice

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.containers import BoundedDict
from hetero_connector.metrics import Recorder
from ownership.directory import Claim, Copy, Directory, Grant, GrantOutcome
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token
from ownership.member.directory_thread import CLAIMS_PER_CALL, ClaimBatches, DirectoryThread
from ownership.member.record_audit import Known, RecordAudit
from ownership.member.shared_store import SharedStore

LISTING_TTL_S = 60.0
_SEND_DEADLINE_S = 5.0
_PAUSE_S = 0.5
"""Pause after releases or replicas that could not be sent."""
_RECLAIM_LEASES = 1.5
"""Replicas' records are checked this often, so what an owner releases is owned again within two
leases."""
_REPEATED_LEASES = 2
"""Releases that were answered so long before records were lost are repeated. A directory that went
back by more than a lease knows no live epoch of this worker."""
_MAX_REMEMBERED = 65_536


class ClaimQueue:
    """Claims, replicas and releases of one worker."""

    def __init__(
        self,
        store: SharedStore,
        thread: DirectoryThread,
        recorder: Recorder,
        listing_ttl_s: float = LISTING_TTL_S,
        clock: Callable[[], float] = time.monotonic,
        lease_s: float = math.inf,
    ) -> None:
        """`listing_ttl_s`: how long a replica is listed. `lease_s`: the worker's lease."""
        self._store = store
        self._thread = thread
        self._recorder = recorder
        self._ttl_s = listing_ttl_s
        self._reclaim_every_s = min(_RECLAIM_LEASES * lease_s, listing_ttl_s / 3)
        self._repeated_s = _REPEATED_LEASES * lease_s
        self._clock = clock
        self._replicas: dict[ArtifactId, Claim] = {}
        """Artifacts here that other workers own."""
        self._owners: dict[ArtifactId, Epoch] = {}
        """The owner of each replica when it was last claimed."""
        self._num_replicas: Counter[Epoch] = Counter()
        """Replicas by that owner; no count is zero."""
        self._replica_bytes = 0
        self._to_list: dict[ArtifactId, None] = {}
        """Replicas whose listing has to be sent, in order."""
        self._unlisted_until_s: dict[ArtifactId, float] = {}
        """Replicas of which the directory lists enough others, and when it is asked again."""
        self._releases: dict[ArtifactId, Token] = {}
        """Releases that were not answered. Until then the artifact is not claimed again, because a
        release that arrives late would undo the claim."""
        self._postponed: dict[ArtifactId, Claim] = {}
        """Claims of artifacts that came back while their release was not answered."""
        self._refused: dict[ArtifactId, Claim] = {}
        """Artifacts here for which the directory was full: not listed, or by an earlier claim."""
        self._released = BoundedDict[ArtifactId, tuple[Token, float]](_MAX_REMEMBERED)
        """Recently answered releases and when they were answered, oldest first."""
        self._audit = RecordAudit(
            thread,
            self._known,
            self._replicas,
            self._owners,
            self._refused,
            self._relist,
            listing_ttl_s,
            clock,
        )
        self._sending: Future[None] | None = None
        self._send_at_s = self._reclaim_at_s = clock()

    @property
    def has_refused(self) -> bool:
        """True if the directory was full for an artifact that is here. Any thread may ask."""
        return bool(self._refused)

    @property
    def has_unsent(self) -> bool:
        """True if a release or a replica has still to be sent."""
        return bool(self._releases or self._to_list)

    @property
    def replica_owners(self) -> Set[Epoch]:
        """The owners of this worker's replicas when they were last claimed."""
        return self._num_replicas.keys()

    def start_epoch(self) -> ClaimBatches:
        """Forget everything of the earlier epoch; return claims for all that the store has."""
        self._releases.clear()
        self._postponed.clear()
        self._refused.clear()
        self._to_list.clear()
        self._unlisted_until_s.clear()
        self._replicas.clear()
        self._owners.clear()
        self._num_replicas.clear()
        self._replica_bytes = 0
        self._released.clear()
        self._audit.clear()
        return self._all_claims()

    def run_due(self) -> float:
        """Send what has changed; return the seconds until it has to be called again."""
        self._take_exports()
        now_s = self._clock()
        if self._thread.take_dropped():
            self._audit.check_all()
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + self._reclaim_every_s
            self._audit.check_replicas()
        self._send()
        wait_s = min(self._reclaim_at_s - now_s, self._audit.run_due())
        if self.has_unsent:
            wait_s = min(wait_s, max(0.0, self._send_at_s - now_s))
        return wait_s

    def on_records_lost(self, after_s: float) -> None:
        """Check everything and repeat recent releases: the directory's memory is another one.

        `after_s`: a time by the clock before which no records were lost.
        """
        self._audit.check_all()
        oldest_s = after_s - self._repeated_s
        recent = {a: token for a, (token, at_s) in self._released.items() if at_s >= oldest_s}
        self._released.clear()
        for artifact in self._store.find_gone(recent):
            self._releases.setdefault(artifact, recent[artifact])

    def reclaim(self) -> None:
        """Claim replicas, and what the directory was full for, now rather than when it is due.

        For a worker that has ended: its artifacts are free.
        """
        self._reclaim_at_s = self._clock()

    def on_granted(self, epoch: Epoch, claims: Sequence[Claim], grants: Sequence[Grant]) -> None:
        """Record the answers to claims, and report them to the store."""
        owned: dict[ArtifactId, int] = {}
        foreign: list[ArtifactId] = []
        refused: dict[ArtifactId, Claim] = {}
        for claim, grant in zip(claims, grants, strict=True):
            artifact = claim.artifact
            if grant.outcome is GrantOutcome.OWNED:
                owned[artifact] = grant.token
                self._drop_replica(artifact)
            elif grant.outcome is GrantOutcome.FOREIGN:
                foreign.append(artifact)
                self._drop_replica(artifact)
                self._add_replica(claim, grant.owner)
            elif grant.outcome is GrantOutcome.FULL:
                refused[artifact] = claim
        outcomes = Counter(grant.outcome for grant in grants)
        for outcome, count in outcomes.items():
            self._recorder.add("heterocache_directory_claims", count, outcome=outcome.value)
        for artifact in self._store.resolve_claims(owned, foreign):
            self._release(artifact, Token(owned.get(artifact, NO_TOKEN)))
        self._refused.update(refused)
        for artifact in (*owned, *foreign, *self._store.find_gone(refused)):
            self._refused.pop(artifact, None)
        self._set_gauges()

    def release_absent(self, owned: Mapping[ArtifactId, Token]) -> None:
        """Release those artifacts that the directory says are owned here, but that are not here.

        A claim whose answer was lost leaves such records.
        """
        for artifact in self._store.resolve_claims(owned, ()):
            self._release(artifact, owned[artifact])

    def _all_claims(self) -> ClaimBatches:
        for batch in self._store.inventory():
            claims = [_claim(change) for change in batch]
            for first in range(0, len(claims), CLAIMS_PER_CALL):
                yield claims[first : first + CLAIMS_PER_CALL]

    def _known(self) -> Iterator[Sequence[Known]]:
        """Yield all artifacts that are here and not being released, as they are at that moment."""
        known: list[Known] = []
        for batch in self._store.inventory():
            known += [(_claim(c), Token(c.token)) for c in batch if c.id not in self._releases]
            if len(known) >= CLAIMS_PER_CALL:
                yield known
                known = []
        yield known

    def _take_exports(self) -> None:
        latest = {change.id: change for change in self._store.take_exports()}
        claims = []
        for artifact, change in latest.items():
            if change.copy is None:
                self._release(artifact, Token(change.token))
            else:
                claim = _claim(change)
                if artifact in self._releases:
                    self._postponed[artifact] = claim
                else:
                    claims.append(claim)
                    for listed in (self._refused, self._replicas):
                        if artifact in listed:  # else its old place would be claimed later
                            listed[artifact] = claim
        if claims:
            self._thread.publish(claims)
        if latest:
            self._audit.skip(latest.keys())
            self._set_gauges()

    def _release(self, artifact: ArtifactId, token: Token) -> None:
        """Note that an artifact has left the store; release it if the directory lists it."""
        was_replica = self._drop_replica(artifact)
        self._postponed.pop(artifact, None)
        self._refused.pop(artifact, None)
        if was_replica or token:
            self._releases[artifact] = token

    def _relist(self, artifact: ArtifactId) -> None:
        if self._clock() >= self._unlisted_until_s.get(artifact, -math.inf):
            self._to_list[artifact] = None

    def _add_replica(self, claim: Claim, owner: Epoch) -> None:
        self._replicas[claim.artifact] = claim
        self._owners[claim.artifact] = owner
        self._num_replicas[owner] += 1
        self._replica_bytes += claim.copy.size_bytes
        self._relist(claim.artifact)

    def _drop_replica(self, artifact: ArtifactId) -> bool:
        """Forget that it is a replica. Return True if it was one."""
        self._to_list.pop(artifact, None)
        self._unlisted_until_s.pop(artifact, None)
        claim = self._replicas.pop(artifact, None)
        if claim is not None:
            self._replica_bytes -= claim.copy.size_bytes
            owner = self._owners.pop(artifact)
            self._num_replicas[owner] -= 1
            if not self._num_replicas[owner]:
                del self._num_replicas[owner]
        return claim is not None

    def _set_gauges(self) -> None:
        self._recorder.set("heterocache_replicas", len(self._replicas))
        self._recorder.set("heterocache_replica_bytes", self._replica_bytes)

    def _send(self) -> None:
        """Send releases and replicas, one call at a time. A call that fails is repeated later."""
        sending = self._sending
        if sending is not None:
            if not sending.done():
                return
            self._sending = None
            if sending.exception() is not None:
                self._send_at_s = self._clock() + _PAUSE_S
        if self.has_unsent and self._clock() >= self._send_at_s:
            self._sending = self._thread.call(self._send_batch, _SEND_DEADLINE_S)

    def _send_batch(self, directory: Directory, epoch: Epoch) -> None:
        releases = dict(islice(self._releases.items(), CLAIMS_PER_CALL))
        if releases:
            directory.release(epoch, releases)
            self._on_released(releases)
        listed = list(islice(self._to_list, CLAIMS_PER_CALL))
        if listed:
            copies = [self._replicas[artifact] for artifact in listed]
            grants = directory.replicate_readonly(epoch, copies, self._ttl_s)
            self._on_listed(copies, grants)

    def _on_listed(self, copies: Sequence[Claim], grants: Sequence[Grant]) -> None:
        until_s = self._clock() + self._ttl_s
        free = []
        for claim, grant in zip(copies, grants, strict=True):
            del self._to_list[claim.artifact]
            is_full_server = grant.token == NO_TOKEN  # which soon takes it, unlike a full record
            if grant.outcome is GrantOutcome.FULL and not is_full_server:
                self._unlisted_until_s[claim.artifact] = until_s
            elif grant.outcome is GrantOutcome.ABSENT:  # the owner has released it meanwhile
                free.append(claim)
        if free:
            self._thread.publish(free)

    def _on_released(self, releases: Mapping[ArtifactId, Token]) -> None:
        now_s = self._clock()
        for artifact in releases:
            self._released[artifact] = (self._releases.pop(artifact), now_s)
        back = [self._postponed.pop(a) for a in releases if a in self._postponed]
        self._thread.publish(back)


def _claim(change: ExportChange) -> Claim:
    copy = change.copy
    assert copy is not None
    return Claim(
        change.id,
        Copy(copy.size_bytes, copy.checksum, copy.dram_offset, copy.generation, copy.on_ssd),
        change.chunk.parent,
    )
