"""Steps that run as FULL CUDA graphs restore and replay exactly (second model runner only)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.engine.worker import slot_masks, worker_side
from tests.engine.full_steps import full_decodes, full_steps
from tests.engine.harness import (
    delta,
    forget,
    forget_checkpoints,
    forget_local,
    generate,
    generate_batch,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.replays import CASES, CLEAR, PROMPT, Case, error, own_hits, params, steps_of
from tests.engine.soaking import tolerance

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", params=params(*CASES))
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture
def model(case: Case) -> str:
    return case.name


@pytest.fixture
def llm(shared_llm: Any) -> Iterator[Any]:
    with patch.object(scheduler_side(shared_llm).planner, "replay_when_missing", True):
        yield shared_llm


def store_in_full_steps(llm: Any) -> None:
    """Store PROMPT by a request of which every step is a FULL graph, and nothing else."""
    forget(llm)
    with full_steps() as steps:
        generate(llm, PROMPT)
    assert sum(steps) >= len(PROMPT)
    settle(llm)
    forget_local(llm)


def test_what_full_steps_stored_is_restored_in_a_full_step(llm: Any, case: Case) -> None:
    (right,) = own_hits(llm, [PROMPT])
    store_in_full_steps(llm)
    with full_steps() as steps:
        restored = generate(llm, PROMPT, max_tokens=8)
    assert restored.num_cached_tokens == case.boundary()
    assert len(steps) == 8
    case.same(restored, right)


@pytest.mark.parametrize("step_tokens", [2048, 100])
def test_a_replay_in_full_steps_is_exact(llm: Any, case: Case, step_tokens: int) -> None:
    (right,) = own_hits(llm, [PROMPT])
    store_in_full_steps(llm)
    forget_checkpoints(llm)
    with steps_of(llm, step_tokens), full_steps() as steps:
        replayed = generate(llm, PROMPT, max_tokens=8)
    assert replayed.num_cached_tokens == case.resume
    assert sum(steps[:-7]) == len(PROMPT) - case.resume
    case.same(replayed, right)


def test_power_a_full_step_without_masks_is_seen(llm: Any, case: Case) -> None:
    (right,) = own_hits(llm, [PROMPT])
    store_in_full_steps(llm)
    forget_checkpoints(llm)
    with patch.object(slot_masks, "protect", lambda *_: None), full_steps():
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, right) > CLEAR


def dispatched(model: str) -> Any:
    """Run steps as vLLM's dispatcher chooses; DeepSeek-V4's CPU kernels take no padding."""
    return full_decodes(range(1, 513)) if model == "deepseek_v4" else full_decodes()


@pytest.mark.parametrize(
    "model", ["dense", "gemma3", "qwen3_next", pytest.param("deepseek_v4", marks=pytest.mark.slow)]
)
def test_a_session_is_exact_when_only_decodes_are_full_graphs(shared_llm: Any, model: str) -> None:
    """Full graphs fill the chunks, which hooks have saved in the steps before and load after."""
    llm = shared_llm
    case = Case(model, grid=scheduler_side(llm).layout.model.alignment, replayed=0)
    others = [prompt_tokens(600, seed=seed) for seed in (31, 32)]
    with dispatched(model) as steps, patch.object(worker_side, "OVERLAP_FROM_BYTES", 0):
        reply = generate(llm, PROMPT, max_tokens=300).tokens
        assert len(steps) == 299, "each token but the first is a full graph's"
        turn = [*PROMPT, *reply, *prompt_tokens(60, seed=33)]
        forget_local(llm)
        restored = generate(llm, turn, max_tokens=8)
        assert restored.num_cached_tokens == case.boundary(len(PROMPT) + len(reply))
        forget_local(llm)
        in_batch, *cold = generate_batch(llm, [turn, *others], max_tokens=8)
        # The turn has whole blocks, and is stored now: a dense model restores all but the last one.
        again = case.boundary(len(turn)) if model == "dense" else restored.num_cached_tokens
        assert in_batch.num_cached_tokens == again
        with no_restores(llm):
            forget_local(llm)
            assert generate(llm, PROMPT, max_tokens=300).tokens == reply
            own = generate(llm, turn, max_tokens=8)
            forget_local(llm)
            right = generate_batch(llm, others, max_tokens=8)
    case.same(restored, own)
    for answer, expected in zip([in_batch, *cold], [own, *right], strict=True):
        assert delta(answer, expected) <= tolerance(model)
