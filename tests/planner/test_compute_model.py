"""Seconds of steps: the polynomial, its fit, and its errors."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.compute_model import (
    SLOW_ENGINE,
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
    StepMix,
    attention_work,
)

TRUE = ComputeCoefficients(3e-3, 5e-5, 2e-9)


def seconds_of(n: int, context: int) -> float:
    return TRUE.step_s + TRUE.token_s * n + TRUE.attention_s * n * (context + n / 2)


def test_attention_is_over_the_context_and_half_of_the_new_tokens() -> None:
    assert attention_work(10.0, 100.0) == 10 * 105


@given(st.integers(0, 10**6), st.lists(st.integers(1, 10**5), min_size=1, max_size=6))
def test_attention_of_a_chunked_prefill_adds_up(context: int, chunks: list[int]) -> None:
    parts, at = 0.0, context
    for n in chunks:
        parts += attention_work(float(n), float(at))
        at += n
    assert parts == pytest.approx(attention_work(float(sum(chunks)), float(context)))


def test_a_prediction_computed_by_hand() -> None:
    model = ComputeRegression(ComputeCoefficients(0.5, 0.01, 1e-4))
    assert model.predict(10, 100) == pytest.approx(0.5 + 0.1 + 1e-4 * 10 * 105)


def test_arrays_are_predicted_like_numbers() -> None:
    model = ComputeRegression(TRUE)
    new, context = np.array([1.0, 100.0, 4096.0]), np.array([0.0, 8192.0, 100.0])
    expected = [model.predict(n, c) for n, c in zip(new.tolist(), context.tolist(), strict=True)]
    assert model.predict(new, context).tolist() == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(5))
def test_known_coefficients_are_recovered_from_noise_with_outliers(seed: int) -> None:
    rng = random.Random(seed)
    model = ComputeRegression()
    for _ in range(2000):
        n = rng.choice([1, 4, 60, 512, rng.randint(1, 8192)])
        context = rng.randint(0, 100_000)
        seconds = seconds_of(n, context) * (1 + 0.08 * rng.gauss(0, 1))
        if rng.random() < 0.08:
            seconds *= rng.choice([8.0, 20.0, 0.1])
        model.observe(n, context, seconds)
    assert model.coefficients == pytest.approx(TRUE, rel=0.15)
    for n, context in ((1, 0), (1, 50_000), (2048, 0), (8192, 100_000)):
        assert model.predict(n, context) == pytest.approx(seconds_of(n, context), rel=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_fifty_requests_of_chunked_prefill_and_decode_teach_enough(seed: int) -> None:
    rng = random.Random(seed)
    model = ComputeRegression()
    for _ in range(50):
        prompt = rng.randint(100, 16_000)
        for start in range(0, prompt, 2048):
            n = min(2048, prompt - start)
            model.observe(n, start, seconds_of(n, start) * (1 + 0.1 * rng.gauss(0, 1)))
        for k in range(16):
            model.observe(1, prompt + k, seconds_of(1, prompt + k) * rng.uniform(0.8, 1.4))
    assert model.errors.median <= 0.15
    assert model.errors.p95 <= 0.4


def test_a_mixed_step_is_the_sum_of_its_requests() -> None:
    """Two requests in one step; separately they would be two steps with two fixed parts."""
    one, other = (100, 0), (1, 5000)
    tokens = one[0] + other[0]
    work = attention_work(*map(float, one)) + attention_work(*map(float, other))
    model = ComputeRegression()
    for _ in range(50):
        model.observe_work(tokens, work, 1.0)
        model.observe(500, 0, 5.0)
    step_s, token_s, attention_s = model.coefficients
    assert step_s + tokens * token_s + work * attention_s == pytest.approx(1.0, rel=0.05)


def test_a_step_of_no_tokens_teaches_nothing() -> None:
    model = ComputeRegression()
    model.observe(0, 1000, 1.0)
    assert model.samples == 0
    assert model.coefficients == pytest.approx(SLOW_ENGINE)


def test_compute_starts_from_a_profile() -> None:
    model = ComputeRegression(ComputeCoefficients(2e-3, 4e-5, 0.0))
    assert model.coefficients == pytest.approx((2e-3, 4e-5, 0.0))
    for _ in range(200):
        model.observe(10, 10_000, 2e-3 + 4e-4 + 1e-8 * 10 * 10_005)
        model.observe(1000, 0, 2e-3 + 4e-2 + 1e-8 * 1000 * 500)
    assert model.coefficients.attention_s == pytest.approx(1e-8, rel=0.1)


@pytest.mark.parametrize("share", [0.1, 0.3, 5.0, 30.0])
@pytest.mark.parametrize("sizes", [(64, 256, 1024, 4096), (2048,)])
def test_a_profile_that_is_wrong_is_learned_anew(share: float, sizes: tuple[int, ...]) -> None:
    """Such as one of short contexts, whose attention was too little to be seen."""
    true = ComputeCoefficients(8e-3, 3e-5, 1e-9)
    model = ComputeRegression(true._replace(attention_s=share * true.attention_s))
    rng = random.Random(0)
    for _ in range(2000):
        n, context = rng.choice(sizes), rng.randrange(100_000)
        model.observe(n, context, true.prompt_s(n, context) * (1 + 0.05 * rng.gauss(0, 1)))
    assert model.predict(8192, 100_000) == pytest.approx(true.prompt_s(8192, 100_000), rel=0.1)
    assert model.coefficients.attention_s == pytest.approx(true.attention_s, rel=0.2)


def test_what_no_sample_shows_stays_as_the_profile_says() -> None:
    model = ComputeRegression(ComputeCoefficients(8e-3, 3e-5, 1e-9))
    for _ in range(2000):
        model.observe(1, 0, 8e-3 + 3e-5)
    assert model.coefficients.attention_s == pytest.approx(1e-9, rel=0.01)


def test_a_slow_first_step_soon_loses_its_weight() -> None:
    """An engine's first steps allocate and compile."""
    model = ComputeRegression()
    for n in (512, 1, 1):
        model.observe(n, 0, 30 * seconds_of(n, 0))
    for _ in range(10):
        for n in (512, 1, 1):
            model.observe(n, 0, seconds_of(n, 0))
    for n in (512, 1):
        assert model.predict(n, 0) == pytest.approx(seconds_of(n, 0), rel=0.2)


