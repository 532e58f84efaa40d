"""Steps that are refused."""

from __future__ import annotations

import pytest

from ownership.scheduling import OwnerServe, Step
from ownership.scheduling.admission import GatedPolicy
from tests.ownership.scheduling.fleets import FREE, fleet_of, worker

POLICY = OwnerServe(FREE)


def test_a_step_that_would_miss_the_objective_is_refused() -> None:
    """1 ms per token."""
    policy = GatedPolicy(POLICY, 0.5)
    assert policy.name == "ownerserve"
    assert policy.decide(Step(499), fleet_of(worker("a"))).refusal is None
    assert policy.decide(Step(501), fleet_of(worker("a"))).refusal is not None


def test_a_refusal_says_by_how_much() -> None:
    decision = GatedPolicy(POLICY, 0.5).decide(Step(1_000), fleet_of(worker("a")))
    assert decision.refusal is not None
    assert decision.refusal.reason == "first token after 1 s, the objective is 0.5 s"
    assert decision.placement.decode_worker == "a"


def test_a_prompt_that_fits_no_worker_is_never_admitted() -> None:
    small = fleet_of(worker("a", hbm_bytes=10))
    refusal = GatedPolicy(POLICY, 1e9).decide(Step(100), small).refusal
    assert refusal is not None
    assert refusal.reason == "the prompt's pages fit no worker"


def test_an_objective_is_above_0() -> None:
    with pytest.raises(ValueError, match="above 0 s"):
        GatedPolicy(POLICY, 0.0)
