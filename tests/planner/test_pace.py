"""Drift is followed, noise and outliers are not."""

from __future__ import annotations

import random

import pytest

from hetero_connector.planner.compute_model import ComputeRegression
from hetero_connector.planner.cost_fit import SpeedFactor


def test_as_a_rule_it_is_1() -> None:
    pace = SpeedFactor()
    for _ in range(100):
        pace.follow(1.0, 0)
    assert pace.factor == 1.0


@pytest.mark.parametrize("ratio", [0.5, 1.5, 3.0])
def test_what_lasts_is_followed_within_a_few_samples(ratio: float) -> None:
    pace = SpeedFactor()
    for _ in range(8):
        pace.follow(ratio, 0)
    assert pace.factor == pytest.approx(ratio, rel=0.25)


def test_it_is_back_as_soon_as_the_machine_is() -> None:
    pace = SpeedFactor()
    for ratio in (2.0,) * 10 + (1.0,) * 4:
        pace.follow(ratio, 0)
    assert pace.factor == pytest.approx(1.0, abs=0.1)


def test_one_outlier_does_not_count() -> None:
    pace = SpeedFactor()
    for ratio in (1.0, 1.0, 50.0, 1.0):
        pace.follow(ratio, 0)
        assert pace.factor == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_not_followed(seed: int) -> None:
    rng = random.Random(seed)
    pace = SpeedFactor()
    factors = []
    for _ in range(500):
        pace.follow(1.0 + 0.1 * rng.gauss(0, 1), 0)
        factors.append(pace.factor)
    strayed = sorted(abs(factor - 1.0) for factor in factors)
    assert strayed[250] < 0.02
    assert strayed[475] < 0.06


def test_what_is_usual_for_a_size_says_nothing_of_another() -> None:
    """Short steps that always take twice what the coefficients say do not slow the long ones."""
    pace = SpeedFactor()
    for _ in range(400):
        pace.follow(2.0, 1)
    pace.follow(1.0, 5)
    pace.follow(1.0, 5)
    assert pace.factor == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("seed", range(5))
def test_a_machine_that_drifts_is_predicted_better_than_by_its_average(seed: int) -> None:
    """Half of the time everything takes 1.7 times as long, for 15 steps on end."""
    rng = random.Random(seed)
    model = ComputeRegression()
    errors, of_average = [], []
    for step in range(600):
        n = rng.choice([30, 200, 1500])
        usual_s = 3e-3 + 5e-5 * n
        slow = 1.7 if step // 15 % 2 else 1.0
        seconds = slow * usual_s * (1 + 0.03 * rng.gauss(0, 1))
        if step >= 100:
            errors.append(abs(model.predict(float(n), 0.0) - seconds) / seconds)
            of_average.append(abs(1.3 * usual_s - seconds) / seconds)
        model.observe(n, 0, seconds)
    middle = len(errors) // 2
    assert sorted(errors)[middle] < 0.5 * sorted(of_average)[middle]
