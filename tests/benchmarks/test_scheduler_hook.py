"""The benchmark of the scheduler's hook still drives the hook as the engine does."""

import pytest

from benchmarks import scheduler_hook


@pytest.mark.parametrize("preset", ["llama-3.1-8b", "deepseek-v4-flash"])
def test_a_prompt_that_is_all_in_dram_is_restored(preset: str) -> None:
    timing = scheduler_hook.measure(preset, repeats=1)
    assert timing.chunks == 512
    assert timing.hook_s > 0
    assert timing.queue_s > 0
