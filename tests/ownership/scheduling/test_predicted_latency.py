"""The filters and draws of llm-d's predicted latency, on fleets where times are known.

A token takes 1 ms, and decoding nothing, so the time to the first token is that of the tokens that
wait and of the prompt's rest.
"""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest

from hetero_connector.planner.compute_model import InterferenceCoefficients
from ownership.scheduling import FleetView, Step, WorkerLoad, WorkerPrefix, WorkerView
from ownership.scheduling.predicted_latency import PredictedLatency
from ownership.scheduling.step_pricing import StepPricing
from tests.ownership.scheduling.fleets import costs_of, fleet_of, worker

FAST = costs_of(interference=InterferenceCoefficients(0.01, 0.0, 0.0, 0.0, 0.0, 0.0))


def at(name: str, queued: int = 0, running: int = 1) -> WorkerView:
    return worker(name, WorkerLoad(queued_tokens=queued, running_requests=running), FAST)


def drawn(policy: PredictedLatency, step: Step, view: FleetView, times: int = 2_000) -> set[str]:
    """Return the workers that have more than 1.5 % of the draws."""
    seen = Counter(policy.decide(step, view).placement.decode_worker for _ in range(times))
    return {name for name, count in seen.items() if count > 0.015 * times}


def test_a_worker_with_nearly_all_of_the_prompt_is_taken() -> None:
    """b waits 2 s longer than a. If it waits 6 s its prefix does not count, nor does less at c."""
    policy = PredictedLatency(random.Random(1))
    held = {"b": WorkerPrefix(990), "c": WorkerPrefix(700)}
    assert drawn(policy, Step(1_000, held), fleet_of(at("a"), at("b", 2_000), at("c"))) == {"b"}
    assert "b" not in drawn(policy, Step(1_000, held), fleet_of(at("a"), at("b", 6_100), at("c")))


def test_idle_workers_come_before_others() -> None:
    policy, step = PredictedLatency(random.Random(1)), Step(1_000)
    assert drawn(policy, step, fleet_of(at("b"), at("c", 3_000))) == {"b"}
    assert drawn(policy, step, fleet_of(at("b"), at("c", 3_000, running=0))) == {"c"}


def test_the_least_time_has_the_highest_score() -> None:
    times_s = np.array([[0.5, 1.5, 1.0], [0.01, 0.01, 0.01]])
    assert PredictedLatency(random.Random(1)).scores(times_s).tolist() == [1.01, 0.01, 0.51]


def test_both_times_are_weighed() -> None:
    """0.8 of the first and 0.2 of the second, each relative to the others."""
    scores = PredictedLatency(random.Random(1)).scores(np.array([[1.0, 2.0], [0.04, 0.02]]))
    assert scores.tolist() == pytest.approx([0.81, 0.21], abs=0.011)


def test_equal_workers_have_equal_scores() -> None:
    assert PredictedLatency(random.Random(1)).scores(np.ones((2, 3))).tolist() == [1.0, 1.0, 1.0]


def test_a_step_is_predicted_with_the_request_and_what_waits() -> None:
    """d0 10 ms + 3 decodes of 1 ms + 500 tokens of 10 us + 400 waiting tokens of 20 us over 100."""
    delays = InterferenceCoefficients(0.01, 1e-3, 1e-5, 0.0, 2e-5, 0.0)
    load = WorkerLoad(queued_tokens=400, running_requests=2, context_tokens=300)
    view = fleet_of(worker("a", load, costs_of(interference=delays)))
    policy, step = PredictedLatency(random.Random(1)), Step(200, output_tokens=100.0)
    found = policy.token_s(step, StepPricing(step, view))
    assert found.tolist() == pytest.approx([0.01 + 3e-3 + 5e-3 + 8e-5])