TRUE_DELAYS = InterferenceCoefficients(8e-3, 5e-5, 2e-8, 1.5e-3, 4e-5, 3e-10)


def mixed_step_s(mix: StepMix) -> float:
    prefill = TRUE_DELAYS.delay_s(
        mix.prefill_tokens, mix.prefill_work, float(mix.prefill_tokens > 0)
    )
    return TRUE_DELAYS.decode_step_s(mix.decodes, mix.context_tokens) + prefill


def some_step(rng: random.Random) -> StepMix:
    tokens = rng.choice([0, 0, rng.randint(1, 64), rng.randint(1, 8_192)])
    work = attention_work(float(tokens), float(rng.randint(0, 60_000)))
    decodes = rng.randint(0 if tokens else 1, 200)
    return StepMix(tokens, work, decodes, decodes * rng.randint(500, 30_000))


@pytest.mark.parametrize("seed", range(3))
def test_every_coefficient_is_found_through_noise(seed: int) -> None:
    rng = random.Random(seed)
    model = InterferenceRegression()
    for _ in range(3_000):
        mix = some_step(rng)
        model.observe(mix, mixed_step_s(mix) * rng.uniform(0.95, 1.05))
    assert model.errors.median <= 0.05
    found = model.coefficients
    for name, value in TRUE_DELAYS._asdict().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.5), name
    delay_s = found.delay_s(2_048, 2_048 * 20_000, 1)
    assert delay_s == pytest.approx(TRUE_DELAYS.delay_s(2_048, 2_048 * 20_000, 1), rel=0.1)


def test_decodes_do_not_wash_out_what_prefills_have_taught() -> None:
    rng = random.Random(1)
    model = InterferenceRegression()
    for _ in range(1_000):
        mix = some_step(rng)
        model.observe(mix, mixed_step_s(mix))
    for _ in range(20_000):
        mix = StepMix(0, 0.0, 32, 32 * 4_000)
        model.observe(mix, mixed_step_s(mix))
    mix = StepMix(4_096, 4_096 * 10_000.0, 32, 32 * 4_000)
    assert model.predict(mix) == pytest.approx(mixed_step_s(mix), rel=0.1)


def test_before_the_first_step_a_decode_costs_as_much_as_a_token() -> None:
    compute = ComputeCoefficients(5e-3, 1e-4, 1e-9)
    model = InterferenceRegression(compute=compute)
    assert model.coefficients == pytest.approx((5e-3, 1e-4, 1e-9, 1e-4, 1e-4, 1e-9))
    assert model.samples == 0


def test_interference_starts_from_a_profile() -> None:
    assert InterferenceRegression(TRUE_DELAYS).coefficients == pytest.approx(TRUE_DELAYS)


def test_an_empty_step_teaches_nothing() -> None:
    model = InterferenceRegression()
    model.observe(StepMix(0, 0.0, 0, 0), 1.0)
    assert model.samples == 0


def test_delay_and_decode_step_computed_by_hand() -> None:
    """2 steps x 1 + 10 tokens x 0.1 + 50 pairs x 0.01 = 3.5; 1 + 3 x 2 + 7 x 3 = 28."""
    made = InterferenceCoefficients(1.0, 2.0, 3.0, 1.0, 0.1, 0.01)
    assert made.delay_s(10, 50, 2) == pytest.approx(3.5)
    assert made.decode_step_s(3, 7) == pytest.approx(28.0)
