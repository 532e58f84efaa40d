"""What was predicted of a request when it was planned, against what came of it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import StoredChunk, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.planner.cost_model import Terms
from hetero_connector.planner.decision import Action, Decision
from hetero_connector.planner.load_model import LoadModel
from hetero_connector.store.base import Store


class Prediction(NamedTuple):
    """The latest decision on a request that waits for its first token."""

    decided_s: float
    """Clock time of the first decision: a request may be planned again while it waits."""
    num_tokens: int
    """Its tokens known then: one more is the first that comes of the decision."""
    chosen: Terms
    benefit_s: float
    """`Decision.reuse_benefit_s`."""
    choice: str
    declined: tuple[Tier, ...]
    actions: tuple[Action, ...]
    left: Sequence[StoredChunk]
    """What would have led further and is of little use."""


class Predictions:
    """Remembers the decision of each request until its first token, then counts.

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
        decision: Decision,
        stored: Sequence[StoredChunk],
        local_tokens: int,
        num_tokens: int,
    ) -> None:
        """A request of `num_tokens` was planned; `stored`: what might be restored of its chain."""
        earlier = self._open.get(request_id)
        decided_s = earlier.decided_s if earlier else self._clock()
        plan = decision.plan
        if plan is None:
            choice = "compute"
        elif plan.replay_tokens:
            choice = "replay"
        else:
            choice = "load" if plan.boundary == stored[-1].chunk.end else "load_part"
        left: Sequence[StoredChunk] = ()
        if Action.DROP_LOW_UTILITY_ARTIFACT in decision.actions:
            taken = plan.boundary if plan else local_tokens
            left = stored[bisect_right(stored, taken, key=_end) :]
        self._open[request_id] = Prediction(
            decided_s,
            num_tokens,
            decision.predicted,
            decision.reuse_benefit_s,
            choice,
            decision.declined,
            decision.actions,
            left,
        )

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
        took_s = self._clock() - made.decided_s
        for tier in made.declined:
            self._load.fade(tier)
        if made.left:
            self._store.decline(made.left)
        for action in made.actions:
            self._recorder.add("heterocache_actions", action=action.value)
        self._recorder.add("heterocache_decisions", choice=made.choice)
        self._recorder.observe("heterocache_ttft_seconds", made.chosen.ttft_s, kind="predicted")
        self._recorder.observe("heterocache_ttft_seconds", took_s, kind="observed")
        late_s = took_s - made.chosen.ttft_s
        self._recorder.observe(
            "heterocache_reuse_benefit_seconds", made.benefit_s, kind="predicted"
        )
        self._recorder.observe(
            "heterocache_reuse_benefit_seconds", made.benefit_s - late_s, kind="observed"
        )

    def forget(self, request_id: str) -> None:
        """It ended before its first token."""
        self._open.pop(request_id, None)


def _end(stored: StoredChunk) -> int:
    return stored.chunk.end
