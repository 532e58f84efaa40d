"""Looking at the records of what a worker has: those that are not as it is here are claimed.

Records may be lost, and changes that came too fast are not told. Replicas are looked at often, for
their owner may have let go of one; all else a call each second, and at once when something is known
to be lost. A look is a lookup, which costs the directory a tenth of what claims cost.

Only the directory's thread comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import islice

from hetero_connector.artifacts.record import ArtifactId
from ownership.directory import ArtifactRecord, ChainView, Claim, Directory, EpochStatus
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token
from ownership.member.directory_thread import CLAIMS_PER_CALL, DirectoryThread

Known = tuple[Claim, Token]
"""What is here, and the token under which it is ours."""
_EVERY_S = 1.0
"""Between two looks at what nobody has said is lost."""
_CLAIMED_IN_S = 0.02
"""By then what a look has found to be claimed may be."""
_PAUSE_S = 0.5
"""After a look that failed."""
_DEADLINE_S = 5.0


class RecordAudit:
    """One worker's looks, a call of the directory at a time."""

    def __init__(
        self,
        thread: DirectoryThread,
        held: Callable[[], Iterator[Sequence[Known]]],
        replicas: Mapping[ArtifactId, Claim],
        refused: Mapping[ArtifactId, Claim],
        relist: Callable[[ArtifactId], None],
        ttl_s: float,
        clock: Callable[[], float],
    ) -> None:
        """`held`: all that is here and told, each batch as it is when it is asked for.

        `replicas`, `refused`: others', and what found no room, as they change. `relist`: called
        for a replica whose listing, which lasts `ttl_s`, is missing or about to end.
        """
        self._thread = thread
        self._held = held
        self._replicas = replicas
        self._refused = refused
        self._relist = relist
        self._ttl_s = ttl_s
        self._clock = clock
        self._replicas_left: Iterator[Sequence[Known]] = iter(())
        self._all_left: Iterator[Sequence[Known]] = iter(())
        self._are_replicas_due = self._is_all_due = False
        """True if those must not wait."""
        self._looking: Future[None] | None = None
        self._slowly_at_s = self._not_before_s = clock()

    def clear(self) -> None:
        """A new epoch: everything is being claimed."""
        self._replicas_left = self._all_left = iter(())
        self._are_replicas_due = self._is_all_due = False

    def look_at_replicas(self) -> None:
        """At once, and at what found no room."""
        self._replicas_left, self._are_replicas_due = self._replicas_now(), True

    def look_at_all(self) -> None:
        """At once: something was lost, or was not told."""
        self._all_left, self._is_all_due = self._held(), True

    def keep(self) -> float:
        """Begin the next look, if it is time; seconds until the next call of this."""
        now_s = self._clock()
        if self._looking is not None:
            if not self._looking.done():
                return 0.0
            if self._looking.exception() is not None:
                self._not_before_s = now_s + _PAUSE_S
                if self._is_all_due:
                    self.look_at_all()
            self._looking = None
        is_urgent = self._are_replicas_due or self._is_all_due
        due_s = self._not_before_s if is_urgent else max(self._not_before_s, self._slowly_at_s)
        # Where the worker is alone all is claimed anew before long.
        if not self._thread.takes_claims:
            return _EVERY_S
        if self._thread.num_claims >= CLAIMS_PER_CALL:
            return _CLAIMED_IN_S
        if now_s < due_s:
            return due_s - now_s
        self._slowly_at_s = now_s + _EVERY_S
        self._looking = self._thread.call(self._look, _DEADLINE_S)
        return 0.0

    def _look(self, directory: Directory, epoch: Epoch) -> None:
        known = next(self._replicas_left, None)
        if known is None:
            self._are_replicas_due = False
            known = next(self._all_left, None)
        if known is None:
            self._all_left, self._is_all_due = self._held(), False
            return
        chunks = list(dict.fromkeys(claim.artifact.chunk for claim, _ in known))
        view = directory.lookup(chunks)
        index_of = {chunk: index for index, chunk in enumerate(chunks)}
        wrong = []
        for claim, token in known:
            records = view.chunks[index_of[claim.artifact.chunk]]
            record = records.get(claim.artifact.state_type)
            if record is None or not self._is_right(record, claim, token, epoch, view):
                wrong.append(claim)
        self._thread.publish(wrong)

    def _is_right(
        self, record: ArtifactRecord, claim: Claim, token: Token, epoch: Epoch, view: ChainView
    ) -> bool:
        """Return whether the record says what is known here."""
        if record.owner == epoch:
            return (record.token, record.copy) == (token, claim.copy)
        if claim.artifact not in self._replicas or view.status(record.owner) is EpochStatus.ENDED:
            return False
        until_s = view.now_s + self._ttl_s / 2
        mine = (r for r in record.replicas if (r.holder, r.copy) == (epoch, claim.copy))
        if not any(replica.expires_s > until_s for replica in mine):
            self._relist(claim.artifact)
        return True

    def _replicas_now(self) -> Iterator[Sequence[Known]]:
        waiting = iter([*self._replicas, *self._refused])
        while artifacts := list(islice(waiting, CLAIMS_PER_CALL)):
            claims = (self._replicas.get(a) or self._refused.get(a) for a in artifacts)
            yield [(claim, NO_TOKEN) for claim in claims if claim is not None]
