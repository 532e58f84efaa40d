"""Compare the predicted time to first token of each planned request with the observed time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.containers import BoundedDict
from hetero_connector.engine.scheduler.request_report import (
    NothingRestored,
    RequestReport,
    untracked,
)
from hetero_connector.engine.scheduler.requests import PendingRestore, RequestTracker
from hetero_connector.engine.scheduler.restore_counter import tokens_by_tier
from hetero_connector.engine.scheduler.session_book import session_name
from hetero_connector.metrics import Recorder
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from vllm.v1.request import Request

RECENT = 256
"""Reports that are kept for people to look at."""


class Admission(NamedTuple):
    """A request's admission by vLLM."""

    admitted_s: float
    """Clock time."""
    staging_s: float
    restore: PendingRestore | None
    reason: NothingRestored | None
    """None if there is a restore, or if the decision has the reason."""
    reads: Mapping[Tier, tuple[float, float]]
    """Clock times at which the reads of the restore from each tier began and ended."""


@dataclass(slots=True)
class Wait:
    """A request's wait for its first token, with the latest decision."""

    begun_s: float
    """Clock time of the first decision: a waiting request may be planned several times. Without
    a decision, of vLLM's first question."""
    num_tokens: int
    """Tokens known at the decision. With one more the request has its first token."""
    decision: RestoreDecision | None
    """None if nothing was stored, so that there was nothing to decide."""
    admission: Admission | None = None

    @property
    def choice(self) -> str:
        """The value of the metric's label `choice`."""
        plan = self.decision.plan if self.decision else None
        if plan is None:
            return "compute"
        if plan.replay_tokens:
            return "replay"
        return "load_part" if self._left else "load"

    @property
    def slow_chunks(self) -> Sequence[StoredChunk]:
        """Stored chunks after the chosen boundary, if computing them is faster."""
        return self._left if self.decision and self.decision.is_rest_slow else ()

    @property
    def _left(self) -> Sequence[StoredChunk]:
        """Chunks that the decision considered, after those that it loads."""
        assert self.decision is not None
        at, plan = self.decision.considered.boundaries, self.decision.plan
        return at.chunks[len(plan.chunks) if plan else 0 :] if at else ()

    @property
    def nothing_restored(self) -> NothingRestored | None:
        """The reason for which nothing was restored; None if it was not admitted."""
        if self.admission is None or self.decision is None:
            return self.admission.reason if self.admission else None
        return self.admission.reason or _reason(self.decision)


