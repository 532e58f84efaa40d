"""No policy beats the bound, whatever it is; small ones by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.research.bound import bound
from benchmarks.simulator import fleet_of
from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.state.memory import EVICTIONS, TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from tests.benchmarks.research.checked_bounds import check
from tests.ownership.simulator.small_fleets import (
    COMPUTE,
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

ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 999),
    model=st.sampled_from([DENSE, HYBRID]),
    scheduling=st.sampled_from(sorted(POLICIES)),
    eviction=st.sampled_from(EVICTIONS),
    options=st.sampled_from(
        ["", "+answers=kept", "+checkpoints=full", "+tiers=gpu", "+restores=always_load"]
    ),
    workers=st.integers(1, 3),
    rate=st.sampled_from([0.02, 1.0]),
    ample=st.booleans(),
)
def test_no_policy_beats_the_oracle(
    seed: int,
    model: str,
    scheduling: str,
    eviction: str,
    options: str,
    workers: int,
    rate: float,
    ample: bool,
) -> None:
    gib = 40 * GIB if ample else (6 * GIB if model == DENSE else GIB // 2)
    capacity = TierBytes(gib, gib // 2, gib)
    spec = fleet(workers, model, capacity, roles=ROLES[:workers])
    policy = with_pools(f"{scheduling}+eviction={eviction}{options}", workers)
    check(agents(5, rate, seed), spec, policy)


@settings(max_examples=10)
@given(
    seed=st.integers(0, 99),
    model=st.sampled_from([DENSE, HYBRID, "gpt-oss-120b"]),
    policy=st.sampled_from(["ownerserve", "dynamo", "static_pd"]),
    rate=st.sampled_from([0.1, 5.0]),
)
def test_no_policy_beats_the_oracle_on_accelerators(
    seed: int, model: str, policy: str, rate: float
) -> None:
    """Steps are no lines there."""
    trace = agents(6, rate, seed)
    check(trace, fleet_of(model, 2, 2), with_pools(policy, 2))


def test_one_request_on_its_own_reaches_the_bound() -> None:
    trace = trace_of(Session("a", (prompt(0, 10_240, output=11),), 5.0))
    found = check(trace, fleet(), "colocated")
    least = bound(trace, fleet(), 256)
    assert found.ttft_p50_s == pytest.approx(least.ttft_s[0])
    assert found.step_p50_s == pytest.approx(least.step_s[0])
    assert found.task_mean_s == pytest.approx(least.task_s[0])


def test_a_session_by_hand() -> None:
    """2,048 tokens, an answer of 5, thinking for 7 s, and 512 tokens more."""
    first = prompt(0, 2_048, output=5)
    second = replace(prompt(0, 2_560, output=1), parent=0, think_s=7.0)
    least = bound(trace_of(Session("a", (first, second), 1.0)), fleet(), 256)
    step_s, token_s, pair_s = COMPUTE
    first_s = step_s + 2_048 * token_s + pair_s * 2_048**2 / 2
    first_s += sum(DECODE.decode_step_s(1, 2_048 + i) for i in range(4))
    second_s = step_s + 512 * token_s + pair_s * 512 * (2_048 + 256)
    assert least.task_s[0] == pytest.approx(first_s + 7.0 + second_s)
    assert least.task_wait_s[0] == pytest.approx(first_s + second_s)
    assert least.saved_tokens == 2_048


def pair(second_s: float, think: bool = False) -> Trace:
    """Two sessions that begin with the same 4,096 tokens and go on with 256 of their own."""
    one = prompt(0, 4_096)
    made = [replace(one, input_tokens=4_352, blocks=one.blocks.of_runs([(0, 16), (i, 1)]))
            for i in (100, 200)]  # fmt: skip
    if think:  # the second comes after an answer that it does not share anything with
        first = prompt(900, 256, output=1)
        later = replace(made[1], parent=0, think_s=second_s)
        return trace_of(Session("a", (made[0],), 0.0), Session("b", (first, later), 0.0))
    return trace_of(Session("a", (made[0],), 0.0), Session("b", (made[1],), second_s))


def prefill_s(tokens: int, context: int) -> float:
    step_s, token_s, pair_s = COMPUTE
    return step_s + token_s * tokens + pair_s * tokens * (context + tokens / 2)


def test_the_first_to_come_computes_what_is_shared() -> None:
    least = bound(pair(second_s=1.0), fleet(), 256)
    assert least.ttft_s[0] == pytest.approx(prefill_s(4_352, 0))
    assert least.ttft_s[1] == pytest.approx(prefill_s(256, 4_096))
    assert least.saved_tokens == 4_096


def test_a_request_may_wait_for_one_that_comes_soon() -> None:
    """Computing all takes 0.054 s: after 0.03 s another might have computed what they share."""
    least = bound(pair(second_s=0.03), fleet(), 256)
    assert least.ttft_s[0] == pytest.approx(prefill_s(256, 4_096))
    assert bound(pair(second_s=0.06), fleet(), 256).ttft_s[0] == pytest.approx(prefill_s(4_352, 0))


def test_a_request_after_an_answer_may_come_after_any_other() -> None:
    least = bound(pair(second_s=50.0, think=True), fleet(), 256)
    assert least.ttft_s[0] == pytest.approx(prefill_s(4_352, 0))
    assert least.ttft_s[2] == pytest.approx(prefill_s(256, 4_096))
    early = bound(pair(second_s=0.0, think=True), fleet(), 256)
    assert early.ttft_s[0] == pytest.approx(prefill_s(256, 4_096))


def test_chunks_that_only_followers_use_are_computed() -> None:
    """A prompt that two others continue: each computes its own end."""
    first = prompt(0, 1_024, output=1)
    ends = [
        replace(first, input_tokens=1_536, blocks=first.blocks.of_runs([(0, 4), (i, 2)]),
                parent=0, think_s=1.0)
        for i in (100, 200)
    ]  # fmt: skip
    least = bound(trace_of(Session("a", (first, *ends), 0.0)), fleet(), 256)
    assert list(least.ttft_s) == pytest.approx(
        [prefill_s(1_024, 0), prefill_s(512, 1_024), prefill_s(512, 1_024)]
    )


def test_the_best_of_every_worker_counts() -> None:
    slow, fast = costs(), costs(compute=COMPUTE._replace(token_s=1e-6))
    spec = fleet(2)
    workers = [replace(w, costs=c) for w, c in zip(spec.workers, (slow, fast), strict=True)]
    trace = trace_of(Session("a", (prompt(0, 2_048, output=1),), 0.0))
    mixed = bound(trace, replace(spec, workers=tuple(workers)), 256)
    assert mixed.ttft_s[0] < bound(trace, spec, 256).ttft_s[0]


def test_a_preempted_token_may_come_sooner_than_by_a_decode() -> None:
    """A decode over 4,000 tokens takes 0.4 s, a prompt's end computed again 1 ms: who is preempted
    while another takes one short step has its token sooner."""
    slow = costs(
        compute=ComputeCoefficients(0.001, 1e-7, 0.0), decode=DECODE._replace(context_s=1e-4)
    )
    short, long = prompt(0, 271, output=3), prompt(900, 4_106, output=4)
    page_bytes = StateShape.of(PRESETS[DENSE](), 256).page_bytes
    trace = trace_of(Session("a", (short,), 0.0), Session("b", (long,), 0.0))
    spec = fleet(capacity=TierBytes((17 + 257) * page_bytes), cost_model=slow)
    assert check(trace, spec, "colocated").preemptions == 1
