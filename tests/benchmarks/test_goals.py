"""Figures are held against their goals."""

from __future__ import annotations

import pytest

from benchmarks.goals import goal_table, is_met


@pytest.mark.parametrize(
    ("value", "goal", "met"),
    [(1.0, "<= 1.05", True), (1.1, "<= 1.05", False), (0.8, ">= 0.9", False), (9.0, "", True)],
)
def test_a_figure_is_held_against_its_goal(value: float, goal: str, met: bool) -> None:
    assert is_met(value, goal) is met


def test_a_table_says_which_goals_are_met() -> None:
    figures = {"lookup_ms_1m": 2.5, "claims_per_s": 107_000.0, "ping_ms": 0.08}
    _, _, *rows = goal_table("directory", figures).splitlines()
    assert [row.split() for row in rows] == [
        ["lookup_ms_1m", "2.5", "<=", "2", "missed"],
        ["claims_per_s", "107,000", ">=", "20000", "met"],
        ["ping_ms", "0.08"],
    ]
