"""Random sessions whose checkpoints are dropped after every round: windows are replayed.

The traffic, the few blocks and the check of every answer are those of test_soak.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.harness import BF16_MODELS, engine, forget_checkpoints, metric, scheduler_side
from tests.engine.test_soak import (
    BF16_TOLERANCE,
    BLOCKS,
    LONG,
    PREEMPTIONS,
    SHORT,
    TOLERANCE,
    arguments,
    assert_nothing_is_held,
    deviating,
    recomputed,
)
from tests.engine.traffic import play, record

pytestmark = [pytest.mark.engine, pytest.mark.timeout(3600)]

REPLAYED = "heterocache_replayed_tokens_total"
_slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("model", "rounds"),
    [
        ("gemma3", SHORT),
        pytest.param("deepseek_v4", 3 * SHORT, marks=_slow),
        pytest.param("gemma3", LONG, marks=_slow),
    ],
)
def test_every_answer_is_the_engines_own(model: str, rounds: int, tmp_path: Path) -> None:
    with engine(model, **arguments(model)) as llm:
        traffic = record(llm, seed=rounds, num_rounds=rounds)
    tolerance = BF16_TOLERANCE if model in BF16_MODELS else TOLERANCE
    few = {"num_gpu_blocks_override": BLOCKS[model], "max_num_batched_tokens": 200}
    extra = {"dram_gib": 0.05, "ssd_dir": str(tmp_path), "ssd_gib": 0.1, "checkpoints": "zero"}
    with engine(model, extra, **(arguments(model) | few)) as llm:
        side = scheduler_side(llm)
        side._restorer._planner.replay_when_missing = True
        reset = llm.llm_engine.engine_core.engine_core.scheduler.reset_connector_cache
        answers = play(llm, traffic, reset, lambda: forget_checkpoints(llm))
        assert_nothing_is_held(llm)
        assert side._replays._running == {}
    assert metric(REPLAYED) > 0
    assert metric(PREEMPTIONS) > 0, "blocks were never short"
    different = deviating(answers, traffic, tolerance)
    if different:
        with engine(model, **arguments(model)) as llm:
            for index in different:
                answer = answers[index]
                assert answer is not None
                assert recomputed(llm, traffic.asks[index], answer, tolerance), index
