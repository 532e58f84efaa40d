"""Whole simulations: what must hold whatever is simulated, and small ones worked by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.errors import SimulationError, TraceError
from hetero_connector.planner.request_overhead import RequestOverhead
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.batching import EngineLimits
from ownership.simulator.policies import parse_policy
from ownership.simulator.results import Figures
from ownership.simulator.simulating import simulate
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from ownership.simulator.traces.statistics import measure
from ownership.simulator.workload import Workload
from tests.ownership.simulator.small_fleets import (
    AT_ONCE,
    COMPUTE,
    DECODE,
    DENSE,
    FREE,
    GIB,
    HYBRID,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
)

ENDLESS = TierBytes(1 << 50, 1 << 50, 1 << 50)
TIGHT = TierBytes(6 * GIB, 4 * GIB, 8 * GIB)


def run_of(trace: Trace, spec: FleetSpec, policy: str = "ownerserve") -> FleetSimulation:
    """A simulation whose invariants are looked at after every answer."""
    tokens = spec.chunk_tokens or chunk_tokens_for(trace.block_tokens, spec.model.alignment)
    shape = StateShape.of(spec.model, tokens)

    def check() -> None:
        for worker in run.workers.values():
            for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
                assert 0 <= tier.used_bytes + tier.reserved_bytes <= tier.capacity_bytes

    run = FleetSimulation(
        spec, parse_policy(policy), shape, iter(trace), trace.block_tokens, 0, served=check
    )
    run.run()
    for worker in run.workers.values():
        for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
            tier.check_integrity()
            assert tier.reserved_bytes == 0, "a request kept pages"
            assert not any(one.pins for one in (tier.root, *tier.runs())), "a pin was left"
        written, ssd = worker.flows.written, worker.memory.ssd
        assert shape.moved_bytes(written.slots, written.boundaries) == (
            ssd.used_bytes + ssd.evicted_bytes
        )
        engine = worker.engine
        assert (engine.queued_tokens, engine.context_tokens, engine.running_decodes) == (0, 0, 0)
    return run


def figures(trace: Trace, spec: FleetSpec, policy: str = "colocated", **sent: float) -> Figures:
    return simulate(trace, spec, parse_policy(policy), Workload(**sent)).figures  # type: ignore[arg-type]


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
    capacity = TIGHT if model == DENSE else TierBytes(GIB // 2, GIB // 4, GIB // 2)
    roles = (Role.PREFILL, Role.DECODE, Role.BOTH)
    trace = agents(10, rate=0.5)
    run = run_of(trace, fleet(3, model, capacity, roles=roles), policy)
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)
    assert len(run.tally.task_s) == 10


@settings(max_examples=8)
@given(
    st.integers(0, 99),
    st.sampled_from(["leaf_lru", "lru", "value", "session"]),
    st.sampled_from(["named", "any"]),
)
def test_nothing_is_lost_whatever_is_evicted(seed: int, eviction: str, peers: str) -> None:
    trace = agents(6, rate=2.0, seed=seed)
    policy = f"colocated+eviction={eviction}+checkpoints=periodic:2+answers=kept+peers={peers}"
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


def test_a_fetch_brings_the_checkpoint_where_only_that_is_lacking() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    roles = (Role.PREFILL, Role.DECODE)
    spec = fleet(2, HYBRID, roles=roles, cost_model=costs(HYBRID, bytes_per_s=100e9))
    run = FleetSimulation(
        spec, parse_policy("static_pd"), StateShape.of(spec.model, 256), iter(trace), 256, 0
    )
    reader = run.workers["w1"].memory
    (request,) = next(iter(trace)).requests
    reader.dram.add(request.blocks, 32, (), reader.tick())
    run.run()
    assert (
        run.workers["w1"].flows.fetched.chunks,
        run.workers["w1"].flows.fetched.checkpoints,
    ) == (0, {31: 1})


@pytest.mark.parametrize(
    ("options", "read"),
    [("peers=named", 0), ("peers=any", 2), ("peers=any+restores=never_load", 0)],
)
def test_an_engine_reads_what_it_lacks_from_any_peer_if_its_planner_wants_it(
    options: str, read: int
) -> None:
    """The answer's two chunks are at the decoder only."""
    turns = (prompt(0, 2_048, output=513), prompt(0, 3_072, parent=0, think_s=1.0))
    fast = costs(bytes_per_s=100e9)
    spec = fleet(2, roles=(Role.PREFILL, Role.DECODE), cost_model=fast)
    trace = trace_of(Session("a", turns, 0.0))
    run = run_of(trace, spec, f"static_pd+answers=kept+{options}")
    assert [worker.flows.fetched.chunks for worker in run.workers.values()] == [read, 7 + 1]
    assert list(run.tally.hits) == [2_048, 0, 0, read * 256]


