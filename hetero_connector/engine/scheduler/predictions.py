"""What was predicted of a request when it was planned, against what came of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import StoredChunk
from hetero_connector.metrics import Recorder
from hetero_connector.planner.decision import RestoreAction, RestoreDecision
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.store.base import Store


class Prediction(NamedTuple):
    """The latest decision on a request that waits for its first token."""

    decided_s: float
    """Clock time of the first decision: a request may be planned again while it waits."""
    num_tokens: int
    """Its tokens known then: one more is the first that comes of the decision."""
    local_tokens: int
    """Of them in pages already."""
    stored: Sequence[StoredChunk]
    """What might have been restored."""
    decision: RestoreDecision

    @property
    def choice(self) -> str:
        """In the words of the metric."""
        plan = self.decision.plan
        if plan is None:
            return "compute"
        if plan.replay_tokens:
            return "replay"
        return "load" if plan.boundary == self.stored[-1].chunk.end else "load_part"

    @property
    def left(self) -> Sequence[StoredChunk]:
        """What would have led further and is of little use."""
        if RestoreAction.DROP_LOW_UTILITY_ARTIFACT not in self.decision.actions:
            return ()
        plan = self.decision.plan
        taken = plan.boundary if plan else self.local_tokens
        return self.stored[bisect_right(self.stored, taken, key=_end) :]


class Predictions:
    """Remembers the decision of each request until its first token, then counts.

    What a count takes to find out, it does so then: a decision is on the way to the first token.

    What a decision leaves alone is declined then, once a request however often it was planned.
    """

    def __init__(
        self, recorder: Recorder, load: LoadModel, store: Store, clock: Callable[[], float]
    ) -> None:
        self._recorder = recorder
        self._load = load
        self._store = store
        self._clock = clock
        self._open: dict[str, Prediction] = {}

    def decided(
        self,
        request_id: str,
        decision: RestoreDecision,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        num_tokens: int,
    ) -> None:
        """A request of `num_tokens` was planned; `stored`: what might be restored of its chain."""
        earlier = self._open.get(request_id)
        decided_s = earlier.decided_s if earlier else self._clock()
        self._open[request_id] = Prediction(decided_s, num_tokens, local_tokens, stored, decision)

    def expects(self, request_id: str) -> bool:
        """Whether a decision on the request waits for its first token."""
        return request_id in self._open

    def progressed(self, request_id: str, num_tokens: int) -> None:
        """So many of its tokens are known. Counts what is the first token since it was planned.

        Not once the prompt counts as computed: that is so as soon as its last step is scheduled.
        """
        made = self._open.get(request_id)
        if made is None or num_tokens <= made.num_tokens:
            return
        del self._open[request_id]
        took_s, decision = self._clock() - made.decided_s, made.decision
        for tier in decision.declined:
            self._load.fade(tier)
        if left := made.left:
            self._store.decline(left)
        for action in decision.actions:
            self._recorder.add("heterocache_actions", action=action.value)
        self._recorder.add("heterocache_decisions", choice=made.choice)
        predicted_s, benefit_s = decision.predicted.ttft_s, decision.reuse_benefit_s
        self._recorder.observe("heterocache_ttft_seconds", predicted_s, kind="predicted")
        self._recorder.observe("heterocache_ttft_seconds", took_s, kind="observed")
        late_s = took_s - predicted_s
        self._recorder.observe("heterocache_reuse_benefit_seconds", benefit_s, kind="predicted")
        self._recorder.observe(
            "heterocache_reuse_benefit_seconds", benefit_s - late_s, kind="observed"
        )

    def forget(self, request_id: str) -> None:
        """It ended before its first token."""
        self._open.pop(request_id, None)


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
