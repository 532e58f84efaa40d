"""The benchmark of scheduling decisions times every policy on steps of every kind."""

from __future__ import annotations

import random

import pytest

from benchmarks import scheduling
from ownership.scheduling import POLICIES


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_timed_on_every_kind_of_step(policy: str) -> None:
    timings = scheduling.measure(policy, workers=4, repeats=2, linked=True)
    kinds = scheduling.steps(scheduling.fleet_of(4, True, random.Random(1)))
    assert [t.kind for t in timings] == list(kinds)
    assert all(t.decision_us > 0 for t in timings)
