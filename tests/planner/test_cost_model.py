"""The overhead of a request: fitted among outliers, blocking or not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.cost_model import (
    HandoffCost,
    OverheadSample,
    RequestOverhead,
)

coefficients = st.floats(0.0, 1e-2)


@given(coefficients, st.floats(0.0, 1e-5), coefficients, st.floats(0.0, 1e-5))
def test_known_coefficients_are_recovered(f0: float, f1: float, s0: float, s1: float) -> None:
    overhead = RequestOverhead(f0, f1, s0, s1)
    samples = [
        OverheadSample(n, overhead.delay_s(n), overhead.blocking_s(n)) for n in (64, 96, 500, 4_000)
    ]
    assert RequestOverhead.fitted(samples) == pytest.approx(overhead, abs=1e-9)


def test_samples_delayed_by_a_busy_machine_are_ignored() -> None:
    samples = [OverheadSample(n, 1e-3, 2e-3 + 1e-6 * n) for n in range(64, 4_000, 200)]
    for held_up in (3, 9, 15):
        tokens, frontend_s, scheduling_s = samples[held_up]
        samples[held_up] = OverheadSample(tokens, 10 * frontend_s, scheduling_s + 0.5)
    found = RequestOverhead.fitted(samples)
    assert found == pytest.approx(RequestOverhead(1e-3, 0.0, 2e-3, 1e-6), rel=1e-6)


def test_steps_predicted_too_long_give_no_negative_overhead() -> None:
    samples = [OverheadSample(n, 1e-3, -1e-3 - 1e-6 * n) for n in (64, 128, 256)]
    assert RequestOverhead.fitted(samples) == (pytest.approx(1e-3), 0.0, 0.0, 0.0)


def test_one_length_gives_no_slope_and_no_sample_no_overhead() -> None:
    assert RequestOverhead.fitted([OverheadSample(64, 1.0, 2.0)] * 2) == (1.0, 0.0, 2.0, 0.0)
    assert RequestOverhead.fitted([]) == RequestOverhead()


def test_the_front_end_delays_and_scheduling_blocks() -> None:
    overhead = RequestOverhead(1.0, 0.1, 2.0, 0.2)
    assert (overhead.delay_s(10), overhead.blocking_s(10)) == (2.0, 4.0)
    assert overhead.total_s(10) == 6.0


def test_the_cost_of_a_handoff_is_a_line_through_most_prompts() -> None:
    handoff = HandoffCost(0.05, 2e-5)
    samples = [(tokens, handoff.delay_s(tokens)) for tokens in (64, 96, 500, 900, 1_900)]
    held_up = [(tokens, seconds + (tokens == 500)) for tokens, seconds in samples]
    assert HandoffCost.fitted(samples) == pytest.approx(handoff)
    assert HandoffCost.fitted(held_up) == pytest.approx(handoff)
    assert HandoffCost.fitted([]) == HandoffCost(0.0, 0.0)
