"""The staging delay: its default, and what it learns from waits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.cost_model import CostModel, StagingDelay
from tests.planner.chains import DENSE, costs_of

STEP_S = 0.010


def test_the_delay_is_half_a_step_before_the_first_wait() -> None:
    assert StagingDelay().delay_s(STEP_S) == STEP_S / 2


def test_consistently_longer_waits_are_learned() -> None:
    staging_delay = StagingDelay()
    for _ in range(3):
        staging_delay.observe(0.002, STEP_S, 0.012)  # by 2 ms longer than a step
        staging_delay.observe(0.021, STEP_S, 0.028)  # than 26 ms
    assert staging_delay.delay_s(STEP_S) == pytest.approx(0.007)
    assert staging_delay.delay_s(2 * STEP_S) == pytest.approx(0.014)


def test_a_wait_for_a_full_engine_changes_nothing() -> None:
    staging_delay = StagingDelay()
    for waited_s in (0.010, 0.010, 3.0):
        staging_delay.observe(0.002, STEP_S, waited_s)
    assert staging_delay.delay_s(STEP_S) == pytest.approx(0.005)


@given(st.lists(st.tuples(*[st.floats(0.0, 1e3)] * 3), max_size=50))
def test_the_delay_is_between_half_a_step_and_a_whole_step(
    seen: list[tuple[float, float, float]],
) -> None:
    staging_delay = StagingDelay()
    for staged_s, step_s, waited_s in seen:
        staging_delay.observe(staged_s, step_s, waited_s)
    assert 0.5 * STEP_S <= staging_delay.delay_s(STEP_S) <= STEP_S


def test_only_waits_while_decoding_are_learned() -> None:
    costs: CostModel = costs_of(DENSE)
    step_s = costs.delays().decode_step_s(4, 0.0)
    costs.learn_wait(0, 0.001, 2 * step_s)
    costs.learn_wait(4, 0.0, 2 * step_s)
    assert costs.staging_delay.delay_s(step_s) == step_s / 2
    costs.learn_wait(4, 0.001, 1.25 * step_s)
    costs.learn_wait(4, 0.001, 1.25 * step_s)
    assert costs.staging_delay.delay_s(step_s) == pytest.approx(0.75 * step_s)
