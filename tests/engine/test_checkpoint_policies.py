"""On the real engine: where requests resume under each checkpoint policy, and how exactly."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_connector.spec import StateType
from tests.engine.harness import (
    BF16_MODELS,
    Completion,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)

pytestmark = pytest.mark.engine

CHUNK = 256
PROMPT = prompt_tokens(1400, seed=81)
CASES = [
    pytest.param((model, policy), marks=[] if policy == "zero" else [pytest.mark.slow])
    for model in ("gemma3", "deepseek_v4")
    for policy in ("zero", "periodic:2", "adaptive")
]


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def llm(case: tuple[str, str]) -> Iterator[Any]:
    model, policy = case
    with engine(model, {"dram_gib": 0.25, "checkpoints": policy}, max_num_batched_tokens=512) as x:
        yield x


@pytest.fixture(autouse=True)
def _nothing_left_behind(llm: Any) -> Iterator[None]:
    forget(llm)
    yield
    settle(llm)
    side = scheduler_side(llm)
    assert side._store._tiers.in_use() == []
    assert side._saver._reserved == {}
    side._store.check_integrity()


def own_hit(llm: Any, prompt: list[int]) -> Completion:
    """The engine's own hit on what it computed, and emptied after it."""
    settle(llm)
    with no_restores(llm):
        hit = generate(llm, prompt, max_tokens=8)
    forget_local(llm)
    return hit


def same(model: str, completion: Completion, reference: Completion) -> None:
    assert completion.tokens == reference.tokens
    if model not in BF16_MODELS:
        assert delta(completion, reference) <= 1e-4
    elif completion.num_cached_tokens == reference.num_cached_tokens:
        assert delta(completion, reference) == 0.0


def boundary(llm: Any, num_tokens: int) -> int:
    alignment = scheduler_side(llm)._layout.model.alignment
    return (num_tokens - 1) // alignment * alignment


def checkpoints(llm: Any) -> set[int]:
    """Boundaries, in tokens, at which a window is stored."""
    return {a.node.chunk.end for a in sealed(llm) if a.state_type is StateType.WINDOW_SWA}


def test_the_same_prompt_and_the_next_turn_resume_as_deep_as_ever(
    llm: Any, case: tuple[str, str]
) -> None:
    reply = generate(llm, PROMPT, max_tokens=300).tokens
    turn = PROMPT + reply + prompt_tokens(60, seed=82)
    settle(llm)
    if case[1] == "zero":
        assert checkpoints(llm) == {1280, boundary(llm, 1700)}
    reference = own_hit(llm, turn)
    restored = generate(llm, turn, max_tokens=8)
    assert restored.num_cached_tokens == boundary(llm, len(PROMPT) + len(reply))
    same(case[0], restored, reference)
    forget_local(llm)
    assert generate(llm, PROMPT).num_cached_tokens == 1400 // CHUNK * CHUNK


def test_a_branch_resumes_at_the_last_checkpoint_before_it(llm: Any, case: tuple[str, str]) -> None:
    model, policy = case
    generate(llm, PROMPT)
    branch = PROMPT[:1100] + prompt_tokens(150, seed=83)
    reference = own_hit(llm, branch)
    restored = generate(llm, branch, max_tokens=8)
    if policy == "zero":
        assert restored.num_cached_tokens == 0
    else:  # chunks this cheap to write: adaptive has a short period
        assert restored.num_cached_tokens == 4 * CHUNK
        same(model, restored, reference)
    if policy == "adaptive":
        assert scheduler_side(llm)._saver._policy.period in (1, 2, 4)  # type: ignore[attr-defined]
