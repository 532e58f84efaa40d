"""Dynamo's logits, computed by hand."""

from __future__ import annotations

import pytest

from ownership.scheduling import FleetView, Step, WorkerLoad, WorkerPrefix
from ownership.scheduling.dynamo_kv import DynamoKv
from ownership.scheduling.step_pricing import StepPricing
from tests.ownership.scheduling.fleets import fleet_of, worker

STEP = Step(1_000, {"a": WorkerPrefix(800), "b": WorkerPrefix(0, 500)})


def fleet() -> FleetView:
    """a: 2 x 0.8 - 0.9 - 4/4 = -0.3; b: 2 x 0.5 - 0.25 - 2/4 = 0.25; c: 0 - 0 - 0 = 0."""
    return fleet_of(
        worker("a", WorkerLoad(waiting_requests=4, hbm_used_bytes=900), hbm_bytes=1_000),
        worker("b", WorkerLoad(waiting_requests=2, hbm_used_bytes=250), hbm_bytes=1_000),
        worker("c", hbm_bytes=1_000),
    )


def test_logits_follow_the_published_formula() -> None:
    policy, view = DynamoKv(), fleet()
    logits = policy.logits(STEP, view, StepPricing(STEP, view))
    assert logits.tolist() == pytest.approx([-0.3, 0.25, 0.0])
    assert policy.decide(STEP, view).placement.decode_worker == "b"


def test_logits_are_finite_when_no_request_waits() -> None:
    decision = DynamoKv().decide(Step(10), fleet_of(worker("a"), worker("b")))
    assert decision.placement.decode_worker == "a"
