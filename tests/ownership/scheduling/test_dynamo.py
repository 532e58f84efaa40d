"""The choices of Dynamo's router, computed by hand."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from ownership.scheduling import FleetView, Role, Step, WorkerLoad, WorkerPrefix
from ownership.scheduling.dynamo import Dynamo
from ownership.scheduling.step_pricing import StepPricing
from tests.ownership.scheduling.fleets import fleet_of, worker

STEP = Step(1_000, {"a": WorkerPrefix(400, 800, 800), "b": WorkerPrefix(0, 200, 1_000)})


def fleet() -> FleetView:
    return fleet_of(
        worker("a", WorkerLoad(queued_tokens=500, context_tokens=2_000)),
        worker("b", WorkerLoad(queued_tokens=100, context_tokens=2_500)),
        worker("c", WorkerLoad(context_tokens=2_300)),
    )


def where(policy: Dynamo, step: Step, view: FleetView) -> tuple[str, str]:
    placement = policy.decide(step, view).placement
    return placement.prefill_worker, placement.decode_worker


def test_credits_are_by_tier() -> None:
    """a: 400 + 0.75 x 400. b: 0.75 x 200 + 0.25 x 800."""
    assert Dynamo(random.Random(1)).credits(STEP, fleet()).tolist() == [700.0, 350.0, 0.0]


def test_costs_are_what_has_no_first_token_and_what_decodes() -> None:
    """a: 500 + 1000 - 700 + 3000. b: 100 + 1000 - 350 + 3500. c: 1000 + 3300."""
    policy, view = Dynamo(random.Random(1)), fleet()
    pricing = StepPricing(STEP, view)
    costs = policy.costs(STEP, pricing, policy.credits(STEP, view))
    assert costs.tolist() == [3_800.0, 4_250.0, 4_300.0]
    assert where(policy, STEP, view) == ("a", "a")
    assert where(Dynamo(random.Random(1), prefill_scale=20.0), STEP, view) == ("b", "b")


def test_credits_beyond_the_prefill_do_not_count_as_decode() -> None:
    """Both prefills cost 0, so the decodes decide."""
    view = fleet_of(
        worker("a", WorkerLoad(context_tokens=20)), worker("b", WorkerLoad(context_tokens=10))
    )
    held = {"a": WorkerPrefix(1_000), "b": WorkerPrefix(1_000)}
    assert where(Dynamo(random.Random(1)), Step(1_000, held), view) == ("b", "b")


def test_equal_costs_are_drawn_evenly() -> None:
    policy, view = Dynamo(random.Random(3)), fleet_of(worker("a"), worker("b"))
    seen = Counter(where(policy, Step(10), view)[0] for _ in range(1_000))
    assert seen["a"] == pytest.approx(500, abs=60)


def pools() -> FleetView:
    return fleet_of(
        worker("p1", WorkerLoad(queued_tokens=900), role=Role.PREFILL),
        worker("p2", role=Role.PREFILL),
        worker("d1", WorkerLoad(context_tokens=5_000), role=Role.DECODE),
        worker("d2", WorkerLoad(context_tokens=2_000), role=Role.DECODE),
    )


def test_pools_take_the_least_loaded_of_each() -> None:
    """p1 900 + 5000 - 1000, p2 5000; with 2,000 of the prompt at p1 it is p1's turn."""
    policy, view = Dynamo(random.Random(1)), pools()
    assert where(policy, Step(5_000), view) == ("p2", "d2")
    assert where(policy, Step(5_000, {"p1": WorkerPrefix(2_000)}), view) == ("p1", "d2")


def test_a_decode_pool_is_chosen_by_load_alone() -> None:
    """By its defaults Dynamo prefills nothing at a decode worker, however much that one has."""
    for name in ("d1", "d2"):
        step = Step(5_000, {name: WorkerPrefix(4_999)})
        assert where(Dynamo(random.Random(1)), step, pools()) == ("p2", "d2")


def test_a_scale_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="prefill_scale"):
        Dynamo(random.Random(1), prefill_scale=-1.0)
