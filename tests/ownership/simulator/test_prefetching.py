"""State that left DRAM is back before its session is: the store's schedule on the virtual clock."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import Failure
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.checked_runs import check, figures, run_of
from tests.ownership.simulator.small_fleets import (
    CHUNK_BYTES,
    DENSE,
    GIB,
    HYBRID,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
)

GAP_S = 120.0
SMALL = TierBytes(60 * CHUNK_BYTES, 60 * CHUNK_BYTES, 64 * GIB)
"""Room for one long prompt."""


def regular(turns: int = 12, others_s: float = 55.0) -> Trace:
    """A session that comes back every two minutes, and something large in between."""
    long = [prompt(0, 8_192)]
    long += [
        replace(prompt(0, 8_192 + 256 * at), parent=at - 1, think_s=GAP_S) for at in range(1, turns)
    ]
    sessions = [Session("regular", tuple(long), 0.0)]
    for at in range(turns):
        other = prompt(10_000 * (at + 1), 10_240)
        sessions.append(Session(f"other {at}", (other,), at * (GAP_S + 0.1) + others_s))
    return trace_of(*sorted(sessions, key=lambda session: session.start_s or 0.0))


def test_a_session_that_comes_back_regularly_finds_its_state_in_dram() -> None:
    spec = fleet(1, capacity=SMALL, cost_model=costs(bytes_per_s=20e9))
    off, on = (figures(regular(), spec, f"colocated{x}") for x in ("", "+prefetch=on"))
    assert (off.prefetched_bytes, off.ssd_hit_tokens > 0) == (0, True)
    assert on.prefetched_bytes > 0
    assert on.ssd_hit_tokens < off.ssd_hit_tokens
    assert on.dram_hit_tokens > off.dram_hit_tokens
    assert on.saved_tokens >= off.saved_tokens
    assert on.restore_ssd_mean_s < off.restore_ssd_mean_s


def test_what_does_not_come_back_is_not_staged() -> None:
    once = [Session(str(at), (prompt(1_000 * at, 8_192),), 10.0 * at) for at in range(30)]
    spec = fleet(1, capacity=SMALL, cost_model=costs(bytes_per_s=20e9))
    assert figures(trace_of(*once), spec, "colocated+prefetch=on").prefetched_bytes == 0


@settings(max_examples=20)
@example(seed=5, model=HYBRID, policy="ownerserve", options="", dies_s=0.0)
@given(
    seed=st.integers(0, 999),
    model=st.sampled_from([DENSE, HYBRID]),
    policy=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(["", "+answers=kept", "+eviction=value", "+ssd_writes=8"]),
    dies_s=st.floats(0.0, 200.0),
)
def test_everything_is_served_and_nothing_is_left_behind(
    seed: int, model: str, policy: str, options: str, dies_s: float
) -> None:
    tight = {
        DENSE: TierBytes(6 * GIB, 4 * GIB, 64 * GIB),
        HYBRID: TierBytes(GIB // 2, GIB // 16, 64 * GIB),
    }
    trace = agents(8, rate=0.5, seed=seed)
    spec = fleet(2, model, tight[model])
    found = check(trace, spec, f"{policy}{options}+prefetch=on")
    size = chunk_tokens_for(trace.block_tokens, spec.model.alignment)
    requests = [request for session in trace for request in session.requests]
    prompts = sum(request.input_tokens // size for request in requests)
    most_bytes = StateShape.of(spec.model, size).moved_bytes(2 * prompts, 2 * len(requests))
    # A turn ends at two workers where it is handed off.
    assert found.prefetched_bytes <= most_bytes, "a turn's state is staged once"
    dying = replace(spec, failures=(Failure("w1", dies_s, 5.0),))
    run = run_of(trace, dying, f"{policy}{options}+prefetch=on")
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)


@pytest.mark.parametrize("dies_s", [0.5, 700.0, 710.0])
def test_a_death_ends_what_is_being_staged(dies_s: float) -> None:
    spec = fleet(1, capacity=SMALL, cost_model=costs(bytes_per_s=1e9))
    dying = replace(spec, failures=(Failure("w0", dies_s, 1.0),))
    run = run_of(regular(), dying, "colocated+prefetch=on")
    assert len(run.tally.step_s) == 24
