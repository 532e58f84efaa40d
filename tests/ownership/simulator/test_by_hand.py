"""Small simulations worked by hand: when tokens come."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.planner.cost_model import RequestOverhead
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import figures
from tests.ownership.simulator.small_fleets import (
    COMPUTE,
    DECODE,
    GIB,
    costs,
    fleet,
    prompt,
    trace_of,
)


def test_one_request_by_hand() -> None:
    trace = trace_of(Session("a", (prompt(0, 10_240, output=11),), 5.0))
    found = figures(trace, fleet())
    step_s, token_s, pair_s = COMPUTE
    # Two steps of 8,192 and 2,048 tokens, which attend to each other.
    prefill_s = 2 * step_s + 10_240 * token_s + pair_s * 10_240**2 / 2
    assert found.ttft_p50_s == pytest.approx(prefill_s)
    # The first token comes from the prefill, each of ten more from a step.
    decode_s = sum(DECODE.decode_step_s(1, 10_240 + i) for i in range(10))
    assert found.step_p50_s == pytest.approx(prefill_s + decode_s)
    assert found.token_mean_s == pytest.approx(decode_s / 10)
    assert (found.saved_tokens, found.busy_share) == (0, pytest.approx(1.0))


def test_a_prefill_delays_the_decodes_in_its_step() -> None:
    other = Session("b", (prompt(100, 1_024, output=1),), 0.2)
    alone = Session("a", (prompt(0, 1_024, output=60),), 0.0)
    found = figures(trace_of(alone, other), fleet())
    late_s = DECODE.delay_s(1_024, 1_024**2 / 2, 1)
    calm = figures(trace_of(alone), fleet())
    assert found.step_p95_s == pytest.approx(calm.step_p95_s + late_s)
    assert found.decode_late_share == pytest.approx(late_s / (calm.token_mean_s * 59 + late_s))
    # It waits for the end of the step in which it came: not longer.
    assert found.queue_mean_s < DECODE.decode_step_s(1, 1_100) / 2


def test_scheduling_delays_the_engine_and_the_front_end_only_the_request() -> None:
    cost_model = costs()
    cost_model.overhead = overhead = RequestOverhead(0.05, 1e-6, 0.03, 2e-6)
    spec = fleet(cost_model=cost_model)
    other = Session("b", (prompt(100, 1_024, output=1),), 0.2)
    alone = Session("a", (prompt(0, 1_024, output=60),), 0.0)
    calm, found = figures(trace_of(alone), spec), figures(trace_of(alone, other), spec)
    prefill_s = COMPUTE.step_s + 1_024 * COMPUTE.token_s + COMPUTE.attention_s * 1_024**2 / 2
    assert overhead.delay_s(1_024) == pytest.approx(0.051_024)
    assert overhead.blocking_s(1_024) == pytest.approx(0.032_048)
    assert calm.ttft_p50_s == pytest.approx(0.051_024 + 0.032_048 + prefill_s)
    late_s = 0.032_048 + DECODE.delay_s(1_024, 1_024**2 / 2, 1)
    assert found.step_p95_s == pytest.approx(calm.step_p95_s + late_s)
    decodes_s = calm.token_mean_s * 59 + late_s
    assert found.decode_late_share == pytest.approx(late_s / decodes_s)


def test_every_decode_is_delayed() -> None:
    pair = [Session(n, (prompt(i, 512, output=80),), 0.0) for n, i in (("a", 0), ("b", 50))]
    other = Session("c", (prompt(100, 1_024, output=1),), 0.3)
    found = figures(trace_of(*pair, other), fleet())
    # The second prompt of the pair is computed during the first one's decode.
    late_s = 2 * DECODE.delay_s(1_024, 1_024**2 / 2, 1) + DECODE.delay_s(512, 512**2 / 2, 1)
    assert found.decode_late_share * found.token_mean_s * 2 * 79 == pytest.approx(late_s)


def test_a_load_overlaps_with_the_first_step_except_for_its_first_layer() -> None:
    again = [Session(n, (prompt(0, 8_192, output=1),), s) for n, s in (("a", 0.0), ("c", 20.0))]
    again.insert(1, Session("b", (prompt(900, 8_192, output=1),), 9.0))
    fast = costs(bytes_per_s=100e9)
    capacity = TierBytes(131_072 * 8_300, 8 * GIB)
    found = figures(trace_of(*again), fleet(capacity=capacity, cost_model=fast))
    loaded = 8_192 - 256
    load_s = 1e-4 + loaded * 131_072 / 200e9
    compute_s = COMPUTE.step_s + 256 * COMPUTE.token_s
    compute_s += COMPUTE.attention_s * 256 * (loaded + 128)
    assert found.ttft_p50_s > (first_s := max(load_s, compute_s) + load_s / 32)
    whole_s = 3 * found.ttft_mean_s - 2 * found.ttft_p50_s
    assert whole_s == pytest.approx(first_s)
    assert found.restore_exposed_mean_s == pytest.approx((first_s - compute_s) / 3)


def test_the_next_turn_comes_after_the_answer_and_the_think_time() -> None:
    first = prompt(0, 2_048, output=5)
    second = replace(prompt(0, 2_560, output=5), parent=0, think_s=7.0)
    found = figures(trace_of(Session("a", (first, second), 1.0)), fleet())
    assert found.task_mean_s == pytest.approx(7.0 + found.step_p50_s + found.step_p99_s)
    assert found.task_wait_mean_s == pytest.approx(found.task_mean_s - 7.0)
    assert found.hbm_hit_tokens == 2_048
    assert found.owner_hit_rate == 1.0


def test_a_small_step_limit_makes_more_steps() -> None:
    trace = trace_of(Session("a", (prompt(0, 4_096, output=1),), 0.0))
    found = figures(trace, fleet(limits=EngineLimits(1_024, 8)))
    assert found.ttft_p50_s == pytest.approx(
        4 * COMPUTE.step_s + 4_096 * COMPUTE.token_s + COMPUTE.attention_s * 4_096**2 / 2
    )
