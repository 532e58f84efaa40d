"""What was predicted of a request when it was planned, against what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from hetero_connector.artifacts.record import Tier
from hetero_connector.metrics import Recorder
from hetero_connector.planner.cost_model import Terms
from hetero_connector.planner.decision import Decision
from hetero_connector.planner.load_model import LoadModel


class Prediction(NamedTuple):
    """The latest decision on a request that waits for its first token."""

    decided_s: float
    """Clock time of the first decision: a request may be planned again while it waits."""
    chosen: Terms
    nothing: Terms
    choice: str
    declined: tuple[Tier, ...]


class Predictions:
    """Remembers the decision of each request until its first token, then counts."""

    def __init__(self, recorder: Recorder, load: LoadModel, clock: Callable[[], float]) -> None:
        self._recorder = recorder
        self._load = load
        self._clock = clock
        self._open: dict[str, Prediction] = {}

    def decided(self, request_id: str, decision: Decision, deepest: int) -> None:
        """A request was planned; `deepest`: the farthest boundary that might be restored."""
        earlier = self._open.get(request_id)
        decided_s = earlier.decided_s if earlier else self._clock()
        plan = decision.plan
        if plan is None:
            choice = "compute"
        elif plan.replay_tokens:
            choice = "replay"
        else:
            choice = "load" if plan.boundary == deepest else "load_part"
        self._open[request_id] = Prediction(
            decided_s, decision.predicted, decision.nothing, choice, decision.declined
        )

    def first_token(self, request_id: str) -> None:
        """Its prompt has been computed. Without effect for a request that was not planned."""
        made = self._open.pop(request_id, None)
        if made is None:
            return
        took_s = self._clock() - made.decided_s
        for tier in made.declined:
            self._load.fade(tier)  # once a request, however often it was planned
        self._recorder.add("heterocache_decisions", choice=made.choice)
        self._recorder.observe("heterocache_ttft_seconds", made.chosen.ttft_s, kind="predicted")
        self._recorder.observe("heterocache_ttft_seconds", took_s, kind="observed")
        nothing_s = made.nothing.ttft_s
        self._recorder.observe(
            "heterocache_reuse_benefit_seconds", nothing_s - made.chosen.ttft_s, kind="predicted"
        )
        self._recorder.observe(
            "heterocache_reuse_benefit_seconds", nothing_s - took_s, kind="observed"
        )

    def forget(self, request_id: str) -> None:
        """It ended before its first token."""
        self._open.pop(request_id, None)
