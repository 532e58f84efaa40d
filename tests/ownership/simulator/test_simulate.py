"""Properties that every simulation must have."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.errors import SimulationError, TraceError
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import figures_of, simulate
from ownership.simulator.state.memory import EVICTIONS, TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from ownership.simulator.traces.statistics import measure
from ownership.simulator.workload import Workload
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import (
    AT_ONCE,
    CHUNK_BYTES,
    DENSE,
    FREE,
    GIB,
    HYBRID,
    TIGHT,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
)

ENDLESS = TierBytes(1 << 50, 1 << 50, 1 << 50)


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.parametrize("block_tokens", [256, 512])
def test_an_endless_cache_hits_what_the_trace_repeats(model: str, block_tokens: int) -> None:
    trace = agents(30, block_tokens=block_tokens)
    cost_model = costs(model, compute=FREE, decode=AT_ONCE)
    spec = fleet(1, model, ENDLESS, chunk_tokens=block_tokens, cost_model=cost_model)
    found = figures(trace, spec)
    assert found.matched_tokens == measure(_in_closed_loop(trace)).hit_tokens
    assert found.matched_tokens > 0


def _in_closed_loop(trace: Trace) -> Trace:
    """The trace as an engine that answers at once would be sent it."""

    def sessions() -> list[Session]:
        made = []
        for session in trace:
            at_s: list[float] = []
            for request in session.requests:
                before_s = 0.0 if request.parent is None else at_s[request.parent]
                think_s = request.think_s
                at_s.append(request.offset_s if think_s is None else before_s + think_s)
            requests = tuple(
                replace(r, offset_s=s) for r, s in zip(session.requests, at_s, strict=True)
            )
            made.append(replace(session, requests=requests))
        return made

    return replace(trace, sessions=lambda: iter(sessions()))


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_every_policy_serves_everything_within_its_tiers(policy: str, model: str) -> None:
    roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
    trace = agents(10, rate=0.5)
    run = run_of(trace, fleet(3, model, TIGHT[model], roles=roles), policy)
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)
    assert len(run.tally.task_s) == 10


@settings(max_examples=8)
@given(st.integers(0, 99), st.sampled_from(EVICTIONS))
def test_every_session_ends_under_every_eviction_policy(seed: int, eviction: str) -> None:
    trace = agents(6, rate=2.0, seed=seed)
    policy = f"colocated+eviction={eviction}+checkpoints=periodic:2+answers=kept"
    run = run_of(trace, fleet(2, HYBRID, TierBytes(GIB // 4, GIB // 8, GIB // 4)), policy)
    assert len(run.tally.task_s) == 6


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_bytes_are_conserved(model: str) -> None:
    capacity = TierBytes(6 * GIB, GIB // 2 if model == HYBRID else 4 * GIB)
    run = run_of(agents(12, rate=1.0), fleet(1, model, capacity), "colocated")
    (worker,) = run.workers.values()
    dram, sealed = worker.memory.dram, worker.flows.sealed
    assert dram.evicted_bytes > 0
    assert run.shape.moved_bytes(sealed.chunks, sealed.checkpoints.total()) == (
        dram.used_bytes + dram.evicted_bytes
    )


def test_the_same_inputs_give_the_same_figures() -> None:
    trace, spec = agents(8, rate=1.0), fleet(4, HYBRID)
    policy, sent = parse_policy("dynamo_kv"), Workload(rate=0.5, sharing=0.5, seed=3)
    one, other = (simulate(trace, spec, policy, sent) for _ in range(2))
    assert (one.figures, one.state_bytes) == (other.figures, other.state_bytes)
    changed = simulate(trace, spec, policy, replace(sent, seed=4))
    assert changed.figures != one.figures


def test_the_last_request_is_preempted_without_pages_and_still_ends() -> None:
    sessions = [Session(str(i), (prompt(100 * i, 1_024, output=1_500),), 0.0) for i in range(3)]
    capacity = TierBytes(131_072 * 5_000, 0, 0)
    run = run_of(trace_of(*sessions), fleet(capacity=capacity), "colocated")
    assert len(run.tally.step_s) == 3
    (engine,) = [worker.engine.totals for worker in run.workers.values()]
    assert engine.preemptions > 0
    # The time between tokens includes the wait of a request that was preempted.
    answering_s = sum(run.tally.step_s) - sum(run.tally.ttft_s)
    assert engine.gaps.count == 3 * 1_499
    assert figures_of(run).token_mean_s == pytest.approx(answering_s / (3 * 1_499))


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_pages_for_a_request_and_nothing_else_are_enough(model: str) -> None:
    """There is no room for a checkpoint in the prefix cache then."""
    shape = StateShape.of(fleet(1, model).model, 256)
    turns = [Session(str(i), (prompt(100 * i, 2_048, output=9),), 1.0 * i) for i in range(3)]
    capacity = TierBytes(shape.request_bytes(2_048 + 9))
    run = run_of(trace_of(*turns), fleet(1, model, capacity), "colocated")
    assert len(run.tally.step_s) == 3


def test_a_request_that_fits_no_worker_is_refused_with_what_follows() -> None:
    large = prompt(0, 10_240)
    after = replace(prompt(0, 10_496), parent=0, think_s=1.0)
    trace = trace_of(Session("a", (large, after), 0.0), Session("b", (prompt(500, 512),), 0.0))
    found = figures(trace, fleet(capacity=TierBytes(131_072 * 9_000)))
    assert (found.refused, found.requests, found.sessions) == (1, 1, 1)


def test_a_trace_without_starts_needs_a_rate() -> None:
    trace = replace(agents(3), starts_recorded=False)
    with pytest.raises(SimulationError, match="rate: no starts are recorded"):
        figures(trace, fleet())
    with pytest.raises(TraceError, match="rate_per_s"):
        figures(trace, fleet(), rate=0.0)
    with pytest.raises(TraceError, match="sessions"):
        figures(trace, fleet(), rate=1.0, sessions=0)
    spans = [figures(trace, fleet(), rate=1.0, seed=seed).span_s for seed in (1, 2, 1)]
    assert spans[0] == spans[2] != spans[1]


def test_a_partial_last_block_is_no_chunk() -> None:
    """Some traces list it, some do not: both mean the same."""
    whole = prompt(0, 1_024)
    listed, left_out = (
        figures(trace_of(Session("a", (replace(request, input_tokens=1_000),), 0.0)), fleet())
        for request in (whole, prompt(0, 1_000))
    )
    assert listed == left_out
    assert listed.sealed_bytes == 3 * CHUNK_BYTES


def test_a_router_remembers_no_session_of_a_request_without_one() -> None:
    run = run_of(trace_of(Session("a", (prompt(0, 1_024),), 0.0, is_named=False)), fleet(2))
    assert [len(router.ledger.sessions) for router in run.routers.routers] == [0]
    assert len(run.tally.task_s) == 1
    run = run_of(trace_of(Session("a", (prompt(0, 1_024),), 0.0)), fleet(2))
    assert [len(router.ledger.sessions) for router in run.routers.routers] == [1]


def test_chunks_must_fit_the_blocks() -> None:
    with pytest.raises(SimulationError, match="chunk_tokens: 256 is no multiple of the 512-token"):
        figures(agents(2, block_tokens=512), fleet(chunk_tokens=256))


def test_a_rate_stretches_recorded_starts() -> None:
    sessions = [Session(str(i), (prompt(100 * i, 512),), float(i)) for i in range(11)]
    slow = figures(trace_of(*sessions), fleet(), rate=0.1)
    assert slow.span_s == pytest.approx(100.0, abs=0.1)


def test_starts_at_one_moment_have_no_rate_to_change() -> None:
    sessions = [Session(str(i), (prompt(100 * i, 512),), 5.0) for i in range(3)]
    with pytest.raises(SimulationError, match="rate: all 3 sessions start at once"):
        figures(trace_of(*sessions), fleet(), rate=0.1)
    assert figures(trace_of(sessions[0]), fleet(), rate=0.1).requests == 1
