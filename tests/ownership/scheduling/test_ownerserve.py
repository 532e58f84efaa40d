"""By its own prices the default policy is never worse than staying, or than moving nothing."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.errors import NoWorkerError
from hetero_connector.planner.compute_model import InterferenceCoefficients
from ownership.scheduling import (
    FleetView,
    OwnerServe,
    PlacementDecision,
    PlacementWeights,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
)
from ownership.scheduling import PlacementAction as Action
from tests.ownership.scheduling.candidates import candidates
from tests.ownership.scheduling.fleets import (
    BYTE_A_TOKEN,
    FREE,
    costs_of,
    fleet_of,
    steps,
    worker,
    workers,
)

POLICY = OwnerServe()
CHEAP = OwnerServe(FREE)


def decide(found: list[WorkerView], step: Step) -> PlacementDecision:
    fleet = FleetView(BYTE_A_TOKEN, found)
    fleet.prefill_demand = 0.4 * len(found)
    return POLICY.decide(step, fleet)


@given(workers(), steps())
def test_the_choice_is_the_cheapest_of_all_candidates(found: list[WorkerView], step: Step) -> None:
    decision = decide(found, step)
    assert decision.predicted.total_s == pytest.approx(min(candidates(decision).values()))


@given(workers(), steps())
def test_stay_and_never_transfer_are_always_candidates(found: list[WorkerView], step: Step) -> None:
    decision = decide(found, step)
    untransferred = {
        x.decode_worker: total_s
        for x, total_s in candidates(decision).items()
        if x.source_worker is None and x.prefill_worker == x.decode_worker
    }
    assert untransferred.keys() == {x.name for x in found if x.load.accepting}
    assert all(decision.predicted.total_s <= s * (1 + 1e-9) for s in untransferred.values())


@given(workers(), steps(), st.randoms(use_true_random=False))
def test_the_order_of_workers_does_not_matter(
    found: list[WorkerView], step: Step, rng: random.Random
) -> None:
    shuffled = list(found)
    rng.shuffle(shuffled)
    held = list(step.prefixes.items())
    rng.shuffle(held)
    other = Step(
        step.prompt_tokens, dict(held), step.session_id, step.owner, step.boundary_tokens,
        step.output_tokens, step.forked,
    )  # fmt: skip
    assert decide(found, step).placement == decide(shuffled, other).placement


@given(workers(), steps(), st.integers(0, 3), st.integers(1, 100_000))
def test_a_longer_queue_never_attracts(
    found: list[WorkerView], step: Step, at: int, more: int
) -> None:
    """No candidate gets cheaper, and a worker that had no part gets none."""
    fleet = FleetView(BYTE_A_TOKEN, found)
    at %= len(found)
    name, load = found[at].name, found[at].load
    before = POLICY.decide(step, fleet)
    was = candidates(before)
    fleet.set_load(name, load._replace(queued_tokens=load.queued_tokens + more))
    after = POLICY.decide(step, fleet)
    for placement, total_s in candidates(after).items():
        if placement in was:
            assert total_s >= was[placement] - 1e-9
    computes = {after.placement.decode_worker, after.placement.prefill_worker}
    if name not in {before.placement.decode_worker, before.placement.prefill_worker}:
        assert name not in computes


@given(workers(), steps())
def test_one_worker_owns_the_session_and_it_accepts(found: list[WorkerView], step: Step) -> None:
    placement = decide(found, step).placement
    accepting = {x.name for x in found if x.load.accepting}
    assert placement.decode_worker in accepting
    assert placement.prefill_worker in accepting
    assert placement.source_worker != placement.prefill_worker


def test_a_session_stays_when_all_is_equal() -> None:
    held = {"a": WorkerPrefix(0, 90, 90), "b": WorkerPrefix(0, 90, 90)}
    decision = CHEAP.decide(Step(120, held, "s", "b", 90), fleet_of(worker("a"), worker("b")))
    assert decision.placement.decode_worker == "b"
    assert decision.placement.action is Action.COLOCATED_PREFILL


def test_of_equal_workers_the_first_by_name_is_taken() -> None:
    decision = CHEAP.decide(Step(100), fleet_of(worker("b"), worker("a"), worker("c")))
    assert decision.placement.decode_worker == "a"


BUSY = WorkerLoad(queued_tokens=1_000)


def held_by_a(tokens: int) -> dict[str, WorkerPrefix]:
    return {"a": WorkerPrefix(tokens, tokens, tokens)}


FORK = Step(1_000, held_by_a(900), "s", "a", 900, forked=True)


@pytest.mark.parametrize(
    ("step", "load_of_a", "expected", "total_s"),
    [
        # the owner is idle: 100 new tokens there take 0.1 s
        (Step(1_000, held_by_a(900), "s", "a", 900), WorkerLoad(), Action.COLOCATED_PREFILL, 0.1),
        # it is busy for 1 s: 0.09 s of reading and 0.1 s of computing at b are less
        (Step(1_000, held_by_a(900), "s", "a", 900), BUSY, Action.STATE_MIGRATION, 0.19),
        # the same, but a sibling stays at a: a copy
        (FORK, BUSY, Action.ARTIFACT_FETCH, 0.19),
        # the prefix belongs to others
        (Step(1_000, held_by_a(900)), BUSY, Action.ARTIFACT_FETCH, 0.19),
        # 1 token to compute at its owner
        (Step(901, held_by_a(900), "s", "a", 900), WorkerLoad(), Action.DECODE_CONTINUATION, 0.001),
    ],
)  # fmt: skip
def test_each_action_is_the_cheapest_of_some_step(
    step: Step, load_of_a: WorkerLoad, expected: Action, total_s: float
) -> None:
    decision = CHEAP.decide(step, fleet_of(worker("a", load_of_a), worker("b")))
    assert decision.placement.action is expected
    assert decision.predicted.total_s == pytest.approx(total_s)


def test_a_session_stays_until_waiting_costs_more_than_a_copy() -> None:
    """Its 900 tokens elsewhere cost 0.9 s of copies, 0.09 s of reading; 0.1 s computes anywhere."""
    step = Step(1_000, held_by_a(900), "s", "a", 900)
    policy = OwnerServe(PlacementWeights(0.0, 1.0))
    for queued, owner in ((980, "a"), (1_000, "b")):
        load = WorkerLoad(queued_tokens=queued)
        decision = policy.decide(step, fleet_of(worker("a", load), worker("b")))
        assert decision.placement.decode_worker == owner


def test_a_short_match_elsewhere_is_computed_again() -> None:
    """a has 10 tokens: reading them costs 1 s of latency, computing 10 ms."""
    slow = costs_of(peer_s=0.1)
    fleet = fleet_of(worker("a", BUSY), worker("b", costs=slow))
    decision = CHEAP.decide(Step(500, held_by_a(10)), fleet)
    assert decision.placement.action is Action.TAIL_RECOMPUTE
    assert decision.placement.decode_worker == "b"


def test_a_long_prompt_is_prefilled_where_that_is_fast() -> None:
    """b computes ten times as fast as a, and decodes slowly: 10,000 tokens take it 1 s.

    Handed off: 1 + 9,999 bytes 0.9999 + the last token 0.001 + decoding 0.1 = 2.1.
    Alone a takes 10.1 s, b 1 + 100 x 1.
    """
    slow, fast = (InterferenceCoefficients(s, 0.0, 0.0, 0.0, 0.0, 0.0) for s in (1.0, 0.001))
    fleet = fleet_of(
        worker("a", costs=costs_of(interference=fast)),
        worker("b", costs=costs_of(token_s=1e-4, interference=slow)),
    )
    decision = CHEAP.decide(Step(10_000, output_tokens=100), fleet)
    assert decision.placement.action is Action.REMOTE_PREFILL
    assert (decision.placement.prefill_worker, decision.placement.decode_worker) == ("b", "a")
    assert decision.predicted.total_s == pytest.approx(2.1009)


def test_a_prompt_that_fits_nowhere_is_refused() -> None:
    decision = CHEAP.decide(Step(2_000), fleet_of(worker("a", hbm_bytes=1_000)))
    assert decision.refusal == "the prompt's pages fit no worker"
    assert decision.predicted.ttft_s == math.inf


def test_a_fleet_without_accepting_workers_raises() -> None:
    closed = worker("a", WorkerLoad(accepting=False))
    with pytest.raises(NoWorkerError, match="no worker accepts"):
        CHEAP.decide(Step(10), fleet_of(closed))


def test_a_decision_is_explained_by_the_figures_it_was_made_by() -> None:
    fleet = fleet_of(worker("a"), worker("b"))
    decision = CHEAP.decide(Step(1_000), fleet)
    fleet.set_load("a", BUSY)
    assert decision.predicted.total_s == pytest.approx(1.0)
    assert len(candidates(decision)) == 4
