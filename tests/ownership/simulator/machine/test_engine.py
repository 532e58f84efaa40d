from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.compute_model import InterferenceCoefficients
from ownership.simulator.machine.channel import Channel, transfer_between
from ownership.simulator.machine.engine import StepTimes
from tests.ownership.simulator.small_fleets import AT_ONCE, DECODE, FREE, costs

TIMES = StepTimes(costs())


@given(st.integers(1, 200), st.integers(0, 1_000_000), st.integers(1, 50))
def test_consecutive_steps_take_the_sum_of_their_times(
    decodes: int, context: int, steps: int
) -> None:
    each = [TIMES.decode_s(decodes, context + i * decodes) for i in range(steps)]
    assert TIMES.decode_s(decodes, context, steps) == pytest.approx(sum(each))


@given(
    st.integers(1, 200), st.integers(0, 1_000_000), st.floats(0, 60),
    st.sampled_from([DECODE, DECODE._replace(context_s=0.0)]),
)  # fmt: skip
def test_the_current_step_at_a_time(
    decodes: int, context: int, elapsed_s: float, delays: InterferenceCoefficients
) -> None:
    times = StepTimes(costs(decode=delays))
    steps = times.decode_steps_until(decodes, context, elapsed_s)
    assert times.decode_s(decodes, context, steps) >= elapsed_s * (1 - 1e-9)
    assert steps == 1 or times.decode_s(decodes, context, steps - 1) < elapsed_s * (1 + 1e-9)


def test_an_engine_that_takes_no_time() -> None:
    times = StepTimes(costs(compute=FREE, decode=AT_ONCE))
    assert (times.prefill_s(1000, 1e6), times.decode_s(3, 100, 5)) == (0.0, 0.0)
    assert times.decode_steps_until(3, 100, 0.0) == 1


def test_transfers_wait_for_each_other() -> None:
    source, target, other = Channel(), Channel(), Channel()
    assert transfer_between(source, target, 1.0, 2.0) == 3.0
    assert transfer_between(source, other, 1.0, 2.0) == 5.0
    assert other.start(6.0, 1.0) == 7.0
    assert (other.pending_s(6.5), other.pending_s(9.0)) == (0.5, 0.0)
