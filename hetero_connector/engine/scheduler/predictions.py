"""Compare the predicted time to first token of each planned request with the observed time."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hetero_connector.artifacts.record import StoredChunk
from hetero_connector.metrics import Recorder
from hetero_connector.planner.decision import RestoreAction, RestoreDecision
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.store.artifact_store import ArtifactStore

RECENT = 256
"""Decisions that are kept for people to look at."""


class Prediction(NamedTuple):
    """The latest decision for a request that has no first token yet."""

    decided_s: float
    """Clock time of the first decision: a waiting request may be planned several times."""
    num_tokens: int
    """Tokens known at the decision. With one more the request has its first token."""
    local_tokens: int
    """Tokens that were in pages already."""
    stored: Sequence[StoredChunk]
    """Chunks that could have been restored."""
    decision: RestoreDecision

    @property
    def choice(self) -> str:
        """The value of the metric's label `choice`."""
        plan = self.decision.plan
        if plan is None:
            return "compute"
        if plan.replay_tokens:
            return "replay"
        return "load" if plan.boundary == self.stored[-1].chunk.end else "load_part"

    @property
    def low_utility_chunks(self) -> Sequence[StoredChunk]:
        """Stored chunks after the chosen boundary, if the planner found them of little use."""
        if RestoreAction.DROP_LOW_UTILITY_ARTIFACT not in self.decision.actions:
            return ()
        plan = self.decision.plan
        taken = plan.boundary if plan else self.local_tokens
        return self.stored[bisect_right(self.stored, taken, key=_end) :]


class Predictions:
    """Keeps the latest decision of each request until its first token, then records metrics.

    Everything is computed after the first token, to keep it off the time to first token. That is
    also when the chunks that the planner found of little use are declined, once per request
    however often it was planned.
    """

    def __init__(
        self, recorder: Recorder, load: LoadModel, store: ArtifactStore, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._load = load
        self._store = store
        self._clock = clock
        self._open: dict[str, Prediction] = {}
        self._recent = deque[Mapping[str, Any]](maxlen=RECENT)

    def recent(self) -> list[Mapping[str, Any]]:
        """Return the newest decisions whose first token has come. Any thread may ask."""
        return list(self._recent.copy())  # one call that no other thread can interrupt

    def on_decision(
        self,
        request_id: str,
        decision: RestoreDecision,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        num_tokens: int,
    ) -> None:
        """Keep the decision for a request of `num_tokens`; `stored` could be restored of it."""
        earlier = self._open.get(request_id)
        decided_s = earlier.decided_s if earlier else self._clock()
        self._open[request_id] = Prediction(decided_s, num_tokens, local_tokens, stored, decision)

    def has_open(self, request_id: str) -> bool:
        """True if the request was planned and has no first token yet."""
        return request_id in self._open

    def on_progress(self, request_id: str, num_tokens: int) -> None:
        """Record the metrics of a request if `num_tokens` include its first token.

        The number of computed tokens would come too early: vLLM counts the whole prompt when it
        schedules its last step.
        """
        prediction = self._open.get(request_id)
        if prediction is None or num_tokens <= prediction.num_tokens:
            return
        del self._open[request_id]
        took_s, decision = self._clock() - prediction.decided_s, prediction.decision
        for tier in decision.declined:
            self._load.fade(tier)
        if low_utility := prediction.low_utility_chunks:
            self._store.decline(low_utility)
        for action in decision.actions:
            self._recorder.add("heterocache_actions", action=action.value)
        self._recorder.add("heterocache_decisions", choice=prediction.choice)
        predicted_s, benefit_s = decision.predicted.ttft_s, decision.reuse_benefit_s
        self._recorder.observe("heterocache_ttft_seconds", predicted_s, kind="predicted")
        self._recorder.observe("heterocache_ttft_seconds", took_s, kind="observed")
        late_s = took_s - predicted_s
        self._recorder.observe("heterocache_reuse_benefit_seconds", benefit_s, kind="predicted")
        observed_s = benefit_s - late_s
        self._recorder.observe("heterocache_reuse_benefit_seconds", observed_s, kind="observed")
        if observed_s < 0 < benefit_s:
            self._recorder.add("heterocache_lost_restores")
        plan = decision.plan
        self._recent.append(
            {
                "request_id": request_id,
                "time": time.time(),
                "prompt_tokens": prediction.num_tokens,
                "local_tokens": prediction.local_tokens,
                "stored_tokens": prediction.stored[-1].chunk.end if prediction.stored else 0,
                "choice": prediction.choice,
                "boundary": plan.boundary if plan else prediction.local_tokens,
                "replayed_tokens": plan.replay_tokens if plan else 0,
                "tiers": sorted(tier.value for tier in plan.source_tiers) if plan else [],
                "is_parked": plan is not None and plan.parked,
                "predicted_s": predicted_s,
                "observed_s": took_s,
                "computing_s": decision.nothing.ttft_s,
            }
        )

    def forget(self, request_id: str) -> None:
        """Drop the decision: the request ended before its first token."""
        self._open.pop(request_id, None)


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
