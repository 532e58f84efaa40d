"""The benchmark of scheduling decisions has a step of every class, and every policy decides."""

from __future__ import annotations

import random

import pytest

from benchmarks import scheduling
from ownership.scheduling import POLICIES, ClassThresholds, StepClass, classify


def test_there_is_a_step_of_every_class() -> None:
    steps = scheduling.steps(scheduling.fleet_of(8, False, random.Random(1)))
    assert list(steps) == list(StepClass)
    assert [classify(step, ClassThresholds()) for step in steps.values()] == list(StepClass)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_is_timed_on_every_class(policy: str) -> None:
    timings = scheduling.measure(policy, workers=4, repeats=2, linked=True)
    assert [t.step_class for t in timings] == list(StepClass)
    assert all(t.decision_us > 0 for t in timings)