class Predictions:
    """Keeps the latest decision of each request until its first token, then records metrics.

    Everything is computed after the first token, to keep it off the time to first token. That is
    also when the chunks that are slower to load than to compute are declined, once per request
    however often it was planned.
    """

    def __init__(
        self, recorder: Recorder, load: LoadModel, store: ArtifactStore, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._load = load
        self._store = store
        self._clock = clock
        self._recent = BoundedDict[str, RequestReport](RECENT)

    def recent(self) -> list[RequestReport]:
        """Return the newest requests whose first token has come. Any thread may ask."""
        return list(self._recent.values())  # one call that no other thread can interrupt

    def on_asked(self, tracker: RequestTracker) -> None:
        """Note the time of vLLM's first question for a request."""
        tracker.asked_s = self._clock()

    def on_decision(
        self,
        tracker: RequestTracker,
        decision: RestoreDecision,
        num_tokens: int,
    ) -> None:
        """Keep the decision for a request of `num_tokens`."""
        earlier = tracker.wait
        begun_s = earlier.begun_s if earlier and earlier.decision else self._clock()
        tracker.wait = Wait(begun_s, num_tokens, decision)

    def on_admitted(self, tracker: RequestTracker, *, stopped: bool) -> None:
        """Note what vLLM admits, before the tracker forgets how it was staged.

        `stopped`: the connector restores nothing any more.
        """
        if tracker.wait is None:
            begun_s = self._clock() if tracker.report else tracker.asked_s
            num_tokens = int(tracker.request.num_tokens)
            tracker.wait = Wait(begun_s, num_tokens, None)
        staging_s = (tracker.attempts.staged_s or 0.0) if tracker.attempts else 0.0
        restore = tracker.restore if tracker.restored_tokens else None
        reason = None if restore is not None else _reason_at_admission(tracker, stopped)
        reads = {} if restore is None else restore.handle.tier_reads()
        tracker.wait.admission = Admission(self._clock(), staging_s, restore, reason, reads)

    def on_progress(self, tracker: RequestTracker) -> None:
        """Record the metrics of a request if it has its first token.

        The number of computed tokens would come too early: vLLM counts the whole prompt when it
        schedules its last step.
        """
        wait = tracker.wait
        if wait is None or tracker.request.num_tokens <= wait.num_tokens:
            return
        tracker.wait = None
        now_s = self._clock()
        if wait.decision is not None:
            self._record(tracker, wait, wait.decision, now_s - wait.begun_s)
        tracker.report = tracker.report or self._report(tracker, wait, now_s)
        self._recent[tracker.report.request_id] = tracker.report

    def finish(self, request: Request, tracker: RequestTracker | None) -> RequestReport:
        """Return the report of a request that has ended, and keep it among the newest.

        `tracker`: None if it could not be identified, or ended before vLLM asked for it.
        """
        if tracker is None:
            report = untracked(request)
        else:
            report = tracker.report or self._report(tracker, tracker.wait, None)
            report = report._replace(preemptions=tracker.preemptions)
        report = report.ended(request)
        self._recent[report.request_id] = report
        return report

    def _record(
        self, tracker: RequestTracker, wait: Wait, decision: RestoreDecision, took_s: float
    ) -> None:
        for tier, size_bytes in decision.declined.items():
            self._load.on_declined(tier, size_bytes, self._clock())
        if slow := wait.slow_chunks:
            self._store.decline(slow)
        self._recorder.add("heterocache_decisions", choice=wait.choice)
        predicted_s = decision.predicted.ttft_s
        self._recorder.observe("heterocache_ttft_seconds", predicted_s, kind="predicted")
        self._recorder.observe("heterocache_ttft_seconds", took_s, kind="observed")
        if predicted_s > 0:
            ratio = took_s / predicted_s
            self._recorder.observe("heterocache_prediction_ratio", ratio, choice=wait.choice)
        if (admission := wait.admission) is not None and admission.restore is not None:
            if tracker.awaits is None:  # computing would have waited for pages, too
                expected_s = max(admission.staging_s, decision.predicted.queue_s)
                took_s -= max(0.0, admission.admitted_s - wait.begun_s - expected_s)
            self._record_benefit(decision.reuse_benefit_s, took_s - predicted_s)

    def _record_benefit(self, predicted_s: float, late_s: float) -> None:
        """Record what a restore saved. Losses have sums of their own, so that no sum falls."""
        observed_s = predicted_s - late_s
        for kind, seconds in (
            ("predicted", max(0.0, predicted_s)),
            ("observed", max(0.0, observed_s)),
            ("lost", max(0.0, -observed_s)),
        ):
            self._recorder.observe("heterocache_reuse_benefit_seconds", seconds, kind=kind)
        if observed_s < 0 < predicted_s:
            self._recorder.add("heterocache_lost_restores")

    def _report(
        self, tracker: RequestTracker, wait: Wait | None, first_token_s: float | None
    ) -> RequestReport:
        """`first_token_s`: clock time; None if the request ended before."""
        asked_s = tracker.asked_s
        wait = wait or Wait(asked_s, tracker.request.num_tokens, None)
        admission, decision = wait.admission, wait.decision
        restore = None if admission is None or tracker.is_lost else admission.restore
        local_tokens, restored = tracker.local_tokens, dict[str, int]()
        boundary, reason = local_tokens, NothingRestored.LOAD_LOST if tracker.is_lost else None
        if restore is not None:
            local_tokens, restored = restore.local_tokens, tokens_by_tier(restore)
            boundary = restore.plan.boundary
        elif reason is None:
            reason = wait.nothing_restored
        loaded_s = restore.loaded_s if restore is not None else None
        asked_at = time.time() - (self._clock() - asked_s)
        return RequestReport(
            request_id=tracker.request.request_id,
            time=asked_at,
            queued_s=max(0.0, asked_at - tracker.request.arrival_time),
            session=None if tracker.session is None else session_name(tracker.session),
            prompt_tokens=wait.num_tokens,
            stored_tokens=tracker.stored_tokens,
            local_tokens=local_tokens,
            restored_tokens=restored,
            computed_tokens=wait.num_tokens - local_tokens - sum(restored.values()),
            replayed_tokens=restore.plan.replay_tokens if restore else 0,
            chain=_last_key(tracker),
            boundary=boundary,
            choice=wait.choice,
            reason=reason,
            is_parked=restore is not None and restore.plan.parked,
            predicted_s=decision.predicted.ttft_s if decision else None,
            computing_s=decision.nothing.ttft_s if decision else None,
            observed_s=None if first_token_s is None else first_token_s - wait.begun_s,
            decided_s=wait.begun_s - asked_s if decision else None,
            staging_s=admission.staging_s if admission else 0.0,
            read_s={
                tier.value: (begun_s - asked_s, ended_s - asked_s)
                for tier, (begun_s, ended_s) in (admission.reads if admission else {}).items()
            },
            admitted_s=admission.admitted_s - asked_s if admission else None,
            loaded_s=None if loaded_s is None else loaded_s - asked_s,
            first_token_s=None if first_token_s is None else first_token_s - asked_s,
        )


def _last_key(tracker: RequestTracker) -> tuple[str, int] | None:
    """Return the key and the end of the prompt's last hashed chunk. It is not hashed for this."""
    chunk = tracker.chain.last_hashed(tracker.request.num_prompt_tokens)
    return None if chunk is None else (chunk.key.hex(), chunk.end)


def _reason_at_admission(tracker: RequestTracker, stopped: bool) -> NothingRestored | None:
    """Return the reason that only the tracker knows for restoring nothing; None for the others."""
    if tracker.request.skip_reading_prefix_cache:
        return NothingRestored.NOT_ASKED_FOR
    if stopped:
        return NothingRestored.STOPPED
    if tracker.restore is not None:
        return NothingRestored.NOT_ADMITTED
    if tracker.attempts is not None and tracker.attempts.count:
        return NothingRestored.UNREADABLE
    if not tracker.stored_tokens:
        late = tracker.lacks_answer
        return NothingRestored.DIRECTORY_LATE if late else NothingRestored.NOTHING_STORED
    return NothingRestored.IN_ENGINE if tracker.stored_tokens <= tracker.local_tokens else None


def _reason(decision: RestoreDecision) -> NothingRestored:
    """Return the reason for a decision to restore nothing."""
    strategies = tuple(decision.considered.strategies())
    if not any(x.resumes_after(decision.considered.local_tokens) for x in strategies):
        return NothingRestored.NO_BOUNDARY
    if not decision.by_cost:
        return NothingRestored.NEVER_LOAD
    if not any(x.in_time_from(0).any() for x in strategies):
        return NothingRestored.TOO_LATE
    return NothingRestored.COMPUTING_IS_FASTER
