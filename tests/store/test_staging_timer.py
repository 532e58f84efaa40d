"""A restore's reads are timed as a whole, and only where the time is theirs."""

from __future__ import annotations

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec import StateType
from hetero_connector.store.base import ReadTiming
from hetero_connector.store.staging_timer import StagingTimer

DENSE, WINDOW = StateType.DENSE_KV, StateType.WINDOW_SWA


def test_the_last_read_of_a_tier_tells_of_all_of_them() -> None:
    timer = StagingTimer(10.0, {Tier.SSD: 700, Tier.PEER: 0})
    timer.begun(Tier.SSD, DENSE, 100)
    timer.begun(Tier.SSD, DENSE, 100)
    timer.begun(Tier.SSD, WINDOW, 30)
    assert timer.ended(Tier.SSD, 11.0, failed=False) is None
    assert timer.ended(Tier.SSD, 11.5, failed=False) is None
    told = timer.ended(Tier.SSD, 12.0, failed=False)
    assert told == ReadTiming(Tier.SSD, {DENSE: 200, WINDOW: 30}, 700, 2.0)


def test_tiers_are_timed_apart() -> None:
    timer = StagingTimer(0.0, {})
    timer.begun(Tier.SSD, DENSE, 100)
    timer.begun(Tier.PEER, DENSE, 50)
    assert timer.ended(Tier.PEER, 1.0, failed=False) == ReadTiming(Tier.PEER, {DENSE: 50}, 0, 1.0)
    assert timer.ended(Tier.SSD, 3.0, failed=False) == ReadTiming(Tier.SSD, {DENSE: 100}, 0, 3.0)


def test_a_read_that_failed_or_was_begun_by_another_tells_nothing() -> None:
    timer = StagingTimer(0.0, {})
    timer.begun(Tier.SSD, DENSE, 100)
    timer.begun(Tier.SSD, DENSE, 100)
    assert timer.ended(Tier.SSD, 1.0, failed=True) is None
    assert timer.ended(Tier.SSD, 2.0, failed=False) is None
    timer = StagingTimer(0.0, {})
    timer.untold(Tier.SSD)
    timer.begun(Tier.SSD, DENSE, 100)
    assert timer.ended(Tier.SSD, 1.0, failed=False) is None
    assert timer.ended(Tier.SSD, 2.0, failed=False) is None


def test_a_check_of_bytes_in_dram_is_no_read() -> None:
    timer = StagingTimer(0.0, {})
    timer.begun(Tier.DRAM, DENSE, 100)
    assert timer.ended(Tier.DRAM, 1.0, failed=False) is None
