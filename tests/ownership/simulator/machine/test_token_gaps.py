from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownership.simulator.machine.token_gaps import TokenGaps

GAPS = st.lists(st.tuples(st.floats(1e-5, 100.0), st.integers(1, 50)), min_size=1, max_size=30)


@given(GAPS, st.integers(1, 99))
def test_percentiles_are_those_of_the_gaps_to_1_percent(
    gaps: list[tuple[float, int]], q: int
) -> None:
    found = TokenGaps()
    for seconds, count in gaps:
        found.add(seconds, count)
    each = np.repeat(*map(list, zip(*gaps, strict=True)))
    assert (found.count, found.mean_s) == (len(each), pytest.approx(each.mean()))
    exact = np.percentile(each, q, method="inverted_cdf")
    assert found.percentile_s(q) == pytest.approx(exact, rel=0.0101)


@given(GAPS, GAPS)
def test_gaps_since_a_copy_are_those_added_since(
    before: list[tuple[float, int]], after: list[tuple[float, int]]
) -> None:
    first, both, alone = TokenGaps(), TokenGaps(), TokenGaps()
    for gap in before:
        first.add(*gap)
        both.add(*gap)
    for gap in after:
        alone.add(*gap)
        both.add(*gap)
    assert [both.since(first).percentile_s(q) for q in (1, 50, 99)] == [
        alone.percentile_s(q) for q in (1, 50, 99)
    ]
    assert both.since(first).mean_s == pytest.approx(alone.mean_s, rel=1e-4)


def test_no_gap_takes_no_time() -> None:
    assert (TokenGaps().percentile_s(99), TokenGaps().mean_s) == (0.0, 0.0)