def test_the_same_inputs_give_the_same_figures() -> None:
    trace, spec = agents(8, rate=1.0), fleet(4, HYBRID)
    policy, sent = parse_policy("dynamo_kv"), Workload(rate=0.5, sharing=0.5, seed=3)
    one, other = (simulate(trace, spec, policy, sent) for _ in range(2))
    assert (one.figures, one.state_bytes) == (other.figures, other.state_bytes)
    changed = simulate(trace, spec, policy, replace(sent, seed=4))
    assert changed.figures != one.figures


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


def test_a_prefill_holds_up_the_decodes_beside_it() -> None:
    beside = Session("b", (prompt(100, 1_024, output=1),), 0.2)
    alone = Session("a", (prompt(0, 1_024, output=60),), 0.0)
    found = figures(trace_of(alone, beside), fleet())
    late_s = DECODE.delay_s(1_024, 1_024**2 / 2, 1)
    calm = figures(trace_of(alone), fleet())
    assert found.step_p95_s == pytest.approx(calm.step_p95_s + late_s)
    assert found.decode_late_share == pytest.approx(late_s / (calm.token_mean_s * 59 + late_s))
    # It waits for the end of the step in which it came: not longer.
    assert found.queue_mean_s < DECODE.decode_step_s(1, 1_100) / 2


def test_scheduling_holds_up_the_engine_and_the_front_end_only_the_request() -> None:
    cost_model = costs()
    cost_model.overhead = overhead = RequestOverhead(0.05, 1e-6, 0.03, 2e-6)
    spec = fleet(cost_model=cost_model)
    beside = Session("b", (prompt(100, 1_024, output=1),), 0.2)
    alone = Session("a", (prompt(0, 1_024, output=60),), 0.0)
    calm, found = figures(trace_of(alone), spec), figures(trace_of(alone, beside), spec)
    prefill_s = COMPUTE.step_s + 1_024 * COMPUTE.token_s + COMPUTE.attention_s * 1_024**2 / 2
    assert overhead.delay_s(1_024) == pytest.approx(0.051_024)
    assert overhead.blocking_s(1_024) == pytest.approx(0.032_048)
    assert calm.ttft_p50_s == pytest.approx(0.051_024 + 0.032_048 + prefill_s)
    late_s = 0.032_048 + DECODE.delay_s(1_024, 1_024**2 / 2, 1)
    assert found.step_p95_s == pytest.approx(calm.step_p95_s + late_s)
    decodes_s = calm.token_mean_s * 59 + late_s
    assert found.decode_late_share == pytest.approx(late_s / decodes_s)


def test_every_decode_is_held_up() -> None:
    pair = [Session(n, (prompt(i, 512, output=80),), 0.0) for n, i in (("a", 0), ("b", 50))]
    beside = Session("c", (prompt(100, 1_024, output=1),), 0.3)
    found = figures(trace_of(*pair, beside), fleet())
    # The second prompt of the pair is computed beside the first one's decode.
    late_s = 2 * DECODE.delay_s(1_024, 1_024**2 / 2, 1) + DECODE.delay_s(512, 512**2 / 2, 1)
    assert found.decode_late_share * found.token_mean_s * 2 * 79 == pytest.approx(late_s)


def test_a_load_runs_beside_the_first_step_but_for_its_first_layer() -> None:
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


