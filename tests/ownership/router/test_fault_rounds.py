"""Seeded rounds of faults against two routers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ownership.router.fault_rounds import AT_ONCE, run


def test_no_request_is_silent_and_none_hangs(tmp_path: Path) -> None:
    ends, _ = run(seed=20, rounds=6, folder=tmp_path)
    assert sum(ends.values()) == 6 * AT_ONCE
    assert {"whole", "left", "malformed", "too large"} <= set(ends)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_silent_and_none_hangs_in_300_rounds(seed: int, tmp_path: Path) -> None:
    ends, deeds = run(seed, rounds=100, folder=tmp_path)
    assert sum(ends.values()) == 100 * AT_ONCE
    assert len(deeds) == 5
    assert {"never read", "router killed"} <= set(ends)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_request_is_silent_and_none_hangs_while_redis_fails_over(tmp_path: Path) -> None:
    ends, deeds = run(seed=3, rounds=50, folder=tmp_path, with_sentinel=True)
    assert sum(ends.values()) == 50 * AT_ONCE
    assert deeds["lose Redis"] >= 3
