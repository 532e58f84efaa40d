"""Compares the directory's records with what a worker has, and claims what differs.

Records may be lost, and changes that came too fast were not sent. Replicas are checked often,
because their owner may have released one; everything else slowly, one call a second, and at once
when something is known to be lost. A check is a lookup, which costs the directory a tenth of what
claims cost.

Only the directory's thread calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice

from hetero_connector.artifacts.record import ArtifactId
from ownership.directory import ArtifactRecord, ChainView, Claim, Directory, EpochStatus
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token
from ownership.member.directory_thread import CLAIMS_PER_CALL, DirectoryThread

Known = tuple[Claim, Token]
"""An artifact of this worker, and the token under which it owns it."""
_EVERY_S = 1.0
"""Seconds between two checks when nothing is known to be lost."""
_CLAIMED_IN_S = 0.02
"""Seconds in which claims that a check has found are made."""
_PAUSE_S = 0.5
"""Pause after a check that failed."""
_DEADLINE_S = 5.0


class RecordAudit:
    """One worker's checks, one call of the directory at a time."""

    def __init__(
        self,
        thread: DirectoryThread,
        inventory: Callable[[], Iterator[Sequence[Known]]],
        replicas: Mapping[ArtifactId, Claim],
        owners: Mapping[ArtifactId, Epoch],
        refused: Mapping[ArtifactId, Claim],
        relist: Callable[[ArtifactId], None],
        ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`inventory`: returns all artifacts of the worker, each batch as it is when it is taken.

        `replicas`, `owners`, `refused`: live views of the artifacts that others own, of the last
        known owner of each, and of those for which the directory was full. `relist`: called with
        a replica whose listing, which lasts `ttl_s`, is missing or ends soon.
        """
        self._thread = thread
        self._inventory = inventory
        self._replicas = replicas
        self._owners = owners
        self._refused = refused
        self._relist = relist
        self._ttl_s = ttl_s
        self._clock = clock
        self._replicas_left: Iterator[Sequence[Known]] = iter(())
        self._all_left: Iterator[Sequence[Known]] = iter(())
        self._taken: Sequence[Known] = ()
        """The batch that is being checked, or whose check has failed."""
        self._are_replicas_urgent = self._is_all_urgent = False
        self._checking: Future[None] | None = None
        self._slow_at_s = self._not_before_s = clock()

    def clear(self) -> None:
        """Stop checking: under a new epoch everything is claimed anyway."""
        self._replicas_left = self._all_left = iter(())
        self._taken = ()
        self._are_replicas_urgent = self._is_all_urgent = False

    def skip(self, changed: Collection[ArtifactId]) -> None:
        """Leave out artifacts of a batch whose check has failed: they have changed since."""
        self._taken = [known for known in self._taken if known[0].artifact not in changed]

    def check_replicas(self) -> None:
        """Check replicas, and what the directory was full for, at once."""
        self._replicas_left, self._are_replicas_urgent = self._replica_batches(), True

    def check_all(self) -> None:
        """Check everything at once: records were lost, or changes were not sent."""
        self._all_left, self._is_all_urgent = self._inventory(), True

    def run_due(self) -> float:
        """Start the next check, if it is due; return the seconds until the next call."""
        now_s = self._clock()
        if self._checking is not None:
            if not self._checking.done():
                return 0.0
            if self._checking.exception() is not None:
                self._not_before_s = now_s + _PAUSE_S
            self._checking = None
        is_urgent = self._are_replicas_urgent or self._is_all_urgent
        due_s = self._not_before_s if is_urgent else max(self._not_before_s, self._slow_at_s)
        # Without a registration a check is useless: everything is claimed after the next one.
        if not self._thread.accepts_claims:
            return _EVERY_S
        if self._thread.num_claims >= CLAIMS_PER_CALL:
            return _CLAIMED_IN_S
        if now_s < due_s:
            return due_s - now_s
        self._slow_at_s = now_s + _EVERY_S
        self._checking = self._thread.call(self._check_batch, _DEADLINE_S)
        return 0.0

    def _check_batch(self, directory: Directory, epoch: Epoch) -> None:
        known = self._taken = self._taken or self._next_batch()
        if not known:
            return
        chunks = list(dict.fromkeys(claim.artifact.chunk for claim, _ in known))
        view = directory.lookup(chunks)
        self._taken = ()
        index_of = {chunk: index for index, chunk in enumerate(chunks)}
        wrong = []
        for claim, token in known:
            records = view.chunks[index_of[claim.artifact.chunk]]
            record = records.get(claim.artifact.state_type)
            if record is None or not self._is_right(record, claim, token, epoch, view):
                wrong.append(claim)
            elif record.owner != epoch and self._needs_listing(record, claim, epoch, view):
                self._relist(claim.artifact)
        self._thread.publish(wrong)

    def _next_batch(self) -> Sequence[Known]:
        known = next(self._replicas_left, None)
        if known is None:
            self._are_replicas_urgent = False
            known = next(self._all_left, None)
        if known is None:
            self._all_left, self._is_all_urgent = self._inventory(), False
        return known or ()

    def _is_right(
        self, record: ArtifactRecord, claim: Claim, token: Token, epoch: Epoch, view: ChainView
    ) -> bool:
        """Return True if the record agrees with what this worker knows."""
        if record.owner == epoch:
            return (record.token, record.copy) == (token, claim.copy)
        # A claim of a replica that has another owner by now is answered with that.
        is_known = self._owners.get(claim.artifact) == record.owner
        return is_known and view.status(record.owner) is not EpochStatus.ENDED

    def _needs_listing(
        self, record: ArtifactRecord, claim: Claim, epoch: Epoch, view: ChainView
    ) -> bool:
        until_s = view.now_s + self._ttl_s / 2
        own = (r for r in record.replicas if (r.holder, r.copy) == (epoch, claim.copy))
        return not any(replica.expires_s > until_s for replica in own)

    def _replica_batches(self) -> Iterator[Sequence[Known]]:
        waiting = iter([*self._replicas, *self._refused])
        while artifacts := list(islice(waiting, CLAIMS_PER_CALL)):
            claims = (self._replicas.get(a) or self._refused.get(a) for a in artifacts)
            yield [(claim, NO_TOKEN) for claim in claims if claim is not None]
