"""The benchmark of scheduling decisions times every policy on steps of every kind."""

from __future__ import annotations

import random

import pytest

from benchmarks import scheduling
from benchmarks.goals import GOALS
from ownership.scheduling import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_timed_on_every_kind_of_step(policy: str) -> None:
    timings = scheduling.measure(policy, workers=4, repeats=2, linked=True)
    kinds = scheduling.steps(scheduling.fleet_of(4, True, random.Random(1)))
    assert [t.kind for t in timings] == list(kinds)
    assert all(t.decision_us > 0 for t in timings)


def test_the_ledger_is_timed() -> None:
    decision_us, request_us = scheduling.ledger_us(2, 10)
    assert 0.0 < decision_us < request_us


def test_every_goal_is_a_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = [
        scheduling.Timing(policy, workers, "", False, 1.0)
        for policy, workers in (("ownerserve", 64), ("ownerserve", 8), ("colocated", 64))
    ]
    one = scheduling.Timing("ownerserve", 1, "", False, 1.0)
    monkeypatch.setattr(scheduling, "measure", lambda *_, **__: [*timed, one])
    _, figures = scheduling.measure_all(1)
    assert GOALS["scheduling"].keys() <= figures.keys()