def test_what_does_not_fit_into_dram_is_staged_once_and_then_computed() -> None:
    again = [Session(n, (prompt(i, 8_192),), s) for n, i, s in (("a", 0, 0.0), ("b", 900, 9.0))]
    again.append(replace(again[0], id="c", start_s=20.0))
    capacity = TierBytes(131_072 * 8_300, 131_072 * 1_024, 8 * GIB)
    found = figures(trace_of(*again), fleet(capacity=capacity, cost_model=costs(bytes_per_s=1e12)))
    assert found.ssd_read_bytes == 131_072 * (8_192 - 256)
    assert found.ssd_hit_tokens == 1_024
    assert found.requests == 3


def test_two_workers_that_compute_the_same_keep_it_twice() -> None:
    same = [Session(n, (prompt(0, 8_192),), 0.0) for n in ("a", "b")]
    found = figures(trace_of(*same), fleet(2))
    assert (found.write_amplification, found.duplicate_factor) == (2.0, 2.0)
    one = figures(trace_of(*same), fleet(1))
    assert (one.write_amplification, one.duplicate_factor) == (1.0, 1.0)


def test_the_next_turn_comes_after_answer_and_thought() -> None:
    first = prompt(0, 2_048, output=5)
    second = replace(prompt(0, 2_560, output=5), parent=0, think_s=7.0)
    found = figures(trace_of(Session("a", (first, second), 1.0)), fleet())
    assert found.task_mean_s == pytest.approx(7.0 + found.step_p50_s + found.step_p99_s)
    assert found.task_wait_mean_s == pytest.approx(found.task_mean_s - 7.0)
    assert found.hbm_hit_tokens == 2_048
    assert found.owner_hit_rate == 1.0


@pytest.mark.parametrize("model", [DENSE, HYBRID])
def test_answers_that_are_kept_are_not_computed_again(model: str) -> None:
    first = prompt(0, 2_048, output=1_025)
    second = replace(prompt(0, 3_328), parent=0, think_s=7.0)
    short = replace(prompt(0, 3_072), parent=0, think_s=99.0)  # does not reach behind the answer
    resumed = 2_816 if model == DENSE else 2_048  # at the last checkpoint
    trace = trace_of(Session("a", (first, second, short), 0.0))
    lost, kept = (
        figures(trace, fleet(1, model), f"colocated+answers={x}") for x in ("lost", "kept")
    )
    assert (lost.saved_tokens, kept.saved_tokens) == (2_048 + resumed, 3_072 + resumed)
    assert kept.sealed_bytes >= lost.sealed_bytes
    gpu = figures(trace, fleet(1, model), "colocated+answers=kept+tiers=gpu")
    assert gpu.hbm_hit_tokens == kept.hbm_hit_tokens


def test_state_that_left_the_pages_comes_back_from_dram_then_ssd() -> None:
    again = [Session(n, (prompt(i, 8_192),), s) for n, i, s in (("a", 0, 0.0), ("b", 900, 9.0))]
    again.append(replace(again[0], id="c", start_s=20.0))
    page_bytes, fast = 131_072 * 8_300, costs(bytes_per_s=100e9)
    dram = figures(
        trace_of(*again), fleet(capacity=TierBytes(page_bytes, 8 * GIB), cost_model=fast)
    )
    assert (dram.hbm_hit_tokens, dram.dram_hit_tokens) == (0, 8_192 - 256)
    small = TierBytes(page_bytes, page_bytes, 8 * GIB)
    ssd = figures(trace_of(*again), fleet(capacity=small, cost_model=fast))
    assert (ssd.dram_hit_tokens, ssd.ssd_hit_tokens) == (0, 8_192 - 256)
    assert ssd.ssd_read_bytes == 131_072 * (8_192 - 256)
    assert ssd.restore_ssd_mean_s == pytest.approx((1e-4 + ssd.ssd_read_bytes / 100e9) / 3)
    gpu = figures(trace_of(*again), fleet(capacity=small), "colocated+tiers=gpu")
    assert (gpu.saved_tokens, gpu.sealed_bytes) == (0, 0)


