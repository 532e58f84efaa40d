"""What the fleet knows of one worker's artifacts, and what it is still to be told.

Everything the store tells is claimed. What somebody else owns is listed as a replica, for a
time: a claim that is repeated before it is over either renews that, or makes us the owner of
what its owner has let go. With them is claimed again what the directory had no room for. What
leaves the store is released.

What the directory may have lost, or was not told, is found by `record_audit`.

Only the directory's thread comes here.
"""

from __future__ import annotations

import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from itertools import islice

from hetero_connector.artifacts.exported import ExportChange
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.metrics import Recorder
from ownership.directory import (
    Claim,
    Copy,
    Directory,
    Grant,
    GrantOutcome,
)
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token
from ownership.member.directory_thread import CLAIMS_PER_CALL, DirectoryThread
from ownership.member.record_audit import Known, RecordAudit
from ownership.member.shared_store import SharedStore

LISTING_TTL_S = 60.0
_TELL_DEADLINE_S = 5.0
_PAUSE_S = 0.5
"""After something that the directory could not be told."""
_RECLAIM_LEASES = 1.5
"""So often replicas' records are looked at: what an owner lets go is owned again within two."""
_TOLD_LEASES = 2
"""So long releases are remembered, to be told again. A directory that went back by more than a
lease has no living epoch of ours."""
_MAX_TOLD = 65_536


