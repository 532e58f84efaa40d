"""What a prefill costs the decodes beside it is learned from steps of every mix."""

from __future__ import annotations

import random

import pytest

from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    InterferenceCoefficients,
    InterferenceRegression,
    StepMix,
    attention_work,
)

TRUE = InterferenceCoefficients(8e-3, 5e-5, 2e-8, 1.5e-3, 4e-5, 3e-10)


def seconds_of(mix: StepMix) -> float:
    prefill = TRUE.delay_s(mix.prefill_tokens, mix.prefill_work, float(mix.prefill_tokens > 0))
    return TRUE.decode_step_s(mix.decodes, mix.context_tokens) + prefill


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
        model.observe(mix, seconds_of(mix) * rng.uniform(0.95, 1.05))
    assert model.errors.median <= 0.05
    found = model.coefficients
    for name, value in TRUE._asdict().items():
        assert getattr(found, name) == pytest.approx(value, rel=0.5), name
    delay_s = found.delay_s(2_048, 2_048 * 20_000, 1)
    assert delay_s == pytest.approx(TRUE.delay_s(2_048, 2_048 * 20_000, 1), rel=0.1)


def test_decodes_do_not_wash_out_what_prefills_have_taught() -> None:
    rng = random.Random(1)
    model = InterferenceRegression()
    for _ in range(1_000):
        mix = some_step(rng)
        model.observe(mix, seconds_of(mix))
    for _ in range(20_000):
        mix = StepMix(0, 0.0, 32, 32 * 4_000)
        model.observe(mix, seconds_of(mix))
    mix = StepMix(4_096, 4_096 * 10_000.0, 32, 32 * 4_000)
    assert model.predict(mix) == pytest.approx(seconds_of(mix), rel=0.1)


def test_before_anything_is_seen_a_decode_costs_a_token() -> None:
    compute = ComputeCoefficients(5e-3, 1e-4, 1e-9)
    model = InterferenceRegression(compute=compute)
    assert model.coefficients == pytest.approx((5e-3, 1e-4, 1e-9, 1e-4, 1e-4, 1e-9))
    assert model.samples == 0


def test_a_profile_is_where_it_starts_from() -> None:
    assert InterferenceRegression(TRUE).coefficients == pytest.approx(TRUE)


def test_an_empty_step_teaches_nothing() -> None:
    model = InterferenceRegression()
    model.observe(StepMix(0, 0.0, 0, 0), 1.0)
    assert model.samples == 0


def test_by_hand() -> None:
    """2 steps x 1 + 10 tokens x 0.1 + 50 pairs x 0.01 = 3.5; 1 + 3 x 2 + 7 x 3 = 28."""
    made = InterferenceCoefficients(1.0, 2.0, 3.0, 1.0, 0.1, 0.01)
    assert made.delay_s(10, 50, 2) == pytest.approx(3.5)
    assert made.decode_step_s(3, 7) == pytest.approx(28.0)