def test_without_pages_the_last_request_is_preempted_and_ends_all_the_same() -> None:
    sessions = [Session(str(i), (prompt(100 * i, 1_024, output=1_500),), 0.0) for i in range(3)]
    capacity = TierBytes(131_072 * 5_000, 0, 0)
    run = run_of(trace_of(*sessions), fleet(capacity=capacity), "colocated")
    assert len(run.tally.step_s) == 3
    assert sum(w.engine.totals.preemptions for w in run.workers.values()) > 0


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
    assert (found.refused, found.requests, found.sessions) == (1, 1, 2)


def test_a_remote_prefill_moves_what_it_computed() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    roles = (Role.PREFILL, Role.DECODE)
    fast = costs(bytes_per_s=100e9)
    found = figures(trace, fleet(2, roles=roles, cost_model=fast), "static_pd")
    assert found.network_bytes == 131_072 * (8_192 - 256)
    assert found.saved_tokens == 0  # it was computed for this request, though not where it decodes
    # A replica is not written a second time, nor what continues it.
    assert found.ssd_written_bytes == 131_072 * 8_192
    assert found.duplicate_factor == pytest.approx(2.0)


def test_an_objective_refuses_early() -> None:
    trace = trace_of(*[Session(str(i), (prompt(100 * i, 8_192),), 0.0) for i in range(9)])
    found = figures(trace, fleet(), "ownerserve+ttft=0.3")
    assert 0 < found.refused < 9


@pytest.mark.parametrize("model", ["gemma-3-27b", HYBRID])
def test_the_dense_baseline_takes_more(model: str) -> None:
    trace = agents(4)
    typed, paged = (figures(trace, fleet(1, model), p) for p in (
        "colocated", "colocated+state=paged",
    ))  # fmt: skip
    assert paged.sealed_bytes > typed.sealed_bytes
    assert paged.hbm_gib_per_session > 2 * typed.hbm_gib_per_session


def test_more_checkpoints_are_more_bytes() -> None:
    trace = agents(6)
    full, zero = (
        figures(trace, fleet(1, HYBRID), f"colocated+checkpoints={x}") for x in ("full", "zero")
    )
    assert full.ssd_written_bytes > zero.ssd_written_bytes
    assert full.saved_tokens >= zero.saved_tokens


def test_a_tool_leaves_its_worker_idle() -> None:
    from ownership.simulator.traces.session import Trigger

    first = prompt(0, 2_048)
    tool = replace(prompt(0, 2_560), parent=0, think_s=10.0, trigger=Trigger.TOOL_RESULT)
    other = Session("b", (prompt(900, 10_240),), 3.0)
    alone = figures(trace_of(Session("a", (first, tool), 0.0)), fleet())
    busy = figures(trace_of(Session("a", (first, tool), 0.0), other), fleet())
    assert alone.tool_idle_busy_share == 0.0
    assert busy.tool_idle_busy_share == pytest.approx(busy.step_p99_s / 10.0, rel=0.01)


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


def test_chunks_must_fit_the_blocks() -> None:
    with pytest.raises(SimulationError, match="chunk_tokens: 256 is no multiple of the 512-token"):
        figures(agents(2, block_tokens=512), fleet(chunk_tokens=256))


def test_a_rate_stretches_recorded_starts() -> None:
    sessions = [Session(str(i), (prompt(100 * i, 512),), float(i)) for i in range(11)]
    slow = figures(trace_of(*sessions), fleet(), rate=0.1)
    assert slow.span_s == pytest.approx(100.0, abs=0.1)


def test_a_small_step_limit_makes_more_steps() -> None:
    trace = trace_of(Session("a", (prompt(0, 4_096, output=1),), 0.0))
    found = figures(trace, fleet(limits=EngineLimits(1_024, 8)))
    assert found.ttft_p50_s == pytest.approx(
        4 * COMPUTE.step_s + 4_096 * COMPUTE.token_s + COMPUTE.attention_s * 4_096**2 / 2
    )
