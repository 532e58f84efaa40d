"""The order in which the example's fleet is sent a trace."""

from __future__ import annotations

import pytest

from benchmarks.faithful_pd import handing_over, one_by_one
from hetero_connector.planner.request_overhead import HandOver
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.small_fleets import prompt, trace_of


def follows(parent: int, think_s: float) -> dict[str, object]:
    return {"parent": parent, "think_s": think_s}


def test_turns_come_when_their_time_of_thinking_is_over() -> None:
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


def test_handing_over_is_what_first_tokens_were_late_by() -> None:
    turns = (prompt(0, 256), prompt(0, 1_024, **follows(0, 2.0)))
    trace = trace_of(Session("a", turns, 0.0), Session("b", (prompt(9, 512),), 9.0))
    free_s = {(0, 0): 0.1, (0, 1): 0.2, (1, 0): 0.3}
    taken_s = {(0, 0): 0.1 + 0.0756, (0, 1): 0.2 + 0.1524, (1, 0): 0.3 + 0.1012}
    assert handing_over(trace, taken_s, free_s) == pytest.approx(HandOver(0.05, 1e-4))
