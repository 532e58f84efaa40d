from __future__ import annotations

import pytest

from ownership.simulator.state.retention import Retention


@pytest.mark.parametrize(
    ("interval", "prompt_tokens", "junction", "first", "last", "kept"),
    [
        (0, 1000, 0, 1, 31, [31]),
        (0, 1024, 0, 1, 32, [31]),  # sent again it is computed from before its last token
        (0, 1000, 9, 1, 31, [9, 31]),
        (0, 1000, 9, 10, 31, [31]),  # what lies before was not computed
        (0, 1000, 0, 32, 40, []),  # an answer's end
        (256, 1000, 0, 1, 40, [8, 16, 24, 31, 32, 40]),
        (256, 1000, 0, 9, 23, [16]),
        (None, 100, 0, 1, 4, [1, 2, 3, 4]),
        (0, 20, 0, 1, 0, []),
    ],
)
def test_boundaries_of_32_tokens(
    interval: int | None,
    prompt_tokens: int,
    junction: int,
    first: int,
    last: int,
    kept: list[int],
) -> None:
    assert Retention(32, interval).boundaries(prompt_tokens, junction, 0, first, last) == kept


def test_what_lies_between_two_windows_that_touch_is_kept_too() -> None:
    assert Retention(32, 256, 2).boundaries(1_056, 0, 30, 1, 33) == [8, 16, 24, 30, 31, 32]
    assert Retention(32, 256, 2).boundaries(1_056, 0, 29, 29, 33) == [29, 32]


def test_a_window_is_kept_from_before_its_boundary_is_reached() -> None:
    assert Retention(32, 256, 2).boundaries(963, 0, 0, 25, 31) == [30, 31]
    assert Retention(32, 256, 2).boundaries(930, 0, 0, 25, 30) == [29]


def test_an_interval_shorter_than_a_chunk_keeps_what_falls_on_chunks() -> None:
    assert Retention(512, 768).boundaries(5_000, 0, 0, 1, 9) == [3, 6, 9]
    assert Retention(512, 256).boundaries(2_000, 0, 0, 1, 3) == [1, 2, 3]
