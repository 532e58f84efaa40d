"""A day of agent sessions on the real store stays within its capacity and its write budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.agent_sessions import synthetic, token_turns
from hetero_connector.store.catalog.write_budget import DAY_S, burst_bytes
from tests.benchmarks.scaled_agents import scaled
from tests.store.session_day import SCALES, DayResult, Limits, SessionDay, starts_over_a_day

pytestmark = pytest.mark.long

_DRAM_CHUNKS = 96
_RESTART_S = DAY_S / 2


def day(root: Path, model: str, limits: Limits) -> DayResult:
    """Ten sessions over the day, with a restart in the middle of it."""
    sessions = [scaled(s, 8, 16) for s in synthetic(10, seed=2)]
    one = SessionDay(root, model, limits)
    try:
        turns = token_turns(sessions, starts_over_a_day(len(sessions), seed=2))
        return one.run((t for t in turns if t.at_s < DAY_S), _RESTART_S)
    finally:
        one.close()


@pytest.fixture(scope="module", params=sorted(SCALES))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def unlimited(model: str, tmp_path_factory: pytest.TempPathFactory) -> DayResult:
    """With room and budget for everything."""
    return day(tmp_path_factory.mktemp("ssd"), model, Limits(1 << 30, dram_chunks=_DRAM_CHUNKS))


def test_without_a_budget_all_is_written_once_and_found_after_the_restart(
    unlimited: DayResult,
) -> None:
    assert unlimited.counters["heterocache_evictions{ssd}"] == 0
    assert unlimited.counters["heterocache_ssd_writes_refused"] == 0
    saved = unlimited.counters["heterocache_saved_bytes"]
    assert 0.99 * saved < unlimited.counters["heterocache_ssd_written_bytes"] <= saved
    assert unlimited.written_bytes > saved
    assert unlimited.hit_share("ssd") > 0, "by a session that was under way"
    assert unlimited.hit_share("dram") > 0.5


@pytest.mark.parametrize("share", [0.5, 0.2])
def test_the_day_s_writes_stay_within_the_budget_and_a_restart_gives_nothing_back(
    unlimited: DayResult, model: str, share: float, tmp_path: Path
) -> None:
    budget = int(share * unlimited.written_bytes)
    limits = Limits(1 << 30, budget, dram_chunks=_DRAM_CHUNKS)
    result = day(tmp_path, model, limits)
    assert 0.5 * budget < result.worst_day_bytes <= budget
    assert result.counters["heterocache_ssd_writes_refused"] > 0
    before, after = result.budget_left
    a_minute = budget * 60 / DAY_S  # the budget comes back by the wall clock
    assert after < before + a_minute, "closing may have spent some, opening gave nothing"
    assert after < 0.9 * burst_bytes(budget)
    assert result.hit_share("dram") > 0.9 * unlimited.hit_share("dram")


def test_a_small_disk_is_never_overfull_and_goes_on_taking_what_is_new(
    unlimited: DayResult, model: str, tmp_path: Path
) -> None:
    size_bytes = unlimited.bytes_for(0.3)
    result = day(tmp_path, model, Limits(size_bytes, dram_chunks=_DRAM_CHUNKS))
    assert result.disk_bytes <= size_bytes
    assert result.ssd_chunks < 0.5 * unlimited.ssd_chunks
    assert result.counters["heterocache_evictions{ssd}"] > unlimited.ssd_chunks / 2
    assert result.written_bytes > 0.95 * unlimited.written_bytes, "room is made for everything"
