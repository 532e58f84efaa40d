"""The fit finds coefficients in noise and forgets what has changed."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.cost_fit import RelativeErrors, RobustLeastSquares

PRIOR = (5e-3, 1e-4)


def fit(known: tuple[float, ...] | None = None) -> RobustLeastSquares:
    return RobustLeastSquares(PRIOR, known)


def test_the_prior_holds_until_samples_come() -> None:
    assert fit().coefficients == pytest.approx(PRIOR)
    assert fit((5e-3, 0.0)).coefficients == pytest.approx((5e-3, 0.0))


@pytest.mark.parametrize("factor", [1e-3, 0.1, 10.0, 1e3])
def test_a_wrong_default_is_dropped_at_once(factor: float) -> None:
    true = [p * factor for p in PRIOR]
    fitted = fit()
    for n in (1, 300, 1, 300, 1, 300):
        fitted.observe((1.0, n), true[0] + n * true[1], n.bit_length())
    assert fitted.coefficients == pytest.approx(true, rel=0.05)


def test_a_profile_loses_its_weight_slowly() -> None:
    weak, strong = fit(), fit(PRIOR)
    for fitted in (weak, strong):
        fitted.observe((1.0, 100), 2 * (5e-3 + 1e-2), 0)
    before = 5e-3 + 1e-2
    assert strong.predict((1.0, 100)) < 1.2 * before < 1.9 * before < weak.predict((1.0, 100))


@pytest.mark.parametrize("seed", range(5))
def test_coefficients_are_found_in_noise_and_outliers(seed: int) -> None:
    rng = random.Random(seed)
    true = (2e-3, 4e-5)
    fitted = fit()
    for _ in range(1000):
        n = rng.choice([1, 8, 64, 512, 2048])
        seconds = (true[0] + true[1] * n) * (1 + 0.1 * rng.gauss(0, 1))
        if rng.random() < 0.1:
            seconds *= rng.choice([10.0, 30.0, 0.05])
        fitted.observe((1.0, n), seconds, n.bit_length() // 3)
    assert fitted.coefficients == pytest.approx(true, rel=0.06)
    assert fitted.errors.median < 0.15


def test_many_small_steps_do_not_wash_out_what_few_large_ones_taught() -> None:
    rng = random.Random(1)
    fitted = fit()
    for n in (1000, 2000) * 5:
        fitted.observe((1.0, n), 2e-3 + 4e-5 * n, n.bit_length())
    for _ in range(20_000):
        n = rng.choice([1, 2])
        fitted.observe((1.0, n), (2e-3 + 4e-5 * n) * (1 + 0.2 * rng.gauss(0, 1)), n.bit_length())
    assert fitted.predict((1.0, 2000)) == pytest.approx(2e-3 + 4e-5 * 2000, rel=0.1)


def test_a_lasting_change_is_followed() -> None:
    fitted = fit()
    for step in range(2000):
        slower = 3.0 if step >= 1000 else 1.0
        for n in (1, 500):
            fitted.observe((1.0, n), slower * (2e-3 + 4e-5 * n), n.bit_length())
    assert fitted.coefficients == pytest.approx((6e-3, 1.2e-4), rel=0.05)


def test_one_outlier_hardly_moves_a_settled_fit() -> None:
    fitted = fit()
    for n in (1, 500) * 50:
        fitted.observe((1.0, n), 2e-3 + 4e-5 * n, n.bit_length())
    before = fitted.predict((1.0, 500))
    fitted.observe((1.0, 500), 100 * before, 9)
    fitted.fade(1.0)  # solves at once
    assert fitted.predict((1.0, 500)) == pytest.approx(before, rel=0.01)


samples = st.lists(
    st.tuples(st.integers(1, 10_000), st.integers(0, 10**6), st.floats(1e-6, 100.0)), max_size=60
)


@given(samples)
def test_predictions_are_finite_and_not_negative_for_any_samples(
    steps: list[tuple[int, int, float]],
) -> None:
    fitted = RobustLeastSquares((5e-3, 1e-4, 1e-9))
    for n, context, seconds in steps:
        fitted.observe((1.0, n, n * (context + n / 2)), seconds, n.bit_length() // 3)
        assert all(0.0 <= c < math.inf for c in fitted.coefficients)
    assert fitted.samples == len(steps)


def test_a_falling_trend_is_held_at_zero_and_the_rest_refitted() -> None:
    fitted = fit()
    for n, seconds in ((1, 1.0), (1000, 0.5)) * 20:
        fitted.observe((1.0, n), seconds, n.bit_length())
    assert fitted.coefficients[1] == 0.0
    assert 0.5 < fitted.coefficients[0] < 1.0


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_invalid_durations_are_ignored(seconds: float) -> None:
    fitted = fit()
    fitted.observe((1.0, 10), seconds, 0)
    assert fitted.samples == 0
    assert fitted.coefficients == pytest.approx(PRIOR)


def test_a_faded_fit_approaches_the_default() -> None:
    fitted = fit()
    for n in (1, 500) * 50:
        fitted.observe((1.0, n), 100 * (5e-3 + 1e-4 * n), n.bit_length())
    learned = fitted.coefficients
    fitted.fade(0.5)
    assert fitted.coefficients == pytest.approx(learned, rel=0.01)
    for _ in range(120):
        fitted.fade(0.5)
    assert fitted.coefficients == pytest.approx(PRIOR)


def test_error_statistics_cover_the_last_samples() -> None:
    errors = RelativeErrors(window=20)
    assert errors.median == math.inf
    for _ in range(50):
        errors.add(9.0, 1.0)
    for k in range(20):
        errors.add(1.0 + k / 100, 1.0)
    assert errors.count == 70
    assert errors.median == pytest.approx(0.09)
    assert errors.p95 == pytest.approx(0.18)
    assert errors.quantile(1.0) == pytest.approx(0.19)
