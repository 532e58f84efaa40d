"""Dynamo's logits, computed by hand."""

from __future__ import annotations

import math
import random
from collections import Counter

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
    policy, view = DynamoKv(random.Random(1)), fleet()
    logits = policy.logits(STEP, view, StepPricing(STEP, view))
    assert logits.tolist() == pytest.approx([-0.3, 0.25, 0.0])
    assert policy.decide(STEP, view).placement.decode_worker == "b"


def test_logits_are_finite_when_no_request_waits() -> None:
    decision = DynamoKv(random.Random(1)).decide(Step(10), fleet_of(worker("a"), worker("b")))
    assert decision.placement.decode_worker == "a"


def test_a_temperature_draws_by_softmax() -> None:
    """Range 0.55, temperature 0.5: weights exp(-2), 1, exp(-0.25 / 0.275)."""
    policy, view = DynamoKv(random.Random(3), temperature=0.5), fleet()
    draws = 4_000
    seen = Counter(policy.decide(STEP, view).placement.decode_worker for _ in range(draws))
    weights = {"a": math.exp(-2.0), "b": 1.0, "c": math.exp(-0.25 / 0.275)}
    for name, weight in weights.items():
        assert seen[name] / draws == pytest.approx(weight / sum(weights.values()), abs=0.03)


def test_equal_logits_are_drawn_evenly() -> None:
    policy = DynamoKv(random.Random(3), temperature=1.0)
    view = fleet_of(worker("a"), worker("b"))
    seen = Counter(policy.decide(Step(10), view).placement.decode_worker for _ in range(1_000))
    assert seen["a"] == pytest.approx(500, abs=60)


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(ValueError, match="temperature"):
        DynamoKv(random.Random(1), temperature=-1.0)
