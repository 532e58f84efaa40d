"""Workers that die: their requests are answered all the same, and nothing is left behind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.errors import SimulationError
from hetero_connector.planner.cost_model import RequestOverhead
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import Failure, FleetSpec, read_fleet
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import (
    CHUNK_BYTES,
    COMPUTE,
    DENSE,
    GIB,
    HYBRID,
    agents,
    costs,
    fleet,
    prompt,
    trace_of,
)

LONG = prompt(0, 8_192, output=1)
APART = (Role.PREFILL, Role.DECODE, Role.DECODE)
LONG_S = COMPUTE.step_s + 8_192 * COMPUTE.token_s + COMPUTE.attention_s * 8_192**2 / 2


@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    policy=st.sampled_from([*sorted(POLICIES), "round_robin_pd+answers=kept+peers=any"]),
    model=st.sampled_from([DENSE, HYBRID]),
    workers=st.integers(1, 3),
    at_s=st.lists(st.floats(0.0, 60.0), min_size=1, max_size=3),
)
def test_every_request_is_answered(
    seed: int, policy: str, model: str, workers: int, at_s: list[float]
) -> None:
    trace = agents(5, rate=1.0, seed=seed)
    capacity = TierBytes(6 * GIB, 4 * GIB, 8 * GIB)
    failures = tuple(Failure(f"w{i % workers}", s + 70.0 * i, 5.0) for i, s in enumerate(at_s))
    spec = replace(fleet(workers, model, capacity), failures=failures)
    run = run_of(trace, spec, policy)
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)
    assert all(worker.up for worker in run.workers.values())
    assert all(worker.sessions == 0 for worker in run.workers.values())


def test_a_prefill_that_was_lost_is_computed_elsewhere() -> None:
    trace = trace_of(Session("a", (LONG,), 0.0))
    spec = replace(fleet(2), failures=(Failure("w0", 0.05, 100.0),))
    found = figures(trace, spec)
    assert found.ttft_p50_s == pytest.approx(0.05 + LONG_S)
    assert (found.resent, found.requests) == (1, 1)
    assert found.span_s == found.ttft_p50_s, "the worker's return is no part of it"


def test_a_request_at_the_front_end_of_a_worker_that_dies_is_sent_again() -> None:
    cost_model = costs()
    cost_model.overhead = RequestOverhead(frontend_s=0.1)
    trace = trace_of(Session("a", (LONG,), 0.0))
    spec = replace(fleet(2, cost_model=cost_model), failures=(Failure("w0", 0.05, 0.01),))
    found = figures(trace, spec)
    assert found.ttft_p50_s == pytest.approx(0.05 + 0.1 + LONG_S)
    assert (found.resent, found.requests) == (1, 1)


def test_without_a_worker_requests_wait_for_one() -> None:
    trace = trace_of(Session("a", (LONG,), 0.0))
    spec = replace(fleet(1), failures=(Failure("w0", 0.05, 10.0),))
    assert figures(trace, spec).ttft_p50_s == pytest.approx(10.05 + LONG_S)


@pytest.mark.parametrize(("ssd_bytes", "hits"), [(0, 0), (8 * GIB, 8_192)])
def test_what_was_on_ssd_is_there_when_it_is_back(ssd_bytes: int, hits: int) -> None:
    second = replace(prompt(0, 10_240, output=1), parent=0, think_s=20.0)
    trace = trace_of(Session("a", (LONG, second), 0.0))
    capacity = TierBytes(40 * GIB, 64 * GIB, ssd_bytes)
    fast = fleet(1, capacity=capacity, cost_model=costs(bytes_per_s=1e12))
    spec = replace(fast, failures=(Failure("w0", 5.0, 1.0),))
    found = figures(trace, spec)
    assert (found.ssd_hit_tokens, found.saved_tokens) == (hits, hits)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_of_a_write_only_what_was_down_is_there_when_it_is_back(share: float) -> None:
    second = replace(prompt(0, 10_240, output=1), parent=0, think_s=20.0)
    trace = trace_of(Session("a", (LONG, second), 0.0))
    write_s = 32 * CHUNK_BYTES / 5e9
    dies_s = LONG_S + share * write_s + 1e-6
    fast = fleet(1, cost_model=costs(bytes_per_s=1e12))
    spec = replace(fast, failures=(Failure("w0", dies_s, 1.0),))
    assert figures(trace, spec).ssd_hit_tokens == 256 * int(32 * share)


def _fleet_with_handoffs(
    *failures: Failure, bytes_per_s: float = 1e8
) -> tuple[FleetSpec, float, float]:
    """Prefill and decode apart; seconds of a handoff, and of computing what it leaves."""
    spec = fleet(3, roles=APART, cost_model=costs(bytes_per_s=bytes_per_s))
    step_s, token_s, pair_s = COMPUTE
    rest_s = step_s + 256 * token_s + pair_s * 256 * (8_192 - 128)
    transfer_s = 1e-4 + 31 * CHUNK_BYTES / bytes_per_s
    return replace(spec, failures=failures), transfer_s, rest_s


def test_nobody_waits_for_a_transfer_to_a_worker_that_died() -> None:
    """It is sent again at once, and its prefill's pages are still there."""
    trace = trace_of(Session("a", (LONG,), 0.0))
    spec, transfer_s, rest_s = _fleet_with_handoffs(Failure("w1", 1.0, 100.0))
    found = figures(trace, spec, "static_pd")
    # Copying to pages is slow, too: the reader rather computes it.
    assert found.ttft_p50_s == pytest.approx(1.0 + rest_s + transfer_s + LONG_S)
    assert found.resent == 1
    assert found.network_bytes == 31 * CHUNK_BYTES, "what was cut off has not arrived"


