"""The local search by one who knows what comes: between the best placement and where it began."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings

from benchmarks.research.hindsight import Changes, Hindsight, Served, Turn
from ownership.scheduling.ownerserve import OwnerServe
from ownership.scheduling.step_pricing import Route
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.session import Session, Trace
from tests.benchmarks.research.few_requests import few_requests
from tests.ownership.simulator.small_fleets import agents, fleet, prompt, trace_of

OWNERSERVE = OwnerServe()
AT_0 = Route(0, 0)


def two_at_once() -> Trace:
    return trace_of(*(Session(n, (prompt(i, 8_192),), 0.0) for n, i in (("a", 0), ("b", 900))))


def test_a_search_separates_two_prompts_queued_at_one_worker() -> None:
    case = Hindsight(two_at_once(), fleet(2), 256)
    queued = case.outcome({Turn("a", 0): AT_0, Turn("b", 0): AT_0}, OWNERSERVE)
    found = case.improved(queued, OWNERSERVE, 20, Random(0))
    assert {route.decode for route in found.best.placed.values()} == {0, 1}
    assert found.best.wait_s < queued.wait_s
    assert sum(found.tried.values()) == 20
    assert sum(found.kept.values()) >= 1


@settings(max_examples=3, deadline=None)
@given(few_requests())
def test_a_search_never_ends_worse_than_it_began(trace: Trace) -> None:
    case = Hindsight(trace, fleet(2), 256)
    begun = case.outcome({}, OWNERSERVE)
    assert case.improved(begun, OWNERSERVE, 30, Random(1)).best.wait_s <= begun.wait_s


def test_the_placements_of_a_policy_give_its_figures() -> None:
    trace, spec = agents(6, rate=0.5), fleet(2)
    case = Hindsight(trace, spec, 256)
    begun = case.outcome({}, OWNERSERVE)
    figures = simulate(trace, replace(spec, chunk_tokens=256), parse_policy("ownerserve")).figures
    assert begun.wait_s == figures.task_wait_mean_s
    assert begun.late_share == pytest.approx(figures.decode_late_share)
    again = case.outcome(begun.placed, OWNERSERVE)
    assert (again.wait_s, again.served) == (begun.wait_s, begun.served)
    turn = begun.served[0].turn
    other = Route(1 - begun.placed[turn].decode, 1 - begun.placed[turn].decode)
    assert case.outcome({turn: other}, OWNERSERVE).placed[turn] == other


def test_the_same_seed_finds_the_same() -> None:
    case = Hindsight(agents(4, rate=1.0), fleet(2), 256)
    begun = case.outcome({}, OWNERSERVE)
    once, again = (case.improved(begun, OWNERSERVE, 25, Random(3)) for _ in range(2))
    assert once == again


def schedule(workers: int = 3) -> tuple[dict[Turn, Route], list[Served]]:
    """A session of three turns at worker 0, with others; only the first waited."""
    turns = [Turn("s", n) for n in range(3)] + [Turn(str(n), 0) for n in range(9)]
    placed = {turn: Route(n % workers, n % workers) for n, turn in enumerate(turns)}
    placed |= {Turn("s", n): AT_0 for n in range(3)}
    waited_s = [1.0 if n == 0 else 0.0 for n in range(len(turns))]
    served = [Served(t, float(n), n + 2.5, waited_s[n]) for n, t in enumerate(turns)]
    return placed, served


def test_changes_are_of_every_kind_and_change_what_was_near_a_request_that_waited() -> None:
    placed, served = schedule()
    changes = Changes(placed, served, 3, Random(0))
    drawn = [changes.draw() for _ in range(300)]
    assert {kind for kind, _ in drawn} == {"one", "exchange", "window", "few", "session"}
    # Only the first waited; at worker 0 while it was there were the session's next two turns.
    near = {Turn("s", 0), Turn("s", 1), Turn("s", 2)}
    assert {turn for kind, new in drawn if kind == "one" for turn in new} == near
    for kind, new in drawn:
        for turn, route in new.items():
            assert route.source not in (route.prefill,), kind
            assert {route.decode, route.prefill} <= {0, 1, 2}
            if kind in ("one", "few"):
                assert route != placed[turn]


def test_a_session_moves_with_its_later_turns_and_its_state() -> None:
    placed, served = schedule()
    changes = Changes(placed, served, 3, Random(0))
    moved = [new for kind, new in (changes.draw() for _ in range(300)) if kind == "session"]
    for new in moved:
        assert set(new) == {Turn("s", 0), Turn("s", 1), Turn("s", 2)}
        first, later = new[Turn("s", 0)], new[Turn("s", 2)]
        assert later == Route(first.decode, first.decode)
        assert first.source == (None if first.prefill == 0 else 0)
