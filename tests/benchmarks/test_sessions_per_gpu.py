from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.sessions_per_gpu import most_population, sessions_per_gpu


@given(st.integers(0, 500), st.integers(1, 64))
def test_the_search_finds_the_limit_to_a_sixteenth(limit: int, first: int) -> None:
    found = most_population(lambda population: population <= limit, first, 1_024)
    assert found <= limit
    assert limit - found <= max(1, found / 16)


def test_what_always_attains_ends_at_the_most() -> None:
    assert most_population(lambda population: True, 8, 100) == 100


def test_no_population_is_simulated_twice() -> None:
    asked: list[int] = []

    def share_at(population: int) -> float:
        asked.append(population)
        return 1.0 - 0.001 * population

    found = sessions_per_gpu(share_at, 2, 8, 1_024)
    assert len(asked) == len(set(asked))
    assert found == {
        "sessions_per_gpu_90": pytest.approx(50, rel=1 / 16),
        "sessions_per_gpu_99": pytest.approx(5, rel=1 / 5),
    }
