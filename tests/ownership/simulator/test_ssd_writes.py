"""What is written to SSD where a day's writes are limited: the store's own budget and admission."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.store.catalog.write_budget import DAY_S, burst_bytes
from ownership.scheduling.registry import POLICIES
from ownership.simulator.fleet_file import Failure
from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.checked_runs import check, figures, run_of
from tests.ownership.simulator.small_fleets import (
    CHUNK_BYTES,
    DENSE,
    GIB,
    HYBRID,
    TIGHT,
    agents,
    fleet,
    prompt,
    trace_of,
)


@pytest.mark.parametrize("model", [DENSE, HYBRID])
@pytest.mark.parametrize("options", ["", "+answers=kept", "+checkpoints=full"])
def test_a_budget_that_is_never_short_writes_everything(model: str, options: str) -> None:
    trace = agents(12, rate=0.5)
    plain, limited = (
        figures(trace, fleet(2, model), f"ownerserve{options}{x}") for x in ("", "+ssd_writes=1e8")
    )
    assert limited == plain
    assert plain.ssd_written_bytes > 0


@settings(max_examples=20)
@given(
    seed=st.integers(0, 99),
    model=st.sampled_from([DENSE, HYBRID]),
    policy=st.sampled_from(sorted(POLICIES)),
    options=st.sampled_from(["", "+answers=kept", "+checkpoints=full", "+eviction=value"]),
    gib_per_day=st.floats(0.01, 64.0),
    dies_s=st.floats(0.0, 60.0),
)
def test_no_more_is_written_than_the_budget_has(
    seed: int, model: str, policy: str, options: str, gib_per_day: float, dies_s: float
) -> None:
    trace = agents(5, rate=0.2, seed=seed)
    spec = replace(fleet(2, model, TIGHT[model]), failures=(Failure("w1", dies_s, 5.0),))
    run = run_of(trace, spec, f"{policy}{options}+ssd_writes={gib_per_day}")
    assert len(run.tally.step_s) == sum(len(session.requests) for session in trace)
    per_day = int(gib_per_day * GIB)
    had = burst_bytes(per_day) + (per_day - burst_bytes(per_day)) * run.ended_s / DAY_S
    for worker in run.workers.values():
        written = worker.flows.written
        assert run.shape.moved_bytes(written.chunks, written.checkpoints.total()) <= had
        assert worker.budget is not None
        assert worker.budget.spent_today_bytes <= had + 1


@settings(max_examples=10)
@given(
    seed=st.integers(0, 999),
    model=st.sampled_from([DENSE, HYBRID]),
    scheduling=st.sampled_from(sorted(POLICIES)),
    gib_per_day=st.floats(0.01, 64.0),
)
def test_no_policy_with_a_budget_beats_the_oracle(
    seed: int, model: str, scheduling: str, gib_per_day: float
) -> None:
    trace = agents(5, rate=0.5, seed=seed)
    spec = fleet(2, model, TIGHT[model])
    check(trace, spec, f"{scheduling}+ssd_writes={gib_per_day}")


def _one_shots(number: int, every_s: float = 10.0) -> list[Session]:
    return [
        Session(f"once {at}", (prompt(1_000 * (at + 1), 2_048),), every_s * at)
        for at in range(number)
    ]


def _mixed() -> Trace:
    """Forty prompts of 8 chunks that nobody repeats, and one session that comes back."""
    turns = [prompt(0, 2_048)]
    turns += [
        replace(prompt(0, 2_048 + 256 * at), parent=at - 1, think_s=20.0) for at in range(1, 10)
    ]
    sessions = [*_one_shots(40), Session("comes back", tuple(turns), 145.0)]
    return trace_of(*sorted(sessions, key=lambda session: session.start_s or 0.0))


def test_below_half_a_bucket_what_comes_back_is_written() -> None:
    """The bucket has room for 128 chunks: the first eight prompts are written whatever they are."""
    gib_per_day = 8 * 128 * CHUNK_BYTES / GIB
    run = run_of(_mixed(), fleet(1), f"colocated+ssd_writes={gib_per_day}")
    ssd = run.workers["w0"].memory.ssd
    once = [ssd.find(session.requests[0].blocks).chunks for session in _one_shots(40)]
    assert once[:8] == [8] * 8
    assert sum(once[14:]) < 8, "among equals the last half waits for something better"
    session = next(session for session in _mixed() if session.id == "comes back")
    assert ssd.find(session.requests[-1].blocks).chunks == 17


def test_a_first_turn_alone_is_worth_no_more_than_others() -> None:
    """So the later ones' use is what had it written: refused, it was asked for again."""
    gib_per_day = 8 * 128 * CHUNK_BYTES / GIB
    first = [replace(s, requests=s.requests[:1]) for s in _mixed() if s.id == "comes back"]
    trace = trace_of(*sorted([*_one_shots(20), *first], key=lambda s: s.start_s or 0.0))
    run = run_of(trace, fleet(1), f"colocated+ssd_writes={gib_per_day}")
    assert run.workers["w0"].memory.ssd.find(first[0].requests[0].blocks).chunks == 0


def test_a_bucket_outlives_a_death() -> None:
    gib_per_day = 8 * 128 * CHUNK_BYTES / GIB
    spec = replace(fleet(1), failures=(Failure("w0", 95.0, 1.0),))
    run = run_of(trace_of(*_one_shots(40)), spec, f"colocated+ssd_writes={gib_per_day}")
    calm = run_of(trace_of(*_one_shots(40)), fleet(1), f"colocated+ssd_writes={gib_per_day}")
    assert run.workers["w0"].flows.written.chunks == calm.workers["w0"].flows.written.chunks
