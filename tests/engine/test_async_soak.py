"""Async scheduling with workers in their own processes, and with too few blocks.

These tests are apart from `test_async_scheduling`, whose engine lives as long as its module: a
process can have one engine at a time.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.async_engine import async_engine, drain
from tests.engine.harness import (
    assert_no_leaks,
    engine,
    forget_checkpoints,
    forget_local,
    generate,
    metric,
    scheduler_side,
)
from tests.engine.overlapping import REPLAYED, watched
from tests.engine.replays import CASES, PROMPT, own_hits, scheduler_of, steps_of
from tests.engine.soaking import BLOCKS, HITS, PREEMPTIONS, SHORT, TIERS, arguments, assert_answers
from tests.engine.traffic import play, record

pytestmark = pytest.mark.engine


def test_with_workers_in_processes_of_their_own() -> None:
    """With such workers two steps run at once, and each rank reports for itself."""
    gemma3 = CASES[0]
    workers = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with async_engine("gemma3", {"dram_gib": 0.1}, **workers) as llm:
        generate(llm, PROMPT)
        (reference,) = own_hits(llm, [PROMPT])
        drain(llm)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == gemma3.boundary()
        gemma3.same(restored, reference)
        drain(llm)
        scheduler_side(llm).planner.replay_when_missing = True
        forget_local(llm)
        forget_checkpoints(llm)
        with steps_of(llm, 100), watched(llm) as events:
            replayed = generate(llm, PROMPT, max_tokens=8)
        assert events[:2] == ["replaying"] * 2, "the next step waited for the report"
        assert replayed.num_cached_tokens == gemma3.resume
        gemma3.same(replayed, reference)
        drain(llm)
        assert_no_leaks(llm)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ("gemma3", "replays"),
        ("gemma3", "by cost"),
    ],
)
def test_a_soak(model: str, kind: str, tmp_path: Path) -> None:
    """Repeat `test_soak` and `test_replay_pressure`, with an ordinary engine as the reference."""
    with engine(model, **arguments(model)) as llm:
        traffic = record(llm, seed=31, num_rounds=SHORT)
    # Two steps are in flight, for which vLLM counts blocks: they are as large as one elsewhere.
    few_blocks = {"num_gpu_blocks_override": BLOCKS[model], "max_num_batched_tokens": 256}
    extra = {**TIERS[model], "ssd_dir": str(tmp_path)}
    extra |= {"planner": "cost", "checkpoints": "adaptive"} if kind == "by cost" else {}
    with async_engine(model, extra, **(arguments(model) | few_blocks)) as llm:
        scheduler_side(llm).planner.replay_when_missing = kind == "replays"

        def after_round() -> None:
            drain(llm)
            scheduler_side(llm).store.check_integrity()
            if kind == "replays":
                forget_checkpoints(llm)

        reset = scheduler_of(llm).reset_connector_cache
        answers = play(llm, traffic.rounds, reset, after_round)
        drain(llm)
        assert_no_leaks(llm)
    assert metric(HITS) > 0
    if kind == "replays":
        assert metric(REPLAYED) > 0
    assert metric(PREEMPTIONS) > 0, "blocks were never short"
    assert_answers(model, answers, traffic)
