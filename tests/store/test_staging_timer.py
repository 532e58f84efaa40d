"""A restore's reads are timed as a whole, and only where the time is theirs."""

from __future__ import annotations

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec import StateType
from hetero_connector.store.base import ReadTiming
from hetero_connector.store.catalog.restore import StagingTimer

DENSE, WINDOW = StateType.DENSE_KV, StateType.WINDOW_SWA


def test_the_last_read_of_a_tier_tells_of_all_of_them() -> None:
    timer = StagingTimer(10.0, {Tier.SSD: 700, Tier.PEER: 0})
    timer.add(Tier.SSD, DENSE, 100)
    timer.add(Tier.SSD, DENSE, 100)
    timer.add(Tier.SSD, WINDOW, 30)
    assert timer.end(Tier.SSD, 100, 11.0, failed=False) is None
    assert timer.end(Tier.SSD, 100, 11.5, failed=False) is None
    told = timer.end(Tier.SSD, 30, 12.0, failed=False)
    assert told == ReadTiming(Tier.SSD, {DENSE: 200, WINDOW: 30}, 700, 2.0)


def test_tiers_are_timed_apart() -> None:
    timer = StagingTimer(0.0, {})
    timer.add(Tier.SSD, DENSE, 100)
    timer.add(Tier.PEER, DENSE, 50)
    peer = timer.end(Tier.PEER, 50, 1.0, failed=False)
    assert peer == ReadTiming(Tier.PEER, {DENSE: 50}, 0, 1.0)
    ssd = timer.end(Tier.SSD, 100, 3.0, failed=False)
    assert ssd == ReadTiming(Tier.SSD, {DENSE: 100}, 0, 3.0)


def test_what_is_given_up_would_have_taken_as_long_as_what_arrived_says() -> None:
    timer = StagingTimer(10.0, {Tier.SSD: 700})
    for _ in range(4):
        timer.add(Tier.SSD, DENSE, 100)
    for _ in range(3):
        timer.end(Tier.SSD, 100, 12.0, failed=False)
    assert timer.give_up(19.0) == [ReadTiming(Tier.SSD, {DENSE: 400}, 700, 12.0, whole=False)]


def test_of_what_brings_nothing_twice_the_time_waited_is_thought() -> None:
    timer = StagingTimer(10.0, {})
    timer.add(Tier.SSD, DENSE, 100)
    timer.add(Tier.PEER, DENSE, 100)
    timer.end(Tier.PEER, 100, 11.0, failed=False)
    assert timer.give_up(20.0) == [ReadTiming(Tier.SSD, {DENSE: 100}, 0, 20.0, whole=False)]


def test_a_read_that_failed_took_its_time_nevertheless() -> None:
    timer = StagingTimer(0.0, {})
    timer.add(Tier.SSD, DENSE, 300)
    timer.add(Tier.SSD, DENSE, 100)
    assert timer.end(Tier.SSD, 300, 1.0, failed=True) is None
    told = timer.end(Tier.SSD, 100, 6.0, failed=False)
    assert told == ReadTiming(Tier.SSD, {DENSE: 400}, 0, 12.0, whole=False)


def test_a_peer_that_fails_tells_nothing_of_the_others() -> None:
    timer = StagingTimer(0.0, {})
    timer.add(Tier.PEER, DENSE, 100)
    timer.add(Tier.PEER, DENSE, 100)
    assert timer.end(Tier.PEER, 100, 1.0, failed=True) is None
    assert timer.give_up(2.0) == []
    assert timer.end(Tier.PEER, 100, 3.0, failed=False) is None


def test_a_read_that_was_begun_by_another_tells_nothing() -> None:
    timer = StagingTimer(0.0, {})
    timer.add_foreign(Tier.SSD)
    assert timer.give_up(5.0) == []
    timer = StagingTimer(0.0, {})
    timer.add_foreign(Tier.SSD)
    timer.add(Tier.SSD, DENSE, 100)
    assert timer.end(Tier.SSD, 100, 1.0, failed=False) is None
    assert timer.end(Tier.SSD, 100, 2.0, failed=False) is None


def test_a_check_of_bytes_in_dram_is_no_read() -> None:
    timer = StagingTimer(0.0, {})
    timer.add(Tier.DRAM, DENSE, 100)
    assert timer.end(Tier.DRAM, 100, 1.0, failed=False) is None
