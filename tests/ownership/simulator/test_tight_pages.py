"""HBM that holds hardly more than one request: everything is served all the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ownership.scheduling.registry import POLICIES
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.checked_runs import run_of
from tests.ownership.simulator.small_fleets import (
    DENSE,
    GIB,
    HYBRID,
    agents,
    fleet,
    prompt,
    trace_of,
    with_pools,
)


def largest_request(trace: Trace, shape: StateShape) -> int:
    """Bytes of pages without which some request is refused."""
    return max(
        shape.request_bytes(request.input_tokens + request.output_tokens)
        for session in trace
        for request in session.requests
    )


@settings(max_examples=30)
@given(
    seed=st.integers(0, 999),
    model=st.sampled_from([DENSE, HYBRID]),
    policy=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(["", "+answers=kept", "+checkpoints=full", "+tiers=gpu"]),
    retention=st.sampled_from([0, 512, None]),
    workers=st.integers(1, 2),
    spare=st.floats(0.0, 0.5),
)
def test_everything_is_served_if_hardly_more_than_one_request_fits(
    seed: int, model: str, policy: str, options: str, retention: int | None, workers: int,
    spare: float,
) -> None:  # fmt: skip
    trace = agents(4, rate=1.0, seed=seed)
    limits = EngineLimits(retention_interval=retention)
    spec = fleet(workers, model, limits=limits)
    shape = StateShape.of(spec.model, chunk_tokens_for(trace.block_tokens, spec.model.alignment))
    hbm_bytes = int(largest_request(trace, shape) * (1.0 + spare))
    spec = fleet(workers, model, TierBytes(hbm_bytes, 4 * GIB, 8 * GIB), limits=limits)
    run = run_of(trace, spec, with_pools(policy + options, workers))
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)


@pytest.mark.parametrize("turns", [2, 5])
def test_checkpoints_of_its_own_prefix_are_evicted_for_a_request(turns: int) -> None:
    """Each turn resumes behind the one before: a checkpoint more than there is room for."""
    sizes = [2_048 * (turn + 1) for turn in range(turns)]
    requests = [prompt(0, sizes[0], output=300)]
    requests += [
        replace(prompt(0, size, output=300), parent=at, think_s=5.0)
        for at, size in enumerate(sizes[1:])
    ]
    shape = StateShape.of(fleet(1, HYBRID).model, 256)
    capacity = TierBytes(shape.request_bytes(sizes[-1] + 300))
    run = run_of(trace_of(Session("a", tuple(requests), 0.0)), fleet(1, HYBRID, capacity))
    assert len(run.tally.step_s) == turns
    assert run.tally.hits[0] == sum(size - 256 for size in sizes[:-1]), "hits of all turns but one"


def test_a_request_that_finds_no_pages_changes_nothing() -> None:
    """A long prompt waits behind a running one: no prefix leaves, and its own is not used yet."""
    shape = StateShape.of(fleet().model, 256)
    first, idle, running = prompt(0, 2_048), prompt(50, 1_024), prompt(100, 2_048, output=200)
    long = replace(prompt(0, 6_144), blocks=BlockRuns(((0, 8), (200, 16))))
    sent = ((first, 0.0), (idle, 0.5), (running, 1.0), (long, 1.5))
    sessions = [Session(str(at_s), (request,), at_s) for request, at_s in sent]
    run = FleetSimulation(
        fleet(capacity=TierBytes(shape.request_bytes(8_192))), parse_policy("colocated"), shape,
        iter(sessions), 256, 0,
    )  # fmt: skip
    memory = run.workers["w0"].memory
    seen: list[tuple[int, int, int]] = []

    def look() -> None:
        matches = [memory.hbm.match(request.blocks) for request in (first, idle)]
        seen.append((*(match.chunks for match in matches), matches[0].path[0].last_used))

    for at_s in (1.4, 2.0):
        run.loop.at(at_s, look)
    run.run()
    assert seen[0] == seen[1]
    assert seen[0][:2] == (8, 4)
    assert list(run.tally.hits) == [2_048, 0, 0, 0]
