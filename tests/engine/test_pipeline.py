"""Pipeline stages: each worker has some layers of every artifact, and two steps are under way."""

from __future__ import annotations

import pytest

from tests.engine.harness import (
    assert_no_leaks,
    delta,
    engine,
    forget_checkpoints,
    forget_local,
    generate,
    generate_batch,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.stages import TWO_STAGES

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1400, seed=91)


@pytest.mark.parametrize(
    "model",
    [
        "gemma3",
        pytest.param("dense", marks=pytest.mark.slow),
        pytest.param("qwen3_next-stages", marks=pytest.mark.slow),
    ],
)
def test_stages_restore_their_own_layers(model: str) -> None:
    with engine(model, {"dram_gib": 0.1}, **TWO_STAGES) as llm:
        generate(llm, PROMPT)
        settle(llm)
        layers = scheduler_side(llm).layout.model.layers
        assert len({x.layer for x in layers}) == len(layers) > 1
        with no_restores(llm):
            reference = generate(llm, PROMPT, max_tokens=8)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == reference.num_cached_tokens >= 1280
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) == 0.0
        assert_no_leaks(llm)


@pytest.mark.slow
def test_ranks_of_stages_restore_their_part_of_their_layers() -> None:
    with engine("dense", {"dram_gib": 0.1}, **TWO_STAGES, tensor_parallel_size=2) as llm:
        generate(llm, PROMPT)
        settle(llm)
        with no_restores(llm):
            reference = generate(llm, PROMPT, max_tokens=8)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == 1376
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) <= 1e-4
        assert_no_leaks(llm)


@pytest.mark.slow
def test_windows_are_replayed_through_the_stages() -> None:
    with engine("gemma3", {"dram_gib": 0.1}, **TWO_STAGES, max_num_batched_tokens=512) as llm:
        generate(llm, PROMPT)
        settle(llm)
        with no_restores(llm):
            reference = generate(llm, PROMPT, max_tokens=8)
        side = scheduler_side(llm)
        forget_checkpoints(llm)
        forget_local(llm)
        side.planner.replay_when_missing = True
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens > 0
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "gptoss"])
def test_batches_in_flight_restore_and_save(model: str) -> None:
    """Each stage computes another step; prompts take several, and slots are few."""
    prompts = [prompt_tokens(900 + 200 * i, seed=100 + i) for i in range(6)]
    with engine(model, {"dram_gib": 0.05}, **TWO_STAGES, max_num_batched_tokens=768) as llm:
        answers = []
        for prompt in prompts:
            with no_restores(llm):
                generate(llm, prompt)
                answers.append(generate(llm, prompt, max_tokens=8))
        for _ in range(3):
            forget_local(llm)
            for answer, again in zip(answers, generate_batch(llm, prompts, 8), strict=True):
                assert again.tokens == answer.tokens
                assert delta(again, answer) <= 1e-4
        assert_no_leaks(llm)
