"""Steps that are refused."""

from __future__ import annotations

import pytest

from ownership.scheduling import OwnerServe, Step, StepClass
from ownership.scheduling.admission import AdmitAll, GatedPolicy, TtftObjective
from tests.ownership.scheduling.fleets import FREE, fleet_of, worker

POLICY = OwnerServe(FREE)


def refused(tokens: int, objective: TtftObjective) -> bool:
    """1 ms per token."""
    policy = GatedPolicy(POLICY, objective)
    assert policy.name == "ownerserve"
    return policy.decide(Step(tokens), fleet_of(worker("a"))).refusal is not None


def test_a_step_that_would_miss_the_objective_is_refused() -> None:
    objective = TtftObjective(0.5)
    assert not refused(499, objective)
    assert refused(501, objective)


def test_a_class_may_have_an_objective_of_its_own() -> None:
    objective = TtftObjective(0.5, {StepClass.NEW_LONG_PREFIX: 20.0})
    assert not refused(10_000, objective)
    assert refused(30_000, objective)
    assert refused(600, objective)


def test_a_refusal_says_by_how_much() -> None:
    decision = GatedPolicy(POLICY, TtftObjective(0.5)).decide(Step(1_000), fleet_of(worker("a")))
    assert decision.refusal is not None
    assert decision.refusal.reason == "first token after 1 s, the objective is 0.5 s"
    assert decision.placement.decode_worker == "a"


def test_a_prompt_that_fits_no_worker_is_never_admitted() -> None:
    small = fleet_of(worker("a", hbm_bytes=10))
    for admission in (AdmitAll(), TtftObjective(1e9)):
        assert GatedPolicy(POLICY, admission).decide(Step(100), small).refusal is not None


def test_an_objective_is_above_0() -> None:
    with pytest.raises(ValueError, match="above 0 s"):
        TtftObjective(1.0, {StepClass.COLD_RESUME: 0.0})
