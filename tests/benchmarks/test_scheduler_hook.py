"""The benchmark of the scheduler's hook still drives the hook as the engine does."""

from typing import Any

import pytest

from benchmarks import scheduler_hook
from benchmarks.scheduler_hook import HookTiming
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner import pricing


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "deepseek-v4-flash"])
def test_a_prompt_that_is_all_in_dram_is_restored_with_fresh_tables(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables: list[Any] = []

    class Table(pricing.TierTable):
        def __init__(self, *args: Any) -> None:
            tables.append(args)
            super().__init__(*args)

    monkeypatch.setattr(pricing, "TierTable", Table)
    timing = scheduler_hook.measure(preset, repeats=2)
    assert timing.chunks == 512
    assert timing.hook_s > 0
    assert timing.queue_s > 0
    made = [args for args in tables if args[1] is Tier.DRAM]
    assert len(made) >= 3, "the planner makes its table again for each prompt"


def test_the_release_of_a_load_counts() -> None:
    timing = HookTiming(100.0, 1.0, 2.0, 4.0, 8.0, 100.0, 100.0, 512, 1)
    assert timing.hook_s == 15.0
