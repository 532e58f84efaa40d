"""The order in which the example's fleet is sent a trace."""

from __future__ import annotations

import pytest

from benchmarks.accounts import Account
from benchmarks.contention import Played, decoding_late, handoff_cost
from benchmarks.faithful_pd import one_by_one
from hetero_connector.planner.cost_model import HandoffCost
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.small_fleets import prompt, trace_of


def follows(parent: int, think_s: float) -> dict[str, object]:
    return {"parent": parent, "think_s": think_s}


def test_turns_come_after_their_think_time() -> None:
    turns = (prompt(0, 256), prompt(0, 512, **follows(0, 2.0)), prompt(0, 768, **follows(1, 5.0)))
    other = (prompt(9, 256), prompt(9, 512, **follows(0, 2.5)))
    trace = trace_of(Session("a", turns, 1.0), Session("b", other, 2.0))
    # Two tokens of an answer are three steps. Due: a 1.0, b 2.0, a 3.3, b 4.8, a 8.6.
    order = [(turn.session, turn.number) for turn in one_by_one(trace, 0.1)]
    assert order == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2)]


def test_a_request_that_comes_while_another_is_served_is_refused() -> None:
    trace = trace_of(Session("a", (prompt(0, 256),), 1.0), Session("b", (prompt(9, 256),), 1.2))
    assert len(list(one_by_one(trace, 0.05))) == 2
    with pytest.raises(ValueError, match="request 0 of session 1 comes while another is served"):
        list(one_by_one(trace, 0.1))


def test_the_cost_of_a_handoff_is_the_delay_of_first_tokens() -> None:
    turns = (prompt(0, 256), prompt(0, 1_024, **follows(0, 2.0)))
    trace = trace_of(Session("a", turns, 0.0), Session("b", (prompt(9, 512),), 9.0))
    free_s = {(0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3}
    taken_s = {(0, 0): 0.1 + 0.0756, (0, 1): 0.2 + 0.1524, (1, 0): 0.3 + 0.1012}
    real, free = (Account({}, {}, first_s, ()) for first_s in (taken_s, free_s))
    assert handoff_cost([Played(trace, real, free)]) == pytest.approx(HandoffCost(0.05, 1e-4))


def test_decoding_is_late_by_the_time_of_later_tokens() -> None:
    turns = (prompt(0, 256, output=11), prompt(0, 512, output=21, **follows(0, 2.0)))
    others = [Session(name, (prompt(9, 512, output=11),), 9.0) for name in "bc"]
    one_token = Session("d", (prompt(9, 512, output=1),), 19.0)
    trace = trace_of(Session("a", turns, 0.0), *others, one_token)
    first_s = {(0, 0): 0.1, (0, 1): 0.1, (1, 0): 0.1, (2, 0): 0.1, (3, 0): 0.1}
    simulated = Account({}, {}, first_s, [0.2 + 30 * 0.01, 0.1 + 10 * 0.01, 0.1 + 10 * 0.01, 0.1])
    later_s = {name: 2 * s for name, s in first_s.items()}
    took = Account({}, {}, later_s, [0.4 + 30 * 0.014, 0.2 + 10 * 0.013, 0.2 + 10 * 0.05, 0.2])
    assert decoding_late([Played(trace, took, simulated)]) == pytest.approx(0.004)
