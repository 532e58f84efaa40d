"""Answers are right without a prefix cache, with too few KV blocks and a tiny DRAM tier."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.harness import (
    BF16_MODELS,
    Completion,
    assert_no_leaks,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    generate_batch,
    metric,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.replays import IN_BATCH

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("model", ["gemma3", pytest.param("deepseek_v4", marks=pytest.mark.slow)])
def test_without_the_engines_prefix_cache(model: str) -> None:
    prompt = prompt_tokens(1400, seed=51)
    with engine(model) as llm:
        generate(llm, prompt)
        reference = generate(llm, prompt, max_tokens=16)
    assert reference.num_cached_tokens >= 1280
    with engine(model, {"dram_gib": 0.1}, enable_prefix_caching=False) as llm:
        generate(llm, prompt)
        settle(llm)
        restored = generate(llm, prompt, max_tokens=16)
        layout = scheduler_side(llm).layout
        assert restored.num_cached_tokens == 1399 // layout.model.alignment * layout.model.alignment
        if model in BF16_MODELS:
            assert restored.num_cached_tokens == reference.num_cached_tokens
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) <= (0.0 if model in BF16_MODELS else 1e-4)
        # Another suffix on an earlier chunk, in the same engine.
        other = prompt[:600] + prompt_tokens(100, seed=52)
        assert generate(llm, other).num_cached_tokens == 512


def test_preempted_requests_resume_from_the_store() -> None:
    prompts = [prompt_tokens(100, seed=60 + i) for i in range(4)]
    few = {"num_gpu_blocks_override": 60, "max_model_len": 512, "max_num_seqs": 4}
    with engine("gemma3", {"dram_gib": 0.1}, disable_log_stats=False, **few) as llm:
        preemptions = metric("vllm:num_preemptions_total")
        hits = metric("heterocache_hits_total")
        together = generate_batch(llm, prompts, max_tokens=300)
        assert metric("vllm:num_preemptions_total") > preemptions
        assert metric("heterocache_hits_total") > hits, "no request resumed from the store"
        assert_no_leaks(llm)
        forget(llm)
        for prompt, completion in zip(prompts, together, strict=True):
            alone = generate(llm, prompt, max_tokens=300)
            assert completion.tokens == alone.tokens
            assert delta(completion, alone) <= IN_BATCH
        _freed_pages_are_saved_before_they_are_reused(llm)


def _freed_pages_are_saved_before_they_are_reused(llm: Any) -> None:
    """The next request takes the blocks whose last chunk is not saved yet."""
    one, two = prompt_tokens(450, seed=71), prompt_tokens(450, seed=72)
    right = generate(llm, one, max_tokens=4)
    forget(llm)
    for _ in range(4):
        generate(llm, one)
        generate(llm, two)  # the engine has made no step in between
        forget_local(llm)
        again = generate(llm, one, max_tokens=4)
        assert again.num_cached_tokens == 448
        assert again.tokens == right.tokens
        assert delta(again, right) <= 1e-4
        forget(llm)


def conversations(turns: int) -> list[list[int]]:
    """Return `turns` prompts: shuffled turns of ten conversations, some with a common beginning."""
    rng = np.random.default_rng(81)
    shared = prompt_tokens(260, seed=82)
    prompts_so_far = [
        [*shared[: 130 * (i % 3)], *prompt_tokens(150, seed=83 + i)] for i in range(10)
    ]
    prompts = []
    for turn in range(turns):
        i = int(rng.integers(len(prompts_so_far)))
        if turn % 25 == 24:
            prompts_so_far[i] = prompt_tokens(200, seed=1000 + turn)
        prompts_so_far[i] = (
            prompts_so_far[i][:900] + rng.integers(0, 256, int(rng.integers(20, 120))).tolist()
        )
        prompts.append(list(prompts_so_far[i]))
    return prompts


@pytest.mark.slow
def test_a_soak_in_which_everything_is_evicted_again(tmp_path: Path) -> None:
    prompts = conversations(100)
    batches = [prompts[i : i + 4] for i in range(0, len(prompts), 4)]
    with engine("gemma3", enable_prefix_caching=False) as llm:
        expected = [generate_batch(llm, batch, max_tokens=4) for batch in batches]
    # A chunk and its checkpoint take 576 KiB: 14 of them in DRAM, 28 on the SSD.
    extra = {"dram_gib": 0.008, "ssd_dir": str(tmp_path), "ssd_gib": 0.016}
    names = ("heterocache_hits_total", "heterocache_evictions_total")
    with engine("gemma3", extra, disable_log_stats=False) as llm:
        before = {name: metric(name) for name in names}
        for number, (batch, right) in enumerate(zip(batches, expected, strict=True)):
            _compare(generate_batch(llm, batch, max_tokens=4), right)
            if number % 2:
                forget_local(llm)
            scheduler_side(llm).store.check_integrity()
        assert_no_leaks(llm)
        after = {name: metric(name) - before[name] for name in names}
    assert after["heterocache_hits_total"] > 10, after
    assert after["heterocache_evictions_total"] > 50, after


def _compare(completions: list[Completion], expected: list[Completion]) -> None:
    for ours, right in zip(completions, expected, strict=True):
        assert ours.tokens == right.tokens
        assert delta(ours, right) <= IN_BATCH
