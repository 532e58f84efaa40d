"""The test models are suitable: distant context changes answers, and repeated answers are equal."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.harness import (
    BF16_MODELS,
    MODELS,
    delta,
    flipped,
    generate,
    prompt_tokens,
    wide,
)

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1500, seed=11)
EARLY = (3, 29, 60)
CLEAR = 0.05
"""A logprob difference that rounding cannot cause: the exactness tests tolerate 1e-4."""


@pytest.fixture(scope="module", params=wide(MODELS, "gemma3", "deepseek_v4", "qwen3_next"))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(stock_llm: Any) -> Any:
    return stock_llm


def test_a_flipped_early_token_moves_the_last_logprobs(llm: Any) -> None:
    base = generate(llm, PROMPT)
    moved = {at: delta(base, generate(llm, flipped(PROMPT, at))) for at in EARLY}
    assert min(moved.values()) > CLEAR, moved


def test_computing_a_prompt_again_does_not_move_its_logprobs(llm: Any) -> None:
    cold = generate(llm, PROMPT, max_tokens=8)
    llm.reset_prefix_cache()
    again = generate(llm, PROMPT, max_tokens=8)
    assert (cold.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert again.tokens == cold.tokens
    assert delta(cold, again) <= 1e-6


def test_the_engine_hits_its_own_prefix(llm: Any, model: str) -> None:
    cold = generate(llm, PROMPT, max_tokens=8)
    hit = generate(llm, PROMPT, max_tokens=8)
    if model == "mla":  # vLLM switches prefix caching off with this backend
        assert hit.num_cached_tokens == 0
    else:
        assert hit.num_cached_tokens >= 1024
    assert hit.tokens[0] == cold.tokens[0]
    # bf16 rounds differently for other chunk shapes; fp32 must not.
    assert delta(cold, hit) <= (0.1 if model in BF16_MODELS else 1e-4)
