"""The least cost of waiting for engines: by hand, and compared with every policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.research.bound import bound
from benchmarks.research.shadow_price import Demand, ShadowPrices
from ownership.scheduling.registry import POLICIES
from ownership.simulator.figures import mean
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.session import Request, Session, Trace
from tests.benchmarks.research.checked_bounds import check
from tests.ownership.simulator.small_fleets import (
    AMPLE,
    DECODE,
    DENSE,
    GIB,
    HYBRID,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
    with_pools,
)


def prefills(count: int, seconds: float = 1.0) -> list[list[Demand]]:
    return [[Demand(seconds, seconds)] for _ in range(count)]


def waiting_s(sessions: Sequence[Sequence[Demand]], workers: int, empty_s: float = 0.0) -> float:
    return ShadowPrices(sessions, workers, empty_s, 0.0).waiting_s()


def test_four_at_once_by_hand() -> None:
    """One after the other they wait 0, 1, 2 and 3 s. At a price of 1.5 until 2.5 s each adds 1.5 s,
    which is what waiting for the end of the price adds too, and 3.75 are charged."""
    found = ShadowPrices(prefills(4), 1, 0.0, 0.0)
    assert found.at_s(1.5, 2.5) == pytest.approx(4 * 1.5 - 1.5 * 2.5)
    assert 2.2 < found.waiting_s() <= 6.0


def test_no_session_waits_if_there_are_as_many_workers() -> None:
    assert waiting_s(prefills(4), 4) == 0.0
    assert waiting_s([], 4) == 0.0
    assert waiting_s([[]], 4) == 0.0


def test_decodes_share_steps_but_these_get_longer() -> None:
    """In 200 answers of 100 tokens at once each decode adds a tenth of a step: one batch takes 21
    times as long as one alone, and smaller ones wait for each other."""
    alone = Demand(1.1, 0.0, tokens=100, decoding_s=1.1, first_s=1e-3, last_s=1e-3)
    found = waiting_s([[alone]] * 200, 1, empty_s=0.01)
    together_s = 200 * 100 * (0.01 + 200 * 1e-3 - 0.011)
    assert 0.2 * together_s < found <= together_s


def test_a_session_is_charged_for_all_its_answers() -> None:
    """A second prompt takes as much again, later: until 4 s eight pay for two, or are late."""
    found = ShadowPrices([[Demand(1.0, 1.0), Demand(2.0, 1.0)]] * 8, 1, 0.0, 0.0)
    assert found.at_s(1.0, 4.0) == pytest.approx(8 * 2.0 - 4.0)
    assert found.at_s(1.0, 3.5) == pytest.approx(8 * 1.5 - 3.5)


def test_a_request_waits_at_most_until_another_can_compute_its_prompt() -> None:
    """Another request could do half of 2 s, but comes a quarter of a second too late."""
    found = ShadowPrices([[Demand(2.0, 1.0, 1.0, 0.25)]], 1, 0.0, 0.0)
    assert found.at_s(1.0, 10.0) + 10.0 == pytest.approx(1.25)
    assert found.at_s(0.125, 10.0) + 1.25 == pytest.approx(0.25)


def test_requests_after_the_end_are_not_charged() -> None:
    """The second of a session is not done by then, and late by half a second at least."""
    found = ShadowPrices([[Demand(1.0, 1.0), Demand(2.0, 1.0)]], 1, 0.0, 0.0)
    assert found.at_s(4.0, 2.5) == pytest.approx(min(8.0, max(4.0, 0.5), 1.5) - 4.0 * 2.5)


@given(
    works_s=st.lists(st.floats(0.0, 1.0), min_size=1, max_size=20),
    empty_s=st.floats(0.0, 1.0),
    price=st.floats(0.0, 50.0),
)
def test_no_step_takes_less_time_than_its_tokens(
    works_s: list[float], empty_s: float, price: float
) -> None:
    step_s = empty_s + sum(works_s)
    alone = [[Demand(0.0, 0.0, tokens=1, first_s=work_s, last_s=work_s)] for work_s in works_s]
    end_s = 1e4  # behind all of them
    tokens_s = ShadowPrices(alone, 1, empty_s, 0.0).at_s(price, end_s) + price * end_s
    assert tokens_s <= (len(works_s) + price) * step_s + 1e-6


@st.composite
def rush(draw: st.DrawFn) -> Trace:
    """Prompts that come nearly at once, some with a turn to follow."""
    sessions = []
    for number in range(draw(st.integers(4, 12))):
        tokens = draw(st.sampled_from([256, 2_048, 12_288]))
        first = 1_000 * draw(st.integers(0, number))
        turns = [prompt(first, tokens, output=draw(st.sampled_from([1, 40, 400])))]
        if draw(st.booleans()):
            turns.append(replace(prompt(first, tokens + 512, output=30), parent=0, think_s=0.1))
        sessions.append(Session(str(number), tuple(turns), 0.02 * number))
    return trace_of(*sessions)


@settings(max_examples=40)
@given(
    trace=rush(),
    policy=st.sampled_from(sorted(POLICIES)),
    workers=st.integers(1, 2),
    context_s=st.sampled_from([0.0, 1e-8, 1e-6]),
    ample=st.booleans(),
)
def test_no_policy_beats_the_bound_in_a_rush(
    trace: Trace, policy: str, workers: int, context_s: float, ample: bool
) -> None:
    capacity = AMPLE if ample else TierBytes(3 * GIB, GIB, 4 * GIB)
    decode = DECODE._replace(context_s=context_s)
    spec = fleet(workers, capacity=capacity, cost_model=costs(decode=decode))
    check(trace, spec, with_pools(policy, workers))


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    model=st.sampled_from([DENSE, HYBRID]),
    policy=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(["", "+answers=kept"]),
)
def test_no_policy_beats_the_bound_when_all_sessions_begin_at_once(
    seed: int, model: str, policy: str, options: str
) -> None:
    check(agents(8, 20.0, seed), fleet(1, model), with_pools(policy + options, 1))


def test_with_many_requests_the_bound_is_above_that_of_each_alone() -> None:
    requests: list[Request] = [prompt(1_000 * i, 8_192, output=200) for i in range(12)]
    trace = trace_of(*(Session(str(i), (r,), 0.0) for i, r in enumerate(requests)))
    spec = fleet(2)
    found = check(trace, spec, "ownerserve")
    least = bound(trace, spec, 256)
    assert found.task_mean_s < 2.0 * (mean(least.task_s) + least.task_queue_s)
    assert least.task_queue_s > 0.09 * mean(least.task_s)
    assert least.ttft_queue_s > 0.5 * mean(least.ttft_s)