class Ledger:
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
        """`listing_ttl_s`: how long replicas are listed for. `lease_s`: the worker's."""
        self._store = store
        self._thread = thread
        self._recorder = recorder
        self._ttl_s = listing_ttl_s
        self._reclaim_every_s = min(_RECLAIM_LEASES * lease_s, listing_ttl_s / 3)
        self._told_for_s = _TOLD_LEASES * lease_s
        self._clock = clock
        self._replicas: dict[ArtifactId, Claim] = {}
        """What others own, and where it is here."""
        self._owners: dict[ArtifactId, Epoch] = {}
        """Whose each replica was when it was claimed last."""
        self._num_replicas: Counter[Epoch] = Counter()
        """By that owner; none is zero."""
        self._replica_bytes = 0
        self._unlisted: dict[ArtifactId, None] = {}
        """Replicas to be listed, or listed again."""
        self._releases: dict[ArtifactId, Token] = {}
        """Not answered yet: until then the artifact is not claimed again, for a release that
        arrives late would undo the claim."""
        self._held_back: dict[ArtifactId, Claim] = {}
        """Claims of what has come back meanwhile."""
        self._refused: dict[ArtifactId, Claim] = {}
        """What is here and not listed, for the directory was full."""
        self._told: OrderedDict[ArtifactId, tuple[Token, float]] = OrderedDict()
        """Releases that were answered, and when: of late, oldest first."""
        self._audit = RecordAudit(
            thread, self._held, self._replicas, self._refused, self._relist, listing_ttl_s, clock
        )
        self._telling: Future[None] | None = None
        self._tell_at_s = self._reclaim_at_s = clock()

    def inventory(self) -> Iterator[Sequence[Claim]]:
        """Everything is claimed anew: nothing of an earlier epoch stands any more, from now on."""
        self._releases.clear()
        self._held_back.clear()
        self._refused.clear()
        self._unlisted.clear()
        self._replicas.clear()
        self._owners.clear()
        self._num_replicas.clear()
        self._replica_bytes = 0
        self._told.clear()
        self._audit.clear()
        return self._all()

    def _all(self) -> Iterator[Sequence[Claim]]:
        for batch in self._store.inventory():
            claims = [_claim(change) for change in batch]
            for first in range(0, len(claims), CLAIMS_PER_CALL):
                yield claims[first : first + CLAIMS_PER_CALL]

    def keep(self) -> float:
        """Tell what has changed; seconds until there is something to do again."""
        self._take_exports()
        now_s = self._clock()
        if self._thread.take_dropped():
            self._audit.look_at_all()
        if now_s >= self._reclaim_at_s:
            self._reclaim_at_s = now_s + self._reclaim_every_s
            self._audit.look_at_replicas()
        self._tell()
        wait_s = min(self._reclaim_at_s - now_s, self._audit.keep())
        if self._releases or self._unlisted:
            wait_s = min(wait_s, max(0.0, self._tell_at_s - now_s))
        return wait_s

    def records_lost(self) -> None:
        """The directory's memory is another one: what it was told of late may be lost."""
        self._audit.look_at_all()
        oldest_s = self._clock() - self._told_for_s
        late = {a: token for a, (token, told_s) in self._told.items() if told_s >= oldest_s}
        self._told.clear()
        for artifact in self._store.gone(late):
            self._releases.setdefault(artifact, late[artifact])

    def _relist(self, artifact: ArtifactId) -> None:
        self._unlisted[artifact] = None

    def _held(self) -> Iterator[Sequence[Known]]:
        """All that is here, as it is when it is asked for; but what is being released."""
        known: list[Known] = []
        for batch in self._store.inventory():
            known += [(_claim(c), Token(c.token)) for c in batch if c.id not in self._releases]
            if len(known) >= CLAIMS_PER_CALL:
                yield known
                known = []
        yield known

    @property
    def is_refused(self) -> bool:
        """Whether the directory was full for something that is here. For any thread."""
        return bool(self._refused)

    @property
    def owners(self) -> Set[Epoch]:
        """Who owned what is a replica here, when it was claimed last."""
        return self._num_replicas.keys()

    def reclaim(self) -> None:
        """A worker has gone: replicas of what it owned are claimed now, not when it is time.

        So is what the directory had no room for.
        """
        self._reclaim_at_s = self._clock()

    def granted(self, epoch: Epoch, claims: Sequence[Claim], grants: Sequence[Grant]) -> None:
        """What became of claims."""
        owned: dict[ArtifactId, int] = {}
        held: list[ArtifactId] = []
        refused: dict[ArtifactId, Claim] = {}
        for claim, grant in zip(claims, grants, strict=True):
            artifact = claim.artifact
            if grant.outcome is GrantOutcome.OWNED:
                owned[artifact] = grant.token
                self._drop_replica(artifact)
            elif grant.outcome is GrantOutcome.FOREIGN:
                held.append(artifact)
                self._drop_replica(artifact)
                self._replicas[artifact] = claim
                self._owners[artifact] = grant.owner
                self._num_replicas[grant.owner] += 1
                self._replica_bytes += claim.copy.size_bytes
                self._unlisted[artifact] = None
            elif grant.outcome is GrantOutcome.FULL:
                refused[artifact] = claim
        outcomes = Counter(grant.outcome for grant in grants)
        for outcome, count in outcomes.items():
            self._recorder.add("heterocache_directory_claims", count, outcome=outcome.value)
        for artifact in self._store.judged(owned, held):
            self._on_left(artifact, Token(owned.get(artifact, NO_TOKEN)))
        self._refused.update(refused)
        for artifact in (*owned, *held, *self._store.gone(refused)):
            self._refused.pop(artifact, None)
        self._count_replicas()

    def found(self, own: Mapping[ArtifactId, Token]) -> None:
        """The directory says that these are ours: those that are not here are released.

        A claim whose answer was lost leaves such records.
        """
        for artifact in self._store.judged(own, ()):
            self._on_left(artifact, own[artifact])

    def _take_exports(self) -> None:
        latest = {change.id: change for change in self._store.take_exports()}
        claims = []
        for artifact, change in latest.items():
            if change.copy is None:
                self._on_left(artifact, Token(change.token))
            else:
                claim = _claim(change)
                if artifact in self._releases:
                    self._held_back[artifact] = claim
                else:
                    claims.append(claim)
                    for listed in (self._refused, self._replicas):
                        if artifact in listed:  # or its old place would be claimed after it
                            listed[artifact] = claim
        if claims:
            self._thread.publish(claims)
        if latest:
            self._count_replicas()

    def _on_left(self, artifact: ArtifactId, token: Token) -> None:
        was_replica = self._drop_replica(artifact)
        self._held_back.pop(artifact, None)
        self._refused.pop(artifact, None)
        if was_replica or token:
            self._releases[artifact] = token

    def _drop_replica(self, artifact: ArtifactId) -> bool:
        """Forget that it is a replica; return whether it was one."""
        self._unlisted.pop(artifact, None)
        claim = self._replicas.pop(artifact, None)
        if claim is not None:
            self._replica_bytes -= claim.copy.size_bytes
            owner = self._owners.pop(artifact)
            self._num_replicas[owner] -= 1
            if not self._num_replicas[owner]:
                del self._num_replicas[owner]
        return claim is not None

    def _count_replicas(self) -> None:
        self._recorder.set("heterocache_replicas", len(self._replicas))
        self._recorder.set("heterocache_replica_bytes", self._replica_bytes)

    def _tell(self) -> None:
        """Releases and replicas, a call at a time. What fails is told again later."""
        telling = self._telling
        if telling is not None:
            if not telling.done():
                return
            self._telling = None
            if telling.exception() is not None:
                self._tell_at_s = self._clock() + _PAUSE_S
        if (self._releases or self._unlisted) and self._clock() >= self._tell_at_s:
            self._telling = self._thread.call(self._tell_some, _TELL_DEADLINE_S)

    def _tell_some(self, directory: Directory, epoch: Epoch) -> None:
        releases = dict(islice(self._releases.items(), CLAIMS_PER_CALL))
        if releases:
            directory.release(epoch, releases)
            now_s = self._clock()
            for artifact in releases:
                self._told[artifact] = (self._releases.pop(artifact), now_s)
                self._told.move_to_end(artifact)
            while len(self._told) > _MAX_TOLD:
                self._told.popitem(last=False)
            back = [self._held_back.pop(a) for a in releases if a in self._held_back]
            self._thread.publish(back)
        listed = list(islice(self._unlisted, CLAIMS_PER_CALL))
        if listed:
            copies = [self._replicas[artifact] for artifact in listed]
            grants = directory.replicate_readonly(epoch, copies, self._ttl_s)
            for artifact in listed:
                del self._unlisted[artifact]
            let_go = [
                claim
                for claim, grant in zip(copies, grants, strict=True)
                if grant.outcome is GrantOutcome.ABSENT
            ]
            if let_go:  # its owner has released it meanwhile
                self._thread.publish(let_go)


def _claim(change: ExportChange) -> Claim:
    copy = change.copy
    assert copy is not None
    return Claim(
        change.id,
        Copy(copy.size_bytes, copy.checksum, copy.dram_offset, copy.generation, copy.on_ssd),
        change.chunk.parent,
    )
