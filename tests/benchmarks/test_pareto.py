"""The front that checkpoint policies are held against."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.pareto import Point, front, hull, is_beaten, over_hull

POINTS = st.lists(
    st.tuples(st.integers(0, 50).map(float), st.integers(0, 50).map(float)), min_size=1, max_size=12
)


def test_a_front_worked_by_hand() -> None:
    points = [(1.0, 9.0), (2.0, 8.0), (3.0, 3.0), (3.0, 5.0), (6.0, 2.0), (9.0, 2.0)]
    assert front(points) == [(1.0, 9.0), (2.0, 8.0), (3.0, 3.0), (6.0, 2.0)]
    assert hull(points) == [(1.0, 9.0), (3.0, 3.0), (6.0, 2.0)]
    assert is_beaten((9.0, 2.0), points)
    assert not is_beaten((3.0, 3.0), points)


@pytest.mark.parametrize(
    ("point", "over"),
    [
        ((2.0, 6.0), 1.0),
        ((2.0, 3.0), 0.5),
        ((2.0, 9.0), 1.5),
        ((8.0, 3.0), 1.5),
        ((0.5, 99.0), 0.0),
    ],
)
def test_how_far_a_point_lies_over_the_hull(point: Point, over: float) -> None:
    assert over_hull(point, [(1.0, 9.0), (3.0, 3.0), (6.0, 2.0)]) == pytest.approx(over)


@given(POINTS, st.tuples(st.integers(0, 50).map(float), st.integers(0, 50).map(float)))
def test_what_is_beaten_is_not_under_the_hull(points: list[Point], point: Point) -> None:
    if over_hull(point, points) < 1 - 1e-9:
        assert not is_beaten(point, points)
    for other in points:
        assert any(x <= other[0] and y <= other[1] for x, y in front(points))
        assert over_hull(other, points) >= 1 - 1e-9
