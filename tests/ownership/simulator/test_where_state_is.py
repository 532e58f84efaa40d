"""Small simulations worked by hand: where state is kept, and comes back from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ownership.scheduling.fleet import Role
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import (
    DENSE,
    GIB,
    HYBRID,
    TIGHT,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
)


def test_a_fetch_brings_the_checkpoint_if_only_that_is_missing() -> None:
    trace = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
    roles = (Role.PREFILL, Role.DECODE)
    spec = fleet(2, HYBRID, roles=roles, cost_model=costs(HYBRID, bytes_per_s=100e9))
    run = FleetSimulation(
        spec, parse_policy("static_pd"), StateShape.of(spec.model, 256), iter(trace), 256, 0
    )
    reader = run.workers["w1"].memory
    (request,) = next(iter(trace)).requests
    reader.dram.add(request.blocks, 32, (), reader.next_tick())
    run.run()
    assert (
        run.workers["w1"].flows.fetched.chunks,
        run.workers["w1"].flows.fetched.checkpoints,
    ) == (0, {31: 1})


@pytest.mark.parametrize(
    ("options", "read"),
    [("restores=cost", 2), ("restores=never_load", 0)],
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


def test_chunks_that_do_not_fit_into_dram_are_computed() -> None:
    again = [Session(n, (prompt(i, 8_192),), s) for n, i, s in (("a", 0, 0.0), ("b", 900, 9.0))]
    again.append(replace(again[0], id="c", start_s=20.0))
    capacity = TierBytes(131_072 * 8_300, 131_072 * 1_024, 8 * GIB)
    found = figures(trace_of(*again), fleet(capacity=capacity, cost_model=costs(bytes_per_s=1e12)))
    assert found.ssd_read_bytes == 131_072 * (8_192 - 256)
    assert found.ssd_hit_tokens == 1_024
    assert found.requests == 3


def test_chunks_that_two_workers_compute_are_on_one_ssd() -> None:
    same = [Session(n, (prompt(0, 8_192),), 0.0) for n in ("a", "b")]
    found = figures(trace_of(*same), fleet(2))
    assert (found.ssd_written_bytes, found.duplicate_factor) == (131_072 * 8_192, 2.0)
    one = figures(trace_of(*same), fleet(1))
    assert (one.ssd_written_bytes, one.duplicate_factor) == (131_072 * 8_192, 1.0)


@pytest.mark.parametrize("share", [1.0, 0.25, 0.1])
@pytest.mark.parametrize(
    "policy", ["round_robin_pd+prefillers=1", "static_pd+prefillers=1", "ownerserve"]
)
def test_foreign_chunks_are_not_written_if_dram_has_no_room(policy: str, share: float) -> None:
    room = TIGHT[DENSE]
    capacity = TierBytes(room.hbm, int(share * room.dram), 256 * GIB)
    run = run_of(agents(12, rate=0.5), fleet(3, capacity=capacity), policy)
    assert sum(worker.flows.written.chunks for worker in run.workers.values())


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
