"""Steps that run as FULL CUDA graphs restore and replay exactly (second model runner only)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.engine.worker import slot_masks
from tests.engine.full_steps import full_steps
from tests.engine.harness import (
    forget,
    forget_checkpoints,
    forget_local,
    generate,
    scheduler_side,
    settle,
)
from tests.engine.replays import CASES, CLEAR, PROMPT, Case, error, own_hits, params, steps_of

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