def test_nobody_waits_for_a_transfer_from_a_worker_that_died() -> None:
    trace = trace_of(Session("a", (LONG,), 0.0))
    spec, _, _ = _fleet_with_handoffs(Failure("w0", 1.0, 100.0))
    found = figures(trace, spec, "static_pd")
    assert found.ttft_p50_s == pytest.approx(1.0 + LONG_S), "computed where it was sent to"
    assert (found.resent, found.network_bytes) == (0, 0)


def test_a_transfer_that_was_cut_off_holds_up_no_other() -> None:
    """Two handoffs leave one worker: the second goes on when the first one's reader has died."""
    other = Session("b", (prompt(900, 8_192, output=1),), 0.0)
    trace = trace_of(Session("a", (LONG,), 0.0), other)
    spec, transfer_s, _ = _fleet_with_handoffs(Failure("w1", 1.0, 100.0))
    found = figures(trace, spec, "static_pd")
    calm, _, _ = _fleet_with_handoffs()
    assert found.span_s == pytest.approx(figures(trace, calm, "static_pd").span_s, rel=0.2)
    assert found.span_s < 3 * transfer_s


@pytest.mark.parametrize("failures", [(), (Failure("w1", 50.0, 1.0),)])
def test_replicas_are_not_on_their_readers_ssd(failures: tuple[Failure, ...]) -> None:
    """Nor what it computed of what its owner has."""
    second = replace(prompt(0, 10_240, output=1), parent=0, think_s=20.0)
    trace = trace_of(Session("a", (LONG, second), 0.0))
    spec, *_ = _fleet_with_handoffs(*failures, bytes_per_s=100e9)
    run = run_of(trace, spec, "static_pd")
    assert run.workers["w1"].memory.ssd.used_bytes == 0
    assert run.workers["w0"].memory.ssd.used_bytes == 40 * CHUNK_BYTES


def test_what_continues_a_replica_is_on_its_owners_ssd() -> None:
    """The decoder's own answer, behind the prompt that it was handed."""
    asked = replace(LONG, output_tokens=513)
    second = replace(prompt(0, 8_192 + 1_024, output=1), parent=0, think_s=20.0)
    trace = trace_of(Session("a", (asked, second), 0.0))
    spec, *_ = _fleet_with_handoffs(bytes_per_s=100e9)
    run = run_of(trace, spec, "static_pd+answers=kept")
    ssd = run.workers["w1"].memory.ssd
    assert ssd.used_bytes == 2 * CHUNK_BYTES
    chain = second.blocks.head(34)
    assert [ssd.reached(chain, covered).chunks for covered in (0, 31, 32)] == [0, 0, 34]


@pytest.mark.parametrize(("think_s", "own"), [(12.0, 8), (45.0, 40)])
def test_what_a_dead_worker_owned_is_taken_over_when_its_lease_ends(
    think_s: float, own: int
) -> None:
    """The owner dies at 10 s; its lease of 20 s outlives the next turn, or does not."""
    second = replace(prompt(0, 10_240, output=1), parent=0, think_s=think_s)
    trace = trace_of(Session("a", (LONG, second), 0.0))
    spec = fleet(2, roles=(Role.PREFILL, Role.DECODE), cost_model=costs(bytes_per_s=100e9))
    spec = replace(spec, failures=(Failure("w0", 10.0, 100.0),), lease_s=20.0)
    run = run_of(trace, spec, "static_pd")
    ssd = run.workers["w1"].memory.ssd
    assert ssd.used_bytes == own * CHUNK_BYTES, "the second turn's 8 nobody had before"


def test_a_session_whose_owner_died_is_owned_anew() -> None:
    second = replace(prompt(0, 10_240, output=1), parent=0, think_s=20.0)
    trace = trace_of(Session("a", (LONG, second), 0.0))
    run = run_of(trace, replace(fleet(2), failures=(Failure("w0", 5.0, 100.0),)), "colocated")
    assert (run.tally.owned_turns, run.tally.moved_sessions) == (0, 0)


def test_a_failure_must_be_of_a_worker_that_is_up(tmp_path: Path) -> None:
    path = tmp_path / "fleet.yaml"
    text = "model: llama-3.1-8b\nworkers: [{hardware: h200, count: 2}]\nfailures: "
    path.write_text(f"{text}[{{worker: worker-0, at_s: 10, for_s: 5}}]\n")
    spec = read_fleet(path)
    assert spec.failures == (Failure("worker-0", 10.0, 5.0),)
    with pytest.raises(SimulationError, match="without links and failures"):
        spec.of_size(3)
    path.write_text(f"{text}[{{worker: worker-7, at_s: 10, for_s: 5}}]\n")
    with pytest.raises(SimulationError, match=r"failures\[0\].worker: no worker 'worker-7'"):
        read_fleet(path)
    twice = "[{worker: worker-0, at_s: 12, for_s: 5}, {worker: worker-0, at_s: 10, for_s: 5}]"
    path.write_text(f"{text}{twice}\n")
    with pytest.raises(SimulationError, match=r"failures\[0\].at_s: it is not back"):
        read_fleet(path)
