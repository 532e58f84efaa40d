"""Helpers of the soaks: engines with too little memory, and the check of every answer.

The reference of an answer is the same prompt computed cold and alone by an engine without the
connector. After a preemption the engine prefills tokens it had decoded, which in bfloat16 moves
the logprobs by up to 0.2 without any connector. An answer that deviates is therefore computed
again from the token where it does, cold and without the connector: that must agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from tests.engine.harness import BF16_MODELS, Completion, delta, engine, generate
from tests.engine.traffic import Ask, Traffic, record

TIERS = {
    "gemma3": {"dram_gib": 0.006, "ssd_gib": 0.016},
    "deepseek_v4": {"dram_gib": 0.006, "ssd_gib": 0.016},
    "qwen3_next": {"dram_gib": 0.008, "ssd_gib": 0.03},
}
BLOCKS = {"gemma3": 97, "deepseek_v4": 256, "qwen3_next": 12}
"""KV blocks: a little more than the longest request needs."""
SHORT, LONG = 8, 60
"""Rounds of a soak."""
LIVES = 3
"""Number of engines of a long soak; each has its own seeds."""
# An engine registers its counters anew, from 0.
PREEMPTIONS = "vllm:num_preemptions_total"
HITS = "heterocache_hit_tokens_total"
EVICTIONS = "heterocache_evictions_total"


def arguments(model: str) -> dict[str, Any]:
    """Return arguments with which requests take several steps and do not all fit."""
    return {
        "max_num_batched_tokens": 768 if model == "qwen3_next" else 512,
        "max_model_len": 1792,
        # Requests are admitted before they are known to fit, and preempted when they do not.
        "scheduler_reserve_full_isl": False,
        "disable_log_stats": False,
    }


@cache
def recorded(model: str, seed: int, num_rounds: int) -> Traffic:
    """Return random traffic with the answers of an engine without the connector."""
    with engine(model, **arguments(model)) as llm:
        return record(llm, seed=seed, num_rounds=num_rounds)


def tolerance(model: str) -> float:
    """Largest difference between the engine's own prefix hits and cold runs, in bfloat16."""
    return 0.06 if model in BF16_MODELS else 1e-4


def deviating(answers: Sequence[Completion | None], traffic: Traffic, most: float) -> list[int]:
    """Return the indices of the answers that differ from the reference by more."""
    pairs = enumerate(zip(answers, traffic.answers, strict=True))
    return [i for i, (a, r) in pairs if a is not None and r is not None and delta(a, r) > most]


def assert_answers(model: str, answers: Sequence[Completion | None], traffic: Traffic) -> None:
    """Check that every answer is the reference's, or that of prefilling its own decoded tokens."""
    most = tolerance(model)
    different = deviating(answers, traffic, most)
    print(f"{model}: {len(different)} of {len(answers)} answers deviate: {different}")
    if not different:
        return
    with engine(model, **arguments(model)) as llm:
        for index in different:
            answer = answers[index]
            assert answer is not None
            assert _recomputed(llm, traffic.asks[index], answer, most), index


def _recomputed(llm: Any, ask: Ask, answer: Completion, most: float) -> bool:
    start = 0
    while start < len(answer.tokens):
        known = [*ask.prompt, *answer.tokens[:start]]
        llm.reset_prefix_cache()
        cold = generate(llm, known, max_tokens=len(answer.tokens) - start)
        agreeing = _agreeing(cold, answer, start, most)
        if not agreeing:
            return False
        start += agreeing
    return True


def _agreeing(cold: Completion, answer: Completion, start: int, most: float) -> int:
    """Return the number of leading steps of `cold` that agree with the answer from `start`."""
    for step, token in enumerate(cold.tokens):
        difference = np.abs(cold.logprobs[step] - answer.logprobs[start + step]).max()
        if difference > most:
            return step
        if token != answer.tokens[start + step]:
            return step + 1
    return len(cold.tokens)
