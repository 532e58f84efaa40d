"""A copy costs what it displaces: by the state that sessions need, over the cache's size."""

from __future__ import annotations

import pytest

from ownership.scheduling import (
    OwnerServe,
    PlacementWeights,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
)
from ownership.scheduling.step_pricing import Route, StepPricing
from tests.ownership.scheduling.fleets import fleet_of, worker

HELD = {"a": WorkerPrefix(0, 900, 900)}


def needed(tokens: int, idle_tokens: float = 0.0) -> WorkerView:
    """A worker of which sessions need so many of 1,000 bytes; a token is a byte."""
    load = WorkerLoad(context_tokens=tokens, returning_tokens=idle_tokens)
    return worker("b", load, cache_bytes=1_000)


@pytest.mark.parametrize(
    ("view", "factor"),
    [
        (worker("b", WorkerLoad(context_tokens=10**9)), 1.0),
        (needed(0), 1 / 6),
        (needed(80), 1 / 6),
        (needed(250), 0.5),
        (needed(100, 400.0), 1.0),
        (needed(1_000), 2.0),
        (needed(10**9), 3.0),
    ],
    ids=["unknown", "idle", "room", "a quarter", "half", "full", "more than full"],
)
def test_the_price_follows_what_sessions_need(view: WorkerView, factor: float) -> None:
    factors = fleet_of(view).table().load_terms.copy_factor
    assert factors.tolist() == pytest.approx([factor])


@pytest.mark.parametrize(
    ("step", "view", "weights", "kappas"),
    [
        (Step(1_000, HELD, "s"), needed(0), PlacementWeights(copy=3.0), (0.5, 3.0)),
        (Step(1_000, HELD, "s"), needed(1_000), PlacementWeights(copy=3.0), (6.0, 6.0)),
        (Step(1_000, HELD), needed(0), PlacementWeights(copy=3.0), (3.0, 3.0)),
        (Step(1_000, HELD, "s"), needed(0), PlacementWeights(copy=3.0, fullness=False), (3.0, 3.0)),
    ],
    ids=["room", "full", "no session", "off"],
)
def test_the_price_where_a_copy_is_made(
    step: Step, view: WorkerView, weights: PlacementWeights, kappas: tuple[float, float]
) -> None:
    """b lacks 900 tokens that a has, and all but the last of a prompt that a computes for it."""
    pricing = StepPricing(step, fleet_of(worker("a"), view), weights)
    copied_s = [pricing.terms(route).copy_s for route in (Route(1, 1), Route(1, 0))]
    assert copied_s == pytest.approx([0.9 * kappas[0], 0.999 * kappas[1]])


def test_a_session_leaves_a_busy_worker_only_for_one_with_room() -> None:
    busy = worker("a", WorkerLoad(queued_tokens=1_000))
    step = Step(1_000, HELD, "s", "a", 900)
    room, full = (
        OwnerServe().decide(step, fleet_of(busy, needed(tokens))).placement for tokens in (0, 1_000)
    )
    assert (room.decode_worker, full.decode_worker) == ("b", "a")
