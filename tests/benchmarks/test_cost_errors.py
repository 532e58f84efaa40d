"""The benchmark of the planner's predictions computes its figures from the requests it has seen."""

from __future__ import annotations

import math
import random

import pytest

from benchmarks.cost_errors import LONGEST, CostErrors, Judged, figures, session
from benchmarks.measure import percentile
from hetero_connector.artifacts.record import Tier


def judged(
    predicted_s: float, observed_s: float, *, session: int = 0, turn: int = 0, restored: int = 0
) -> Judged:
    return Judged(session, turn, None, 1000, restored, predicted_s, observed_s)


def test_sessions_are_cold_then_restored_and_fit_the_engine() -> None:
    sessions = [session(random.Random(seed)) for seed in range(200)]
    totals = [sum(turn.new_tokens for turn in turns) for turns in sessions]
    assert max(totals) <= LONGEST
    assert min(turns[0].new_tokens for turns in sessions) < 300
    assert max(totals) > 6000
    assert all(turns[0].tier is None for turns in sessions)
    later = {turn.tier for turns in sessions for turn in turns[1:]}
    assert later == {Tier.DRAM, Tier.SSD}


def test_the_error_is_relative_to_what_was_observed() -> None:
    assert judged(3.0, 2.0).error == 0.5
    assert judged(1.0, 2.0).error == 0.5


def test_noise_is_of_pairs_that_were_restored_alike() -> None:
    result = CostErrors(
        "dense",
        [
            judged(1.0, 1.0),
            judged(1.0, 3.0),
            judged(1.0, 1.0, turn=1, restored=256),
            judged(1.0, 9.0, turn=1, restored=512),
            judged(1.0, 9.0, session=1),
        ],
        [],
    )
    assert result.noise() == [pytest.approx(2 / math.sqrt(2) / 2)]


def test_noise_is_the_error_of_a_predictor_that_knows_the_mean() -> None:
    rng = random.Random(0)
    pairs = [(1 + 0.1 * rng.gauss(0, 1), 1 + 0.1 * rng.gauss(0, 1)) for _ in range(4000)]
    requests = [judged(1.0, x, session=i) for i, pair in enumerate(pairs) for x in pair]
    noise = CostErrors("dense", requests, []).noise()
    errors = [abs(request.observed_s - 1.0) for request in requests]
    for share in (0.5, 0.95):
        assert percentile(noise, share) == pytest.approx(percentile(errors, share), rel=0.08)


def test_figures_are_the_worst_model_s() -> None:
    good = CostErrors("a", [judged(1.0, 1.0), judged(1.1, 1.0)], [])
    bad = CostErrors("b", [judged(2.0, 1.0), judged(1.5, 1.0)], [])
    worst = figures([good, bad])
    assert worst["cost_error_median"] == pytest.approx(0.5)
    assert worst["cost_error_p95"] == pytest.approx(1.0)
