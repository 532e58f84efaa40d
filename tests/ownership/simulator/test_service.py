"""Figures of service, worked by hand: gaps, slowdowns, objectives, fairness, windows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.errors import TraceError
from ownership.simulator.figures import Figures, Objectives
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.session import Session, Trace
from ownership.simulator.workload import Window, Workload
from tests.ownership.simulator.checked_runs import figures
from tests.ownership.simulator.small_fleets import (
    COMPUTE,
    DECODE,
    agents,
    fleet,
    prompt,
    trace_of,
)


def served(trace: Trace, workload: Workload, objectives: Objectives | None = None) -> Figures:
    policy = parse_policy("colocated")
    return simulate(trace, fleet(), policy, workload, objectives=objectives).figures


def test_a_prefill_makes_one_long_gap_in_every_running_answer() -> None:
    answering = [Session(n, (prompt(i, 512, output=50),), 0.0) for n, i in (("a", 0), ("b", 50))]
    other = Session("c", (prompt(100, 8_192, output=1),), 0.3)
    found = figures(trace_of(*answering, other), fleet())
    calm_s = DECODE.decode_step_s(2, 2 * 520)
    late_s = calm_s + DECODE.delay_s(8_192, 8_192**2 / 2, 1)
    assert found.token_p50_s == pytest.approx(calm_s, rel=0.02)
    assert found.token_p99_s == pytest.approx(late_s, rel=0.02)  # 2 of 98 gaps
    assert found.token_mean_s < 1.3 * calm_s


def test_a_task_alone_has_no_slowdown_and_a_queue_has_one() -> None:
    first = prompt(0, 2_048, output=20)
    second = replace(prompt(0, 4_096, output=20), parent=0, think_s=30.0)
    alone = trace_of(Session("a", (first, second), 0.0))
    found = figures(alone, fleet())
    assert found.task_slowdown_mean == pytest.approx(1.0)
    assert found.length_unfairness == 1.0
    prefill_s = COMPUTE.step_s + 8_192 * COMPUTE.token_s + COMPUTE.attention_s * 8_192**2 / 2
    pair = trace_of(
        *(Session(n, (prompt(i, 8_192, output=1),), 0.0) for n, i in (("a", 0), ("b", 50)))
    )
    queued = figures(pair, fleet())
    assert queued.ttft_p50_s == pytest.approx(prefill_s)
    assert queued.task_slowdown_mean == pytest.approx(1.5)
    assert queued.task_slowdown_p99 == pytest.approx(2.0)


def test_short_prompts_behind_long_ones_are_served_unfairly() -> None:
    long = [Session(f"l{i}", (prompt(1_000 * i, 65_536, output=1),), 20.0 * i) for i in range(4)]
    short = [
        Session(f"s{i}", (prompt(9_000 + i, 256, output=1),), 20.0 * i + 0.1) for i in range(4)
    ]
    mixed = sorted([*long, *short], key=lambda session: session.start_s or 0.0)
    assert figures(trace_of(*mixed), fleet()).length_unfairness > 10
    assert figures(trace_of(*long), fleet()).length_unfairness == pytest.approx(1.0)


def test_requests_within_both_objectives_are_goodput() -> None:
    trace = trace_of(
        *(Session(str(i), (prompt(100 * i, 4_096, output=11),), 5.0 * i) for i in range(4))
    )
    found = served(trace, Workload())
    ttft_s, token_s = found.ttft_p99_s, found.token_mean_s
    assert found.attained_share == 1.0
    assert found.goodput_per_s == pytest.approx(4 / found.span_s)
    for late in (Objectives(0.99 * ttft_s, 2 * token_s), Objectives(2 * ttft_s, 0.99 * token_s)):
        assert served(trace, Workload(), late).attained_share == 0.0


def test_a_window_has_the_requests_that_arrive_in_it() -> None:
    trace = agents(12, rate=0.5)
    whole, first, second = (
        served(trace, Workload(window=window)) for window in (Window(), Window(0, 20), Window(20))
    )
    assert 0 < first.requests < whole.requests
    assert first.span_s == 20.0
    sent = [s.start_s or 0.0 for s in trace]
    early = [at_s for at_s in sent if at_s - sent[0] < 20.0]
    assert (first.sessions, second.sessions) == (len(early), len(sent) - len(early))
    assert second.requests < whole.requests
    assert second.prompt_tokens < whole.prompt_tokens
    assert 0 < second.sealed_bytes < whole.sealed_bytes


def test_two_windows_add_up_to_the_whole() -> None:
    """With prompts apart from each other nothing depends on what was sent before."""
    trace = trace_of(
        *(Session(str(i), (prompt(100 * i, 1_024, output=30),), 9.0 * i) for i in range(6))
    )
    whole, early, late = (
        served(trace, Workload(window=window)) for window in (Window(), Window(0, 20), Window(20))
    )
    assert (early.requests, late.requests, whole.requests) == (3, 3, 6)
    assert early.sealed_bytes + late.sealed_bytes == whole.sealed_bytes
    assert early.ssd_written_bytes == late.ssd_written_bytes == whole.ssd_written_bytes // 2
    assert early.token_p99_s == pytest.approx(whole.token_p99_s)
    busy_s = early.busy_share * early.span_s + late.busy_share * late.span_s
    assert busy_s == pytest.approx(whole.busy_share * whole.span_s)


def test_a_constant_population_ends_with_its_window() -> None:
    first = prompt(0, 2_048, output=20)
    later = replace(prompt(0, 4_096, output=20), parent=0, think_s=10_000.0)
    trace = trace_of(Session("a", (first, later), 0.0))
    found = served(trace, Workload(population=1, window=Window(0, 100)))
    assert (found.requests, found.sessions) == (1, 0)
    late = served(trace, Workload(population=1, window=Window(9_000, 10_100)))
    assert late.sessions == 1  # it began before the window


def test_the_halves_of_a_trace_are_its_sessions() -> None:
    trace = agents(7)
    halves = [list(Workload(half=half).trace(trace)) for half in ("first", "second")]
    assert halves[0] + halves[1] == list(trace)
    assert [len(half) for half in halves] == [3, 4]


@pytest.mark.parametrize(("begin_s", "end_s"), [(5.0, 5.0), (-1.0, 5.0), (float("nan"), 5.0)])
def test_a_window_is_a_span_of_time(begin_s: float, end_s: float) -> None:
    with pytest.raises(TraceError, match=r"window: .* is no span of time"):
        Window(begin_s, end_s)
