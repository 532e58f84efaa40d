"""Paired ratios: intervals hold the truth as often as they say, and pairing makes them narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ownership.simulator.pairing import BlockSums, paired_ratio


def sums_of(
    waits_s: Sequence[float], *, attained: Sequence[float] | None = None, first: int = 0
) -> BlockSums:
    """Sums of sessions of one request each, numbered from `first` on."""
    numbers = list(range(first, first + len(waits_s)))
    met = attained if attained is not None else [1.0] * len(numbers)
    return BlockSums.of(numbers, (waits_s, waits_s), numbers, (waits_s, met))


def test_a_ratio_is_that_of_the_means() -> None:
    waits_s = [float(1 + i % 7) for i in range(100)]
    ratio = paired_ratio([sums_of([1.5 * x for x in waits_s])], [sums_of(waits_s)], "task_wait_s")
    assert not isinstance(ratio, str)
    assert ratio == pytest.approx((1.5, 1.5, 1.5))  # every pair has that ratio
    assert ratio.is_sure


def test_intervals_cover_the_true_ratio_and_shrink_when_sessions_are_paired() -> None:
    rng, covered, paired_width, width = np.random.default_rng(1), 0, 0.0, 0.0
    for _ in range(200):
        common = rng.lognormal(0.0, 1.0, 320)
        ours = common * 1.1 * rng.lognormal(0.0, 0.3, 320)
        theirs = common * rng.lognormal(0.0, 0.3, 320)
        ratio = paired_ratio([sums_of(ours)], [sums_of(theirs)], "task_wait_s")
        apart = paired_ratio([sums_of(ours)], [sums_of(rng.permutation(theirs))], "task_wait_s")
        assert not isinstance(ratio, str)
        assert not isinstance(apart, str)
        covered += ratio.low <= 1.1 <= ratio.high
        paired_width += ratio.high - ratio.low
        width += apart.high - apart.low
    assert 0.88 <= covered / 200 <= 0.99
    assert paired_width < 0.6 * width


def test_bursts_make_intervals_wide() -> None:
    """Sessions that wait in one queue are hardly more than one sample."""
    rng = np.random.default_rng(2)
    bursts = np.repeat(rng.lognormal(0.0, 1.0, 32), 32)
    alone = rng.permutation(bursts)
    widths = []
    for waits_s in (bursts, alone):
        ratio = paired_ratio([sums_of(waits_s)], [sums_of(np.ones(1024))], "task_wait_s")
        assert not isinstance(ratio, str)
        widths.append(ratio.high - ratio.low)
    assert widths[0] > 3 * widths[1]


def test_blocks_of_another_size_are_joined() -> None:
    few, more = [float(1 + i % 5) for i in range(32)], [float(1 + i % 5) for i in range(70)]
    assert (sums_of(few).sessions, sums_of(more).sessions) == (1, 4)
    ratio = paired_ratio([sums_of(few)], [sums_of(more)], "ttft_s")
    assert not isinstance(ratio, str)
    assert ratio.value == pytest.approx(np.mean(few) / np.mean(more), rel=1e-5)


def test_seeds_are_summed_block_by_block() -> None:
    ours = [sums_of([2.0] * 40), sums_of([4.0] * 40)]
    theirs = [sums_of([1.0] * 40), sums_of([1.0] * 40)]
    ratio = paired_ratio(ours, theirs, "task_slowdown")
    assert not isinstance(ratio, str)
    assert ratio.value == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("attained", "reason"), [([0.0] * 40, "a mean is 0"), ([1.0] * 3, "too few sessions"),
                             ([], "too few sessions")],
)  # fmt: skip
def test_what_has_no_interval_has_no_ratio(attained: list[float], reason: str) -> None:
    sums = sums_of([1.0] * len(attained), attained=attained)
    assert paired_ratio([sums], [sums], "attained") == reason


def test_a_late_window_has_as_many_blocks_as_an_early_one() -> None:
    """Blocks are of the sessions that have figures, however many came before."""
    waits_s = [float(1 + i % 5) for i in range(40)]
    early, late = sums_of(waits_s), sums_of(waits_s, first=10_000)
    assert (late.sessions, len(late.sums)) == (early.sessions, len(early.sums)) == (2, 20)
    ratio = paired_ratio([late], [sums_of(waits_s[:30], first=10_004)], "ttft_s")
    assert not isinstance(ratio, str)
    assert ratio.low <= ratio.value <= ratio.high


def test_sums_without_places_are_of_the_first_blocks() -> None:
    one = sums_of([float(1 + i) for i in range(32)])
    assert paired_ratio([replace(one, places=None)], [one], "ttft_s") == (1.0, 1.0, 1.0)
