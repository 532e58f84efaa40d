"""The token bucket: never more than a day's budget in any day, across restarts too."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.store.catalog.write_budget import DAY_S, WriteBudget
from tests.clock import Clock

PER_DAY = 80_000


def budget(clock: Clock, wall: Clock | None = None) -> WriteBudget:
    return WriteBudget(PER_DAY, clock, wall or clock)


def test_it_starts_with_an_eighth_of_a_day_and_gains_the_rest_over_the_day(clock: Clock) -> None:
    b = budget(clock)
    assert b.spend(10_000)
    assert not b.spend(1)
    clock.now_s += DAY_S / 70
    assert b.left_bytes == pytest.approx(1_000)
    assert not b.spend(1_001)
    assert b.spend(999)
    clock.now_s += DAY_S
    assert b.left_bytes == 10_000, "no more than an eighth is ever saved up"
    assert b.fullness == 1


def test_what_was_not_written_is_given_back(clock: Clock) -> None:
    b = budget(clock)
    assert b.spend(4_000)
    b.refund(4_000)
    assert (b.left_bytes, b.spent_today_bytes) == (10_000, 0)
    b.refund(1)
    assert b.left_bytes == 10_000


def test_spent_today_forgets_after_24_hours(clock: Clock) -> None:
    b = budget(clock)
    assert b.spend(3_000)
    clock.now_s += 1_800
    assert b.spend(1_000)
    clock.now_s += 12 * 3600
    assert b.spend(500)
    assert b.spent_today_bytes == 4_500
    clock.now_s += 12 * 3600
    assert b.spent_today_bytes == 500


writes = st.lists(
    st.tuples(
        st.sampled_from([0.0, 60.0, 3_600.0, 20_000.0]),
        st.integers(1, 12_000),
        st.sampled_from(["run", "restart", "clock back"]),
    ),
    max_size=60,
)


@given(writes)
def test_no_24_hours_see_more_than_the_budget(writes: list[tuple[float, int, str]]) -> None:
    real, wall = Clock(), Clock()
    b = budget(real, wall)
    spent: list[tuple[float, int]] = []
    for passed_s, size_bytes, event in writes:
        real.now_s += passed_s
        wall.now_s += passed_s
        if event != "run":
            dumped = b.dump()
            wall.now_s -= 5_000 * (event == "clock back")
            b = budget(real, wall)
            b.load(dumped)
        if b.spend(size_bytes):
            spent.append((real.now_s, size_bytes))
            in_a_day = sum(size for at, size in spent if at > real.now_s - DAY_S)
            assert in_a_day <= PER_DAY


def test_a_restart_goes_on_where_the_last_engine_stopped(clock: Clock) -> None:
    wall = Clock()
    b = budget(clock, wall)
    assert b.spend(10_000)
    dumped = b.dump()
    wall.now_s += DAY_S / 14
    clock.now_s = 3.0  # another process, another monotonic clock
    again = budget(clock, wall)
    again.load(dumped)
    assert again.left_bytes == pytest.approx(5_000)
    assert again.spent_today_bytes == 10_000
    clock.now_s += DAY_S
    assert again.spent_today_bytes == 0


def test_a_wall_clock_that_jumps_gains_nothing_or_a_full_bucket(clock: Clock) -> None:
    wall = Clock()
    b = budget(clock, wall)
    assert b.spend(9_000)
    dumped = b.dump()
    for jump_s, left in ((-1e9, 1_000), (1e9, 10_000)):
        wall.now_s = 1_000.0 + jump_s
        again = budget(clock, wall)
        again.load(dumped)
        assert again.left_bytes == left


@pytest.mark.parametrize(
    "dumped",
    ["", "x", "[]", "{}", "null", json.dumps({"wall_s": 0, "left": "?", "spent": []}),
     json.dumps({"wall_s": 1e400, "left": 1, "spent": []}),
     json.dumps({"wall_s": 0, "left": float("nan"), "spent": []}),
     '{"wall_s": 0, "left": Infinity, "spent": []}',
     '{"wall_s": -Infinity, "left": 0, "spent": []}',
     '{"wall_s": 1000, "left": 0, "spent": [[NaN, 5]]}',
     '{"wall_s": 1000, "left": 0, "spent": [[Infinity, 5]]}',
     "[" * 100_000],
)  # fmt: skip
def test_what_cannot_be_read_counts_as_all_spent(clock: Clock, dumped: str) -> None:
    b = budget(clock)
    b.load(dumped)
    assert b.left_bytes == 0
    assert b.spent_today_bytes == 0
