"""The load that a trace is sent with: sped-up arrivals, stretches, a constant population."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.errors import SimulationError, TraceError
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from ownership.simulator.workload import Window, Workload
from tests.ownership.simulator.checked_runs import figures
from tests.ownership.simulator.small_fleets import DENSE, TIGHT, agents, fleet, prompt, trace_of

CHAT = trace_of(*(Session(str(i), (prompt(100 * i, 512),), start_s=2.0 * i) for i in range(10)))


def started(trace: Trace, workload: Workload) -> list[tuple[str, float | None]]:
    return [(session.id, session.start_s) for session in workload.trace(trace)]


def test_recorded_starts_are_sped_up() -> None:
    assert started(CHAT, Workload(speed=0.5)) == [(str(i), 4.0 * i) for i in range(10)]
    sent = Workload(speed=1.25).trace(CHAT)
    assert sent.caveats[-1] == "Sessions start 1.25 times as fast as recorded."


def test_the_seed_draws_which_stretch_is_sent() -> None:
    """Sessions keep their order and their starts."""
    found = {tuple(started(CHAT, Workload(sessions=4, seed=seed))) for seed in range(40)}
    assert len(found) == 7
    for sessions in found:
        first = int(sessions[0][0])
        assert sessions == tuple((str(i), 2.0 * i) for i in range(first, first + 4))
    assert started(CHAT, Workload(sessions=10, seed=3)) == started(CHAT, Workload())
    with pytest.raises(SimulationError, match="sessions: the trace has 10, not 11"):
        Workload(sessions=11).trace(CHAT)
    assert len(started(CHAT, Workload(rate=1.0, sessions=40, sharing=0.5))) == 40


def test_sessions_that_are_drawn_have_a_name_if_the_recorded_ones_have() -> None:
    for is_named in (True, False):
        recorded = trace_of(*(replace(session, is_named=is_named) for session in CHAT))
        drawn = Workload(rate=1.0, sessions=3, sharing=0.5).trace(recorded)
        assert [session.is_named for session in drawn] == [is_named] * 3


@pytest.mark.parametrize(
    ("workload", "number"),
    [
        (Workload(), 1), (Workload(speed=2.0), 1), (Workload(rate=1.0), 1),
        (Workload(sessions=10), 1), (Workload(sessions=5, half="first"), 1),
        (Workload(sessions=9), 2), (Workload(sessions=4), 7),
        (Workload(sessions=4, half="first"), 2), (Workload(rate=1.0, sharing=0.5), 40),
    ],
)  # fmt: skip
def test_it_is_known_which_seeds_send_the_same(workload: Workload, number: int) -> None:
    seeds = [replace(workload, seed=seed) for seed in range(40)]
    drawn = [one.drawn(CHAT, 10) for one in seeds]
    sent = [started(CHAT, one) for one in seeds]
    assert len(set(drawn)) == number
    assert all((drawn[0] == x) == (sent[0] == y) for x, y in zip(drawn, sent, strict=True))


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"speed": 0.0}, "0.0 is not above 0"),
        ({"speed": 2.0, "rate": 1.0}, "recorded starts are sped up: give no other ones"),
        ({"population": 0}, "0 is not above 0"),
        ({"population": 2}, "without end: give end_s"),
        ({"population": 2, "rate": 1.0, "window": Window(0.0, 9.0)}, "give neither rate nor"),
    ],
)
def test_what_contradicts_is_named(given: dict[str, float], problem: str) -> None:
    with pytest.raises((SimulationError, TraceError), match=problem):
        Workload(**given).trace(CHAT)  # type: ignore[arg-type]


def live_at_answers(workload: Workload, workers: int, policy: str = "colocated") -> list[int]:
    """Simulate, and return the number of sessions under way after each answer in the window."""
    spec = fleet(workers)
    trace = agents(12)
    seen: list[int] = []

    def look() -> None:
        if workload.window.has(run.loop.now_s):
            seen.append(len(run.sessions.live))

    run = FleetSimulation(
        spec, parse_policy(policy), StateShape.of(spec.model, 256), iter(workload.trace(trace)),
        trace.block_tokens, 0, on_answer=look, window=workload.window,
        population=workload.population,
    )  # fmt: skip
    run.run()
    return seen


@pytest.mark.parametrize(("population", "workers"), [(3, 1), (2, 3)])
def test_the_population_is_constant(population: int, workers: int) -> None:
    workload = Workload(population=population, window=Window(200.0, 1_500.0))
    seen = live_at_answers(workload, workers)
    assert len(seen) > 50
    assert set(seen) == {population * workers}


def test_tasks_of_a_population_count_if_they_end_in_the_window() -> None:
    """Sessions of one request, one after the other: what ends before and after is not counted."""
    trace = trace_of(Session("a", (prompt(0, 8_192, output=2),), 0.0))
    whole, late = (
        figures(trace, fleet(1), population=1, window=Window(begin_s, 20.0))  # type: ignore[arg-type]
        for begin_s in (0.0, 5.0)
    )
    assert whole.task_mean_s == pytest.approx(late.task_mean_s)
    assert whole.sessions * whole.task_mean_s == pytest.approx(20.0, abs=2 * whole.task_mean_s)
    assert late.sessions * late.task_mean_s == pytest.approx(15.0, abs=2 * late.task_mean_s)


def test_a_seed_draws_other_sessions() -> None:
    found = [
        figures(agents(12), fleet(2), population=2, seed=seed, window=Window(50.0, 300.0))  # type: ignore[arg-type]
        for seed in (0, 0, 1)
    ]
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_a_session_with_a_refused_request_is_no_task() -> None:
    """Its second request fits no worker, so its third is never sent."""
    turns = (prompt(0, 512), prompt(0, 262_144, parent=0, think_s=1.0))
    refused = Session("a", (*turns, prompt(0, 1_024, parent=1, think_s=1.0)), 0.0)
    spec = fleet(1, capacity=TIGHT[DENSE])
    whole = Session("b", (prompt(5_000, 512),), 50.0)
    found, alone = (figures(trace_of(*x), spec) for x in ((refused, whole), (whole,)))
    assert (found.requests, found.refused, found.sessions) == (2, 1, 1)
    assert found.task_slowdown_mean == pytest.approx(alone.task_slowdown_mean)
    assert found.task_mean_s == pytest.approx(alone.task_mean_s)


def test_a_population_that_is_refused_comes_back_and_ends() -> None:
    """No page for any prompt: every session is refused, and another one follows."""
    trace = trace_of(Session("a", (prompt(0, 262_144),), 0.0))
    found = simulate(
        trace, fleet(1, capacity=TIGHT[DENSE]), parse_policy("colocated"),
        Workload(population=2, window=Window(0.0, 10.0)),
    ).figures  # fmt: skip
    assert (found.requests, found.refused) == (0, 20)
