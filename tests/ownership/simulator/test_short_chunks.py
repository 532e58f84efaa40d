"""Prompts handed off at their last token: where that short chunk goes, and who finds it."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.spec.presets import PRESETS
from hetero_connector.spec.state_types import StateType
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.simulate import state_bytes_of
from ownership.simulator.state.chunks import short_chunk
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session
from tests.benchmarks.research.checked_bounds import check
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import (
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

POLICY = "static_pd+handoffs=tokens"


def apart(model: str = DENSE, bytes_per_s: float = 100e9) -> FleetSpec:
    """One worker that prefills and one that decodes, with a network faster than computing."""
    fast = costs(model, bytes_per_s=bytes_per_s)
    return fleet(2, model, roles=(Role.PREFILL, Role.DECODE), cost_model=fast)


def test_a_dense_prompt_is_handed_off_at_its_last_token() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    run = run_of(trace, apart(), POLICY)
    prefill, decode = run.workers.values()
    for flow in (decode.flows.fetched, decode.flows.loaded):
        assert (flow.chunks, flow.short_chunks) == (31, {(31 * 256, 8_191): 1})
    assert (prefill.flows.sealed.chunks, prefill.flows.sealed.short_chunks.total()) == (32, 1)
    layout = run.shape.layout
    exact = layout.artifact_bytes(StateType.DENSE_KV, 0, 8_191)
    assert state_bytes_of(run.shape, [decode])["fetched"] == {"dense_kv": exact}


def test_with_windows_it_is_handed_off_on_their_grid_with_a_checkpoint() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    run = run_of(trace, apart(HYBRID), POLICY)
    fetched = run.workers["w1"].flows.fetched
    span = (31 * 256, 31 * 256 + 128)
    assert (fetched.chunks, fetched.short_chunks, fetched.checkpoints) == (31, {span: 1}, {})
    assert fetched.short_checkpoints == {span: 1}


def test_a_full_chunk_before_the_last_token_needs_no_short_one() -> None:
    shape = StateShape.of(PRESETS[DENSE](), 256)
    assert short_chunk(shape, 1_025, -2) is None
    short = short_chunk(shape, 1_024, -2)
    assert short is not None
    assert (short.id, short.before, short.end) == (-2, 3, 1_023)
    assert short.appended_to(BlockRuns(((0, 4),))).runs == ((0, 3), (-2, 1))


def test_a_turn_that_grows_within_the_chunk_finds_it_at_the_prefiller() -> None:
    """If it is known to begin with the one before it."""
    first = prompt(0, 1_000)
    turns = (first, replace(first, input_tokens=1_010, parent=0, think_s=1.0))
    trace = trace_of(Session("a", turns, 0.0))
    assert list(run_of(trace, apart(), f"{POLICY}+answers=kept").tally.hits) == [768, 231, 0, 0]
    assert list(run_of(trace, apart(), POLICY).tally.hits) == [768, 0, 0, 0]
    other = replace(turns[1], blocks=BlockRuns(((50, 3),)))
    trace = trace_of(Session("a", (first, other), 0.0))
    assert list(run_of(trace, apart(), f"{POLICY}+answers=kept").tally.hits) == [0, 0, 0, 0]


def test_a_short_chunk_makes_the_first_token_earlier() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    whole, exact = (figures(trace, apart(), policy) for policy in ("static_pd", POLICY))
    assert exact.ttft_p50_s < whole.ttft_p50_s


@settings(max_examples=20)
@given(
    seed=st.integers(0, 999),
    model=st.sampled_from([DENSE, HYBRID]),
    scheduling=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(["", "+answers=kept", "+eviction=value"]),
    tight=st.booleans(),
)
def test_no_policy_with_short_chunks_beats_the_oracle(
    seed: int, model: str, scheduling: str, options: str, tight: bool
) -> None:
    trace = agents(5, rate=0.5, seed=seed)
    capacity = TierBytes(6 * GIB, 4 * GIB, 8 * GIB) if tight else TierBytes(*3 * [64 * GIB])
    spec = fleet(3, model, capacity, cost_model=costs(model, bytes_per_s=100e9))
    policy = with_pools(f"{scheduling}{options}+handoffs=tokens", 3)
    check(trace, spec, policy)
    run = run_of(trace, spec, policy)
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)
