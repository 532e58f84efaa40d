from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from hetero_connector.errors import TraceError
from ownership.simulator.traces.distributions import (
    Constant,
    Distribution,
    Exponential,
    Geometric,
    LogNormal,
    Uniform,
    as_text,
    parse_distribution,
)

numbers = st.floats(0, 1e9, allow_subnormal=False)
distributions = st.one_of(
    st.builds(Constant, numbers),
    st.tuples(numbers, numbers).map(lambda pair: Uniform(min(pair), max(pair))),
    st.builds(Exponential, numbers.filter(bool)),
    st.builds(Geometric, numbers.map(lambda mean: mean + 1)),
    st.tuples(numbers.filter(bool), numbers.filter(bool)).map(
        lambda pair: LogNormal(min(pair), max(pair))
    ),
)


def draws(distribution: Distribution, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.array([distribution.sample(rng) for _ in range(20_000)])


@given(distributions)
def test_what_it_says_is_what_it_is(distribution: Distribution) -> None:
    assert parse_distribution(as_text(distribution)) == distribution


def test_draws_have_the_figures_they_are_named_by() -> None:
    assert set(draws(Constant(3))) == {3}
    uniform = draws(Uniform(2, 6))
    assert (uniform.min() >= 2, uniform.max() <= 6) == (True, True)
    assert uniform.mean() == pytest.approx(4, rel=0.02)
    assert draws(Exponential(5)).mean() == pytest.approx(5, rel=0.03)
    geometric = draws(Geometric(8))
    assert geometric.mean() == pytest.approx(8, rel=0.03)
    assert geometric.min() == 1
    lognormal = np.percentile(draws(LogNormal(668, 3800)), [50, 90])
    assert lognormal == pytest.approx([668, 3800], rel=0.05)
    assert set(draws(LogNormal(7, 7)).round(9)) == {7}


def test_the_same_seed_draws_the_same() -> None:
    assert (draws(LogNormal(1, 2), seed=4) == draws(LogNormal(1, 2), seed=4)).all()
    assert (draws(LogNormal(1, 2), seed=4) != draws(LogNormal(1, 2), seed=5)).any()


def test_a_number_is_a_constant() -> None:
    assert parse_distribution(" 4 ") == Constant(4)
    assert parse_distribution("exponential( mean = 2.5 )") == Exponential(2.5)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("normal(mean=1)", "is neither a number nor one of constant(value=...), uniform("),
        ("lognormal(p50=1)", "is not lognormal(p50=..., p90=...): "),
        ("lognormal(p50=9, p90=8)", "0 < p50 <= p90 must hold"),
        ("lognormal(p50=0, p90=8)", "0 < p50 <= p90 must hold"),
        ("uniform(low=3, high=2)", "low must not exceed high"),
        ("exponential(mean=0)", "mean must be greater than 0"),
        ("exponential(mean=x)", "could not convert"),
        ("exponential(mean=inf)", "inf is not a finite number from 0"),
        ("geometric(mean=0.5)", "mean must be at least 1"),
        ("geometric()", "is not geometric(mean=...)"),
        ("-3", "is neither a number"),
        ("nan", "is neither a number"),
    ],
)
def test_what_says_no_distribution(text: str, problem: str) -> None:
    with pytest.raises(TraceError) as caught:
        parse_distribution(text, "turns")
    assert caught.value.field == "turns"
    assert problem in caught.value.problem
