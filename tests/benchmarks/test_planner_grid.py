"""The grid's figures, from times that are given."""

from __future__ import annotations

import pytest

from benchmarks.planner_grid import (
    Cell,
    Measured,
    figures_of,
    geomean_over_single,
    median_at_least,
)

CUTS = {"cut 0.25": [9.0], "cut 0.5": [9.0], "cut 0.75": [9.0]}


def measured(
    never: list[float],
    always: list[float],
    planned: list[float],
    cut: float = 9.0,
    resumed: int = 256,
) -> Measured:
    """`resumed`: by planning, where always loading resumes at 256."""
    turns = {"never": never, "always": always, "planned": planned, **CUTS, "cut 0.5": [cut] * 9}
    tokens = {"never": 0, "always": 256, "planned": resumed}
    return Measured(Cell("m", 1, None, 0), turns, tokens)


def test_drift_of_the_machine_is_no_loss() -> None:
    cell = measured([4.0, 8.0, 8.0], [1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 2.0, 4.0, 4.0, 4.0])
    assert cell.seconds("planned") / cell.seconds("always") == 1.5
    assert cell.over_best_single == 1.0


def test_a_loss_against_either_single_policy_is_seen() -> None:
    assert measured([2.0] * 3, [1.0] * 3, [1.5] * 3).over_best_single == 1.5
    assert measured([1.0] * 3, [2.0] * 3, [1.5] * 3).over_best_single == 1.5


def test_what_two_ways_alike_differ_by_is_told_apart_from_choices() -> None:
    alike = measured([4.0], [2.0], [2.5])
    assert alike.is_alike
    assert measured([1.0], [2.0], [1.5], resumed=0).is_alike
    wrong = measured([1.0], [2.0], [1.5])
    between = measured([2.0], [1.0], [1.1], resumed=128)
    assert not wrong.is_alike
    assert not between.is_alike
    figures = figures_of([alike, between])
    assert (figures["worst_cell_over_best"], figures["worst_alike"]) == (1.25, 1.25)
    assert figures["worst_choice_over_best"] == 1.1
    assert figures_of([alike])["worst_choice_over_best"] == 1.0


def test_a_median_above_the_goal_by_chance_is_no_sure_loss() -> None:
    by_chance = measured([9.0] * 6, [1.0] * 6, [1.0, 1.0, 1.1, 1.1, 1.2, 1.2])
    sure = measured([9.0] * 6, [1.0] * 6, [1.06, 1.1, 1.1, 1.1, 1.2, 1.2])
    few = measured([9.0] * 4, [1.0] * 4, [2.0] * 4)
    assert [x.is_surely_over for x in (by_chance, sure, few)] == [False, True, False]
    assert figures_of([by_chance, sure, few])["surely_over"] == 1


def test_how_low_a_median_may_be_is_by_how_many_samples_are_lower() -> None:
    # Of ten, at most one is below the median in 11 of 1024 cases, at most two in 56.
    assert median_at_least(list(range(10, 0, -1))) == 2
    assert median_at_least(list(range(10, 0, -1)), doubt=0.06) == 3
    assert median_at_least([3, 2, 1, 4]) == 0
    assert median_at_least([]) == 0


def test_regret_is_against_everything_that_was_tried() -> None:
    cell = measured([2.0] * 3, [2.0] * 3, [2.0] * 3, cut=1.0)
    assert (cell.over_best_single, cell.regret) == (1.0, 1.0)


def test_one_policy_everywhere_is_what_planning_is_held_against() -> None:
    cells = [
        measured([1.0], [4.0], [1.0], cut=1.0),
        measured([4.0], [1.0], [1.0], cut=0.25),
    ]
    assert geomean_over_single(cells, "planned") == pytest.approx(0.5)
    assert geomean_over_single(cells, "best") == pytest.approx(0.25)
    figures = figures_of(cells)
    assert figures == pytest.approx(
        {
            "worst_cell_over_best": 1.0,
            "surely_over": 0,
            "worst_choice_over_best": 1.0,
            "worst_alike": 1.0,
            "geomean_over_single": 0.5,
            "geomean_limit": 0.25,
            "regret_p95": 3.0,
        }
    )
