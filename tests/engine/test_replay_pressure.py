"""Replays without the engine's prefix cache, and in random sessions with few blocks.

The traffic, the blocks and the check of every answer are those of `test_soak`; here all
checkpoints are dropped after every round.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import (
    assert_no_leaks,
    delta,
    engine,
    forget_checkpoints,
    generate,
    metric,
    prompt_tokens,
    scheduler_side,
)
from tests.engine.soaking import (
    BLOCKS,
    LIVES,
    LONG,
    PREEMPTIONS,
    SHORT,
    arguments,
    assert_answers,
    recorded,
    tolerance,
)
from tests.engine.traffic import play

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

REPLAYED = "heterocache_replayed_tokens_total"
_slow = pytest.mark.slow


def test_without_the_engines_prefix_cache() -> None:
    prompt = prompt_tokens(1400, seed=91)
    with engine("gemma3", {"dram_gib": 0.1}, enable_prefix_caching=False) as llm:
        scheduler_side(llm).planner.replay_when_missing = True
        cold = generate(llm, prompt, max_tokens=16)
        forget_checkpoints(llm)
        replayed = generate(llm, prompt, max_tokens=16)
    assert replayed.num_cached_tokens == 1280 - 384  # the tail stored after it is too long
    assert replayed.tokens == cold.tokens
    assert delta(replayed, cold) <= tolerance("gemma3")


@pytest.mark.parametrize(
    ("model", "seed", "rounds"),
    [
        ("gemma3", 8, SHORT),
        pytest.param("deepseek_v4", 24, 3 * SHORT, marks=_slow),
        *(pytest.param("gemma3", 250 + n, LONG // LIVES, marks=_slow) for n in range(LIVES)),
    ],
)
def test_every_answer_is_the_engines_own(
    model: str, seed: int, rounds: int, tmp_path: Path
) -> None:
    traffic = recorded(model, seed, rounds)
    few = {"num_gpu_blocks_override": BLOCKS[model], "max_num_batched_tokens": 200}
    extra = {"dram_gib": 0.05, "ssd_dir": str(tmp_path), "ssd_gib": 0.1, "checkpoints": "zero"}
    with engine(model, extra, **(arguments(model) | few)) as llm:
        side = scheduler_side(llm)
        side.planner.replay_when_missing = True
        reset = llm.llm_engine.engine_core.engine_core.scheduler.reset_connector_cache
        answers = play(llm, traffic.rounds, reset, lambda: forget_checkpoints(llm))
        assert_no_leaks(llm)
    assert metric(REPLAYED) > 0
    assert metric(PREEMPTIONS) > 0, "blocks were never short"
    assert_answers(model, answers, traffic)
