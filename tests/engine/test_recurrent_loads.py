"""Recurrent state is loaded in the step that computes its request, if blocks are to spare.

Before its first layer vLLM copies the state of the last boundary to the block of the step, so the
state is loaded into both.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.engine.scheduler.restorer import Restorer
from tests.engine.harness import (
    Completion,
    _completion,
    delta,
    forget_local,
    generate,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.single_steps import add, step

pytestmark = pytest.mark.engine

PROMPT, CACHED = prompt_tokens(1400, seed=47), 1280


@pytest.fixture(scope="module", params=["qwen3_next"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def run(llm: Any) -> tuple[int, Completion]:
    """Return the steps to the first token of PROMPT, and its answer."""
    add(llm, PROMPT, max_tokens=8, logprobs=-1)
    first = 0
    for count in range(1, 100):
        for output in step(llm):
            first = first or count
            if output.finished:
                return first, _completion(output)
    raise AssertionError("no answer in a hundred steps")


@pytest.fixture
def hit(shared_llm: Any) -> tuple[int, Completion]:
    """Store PROMPT; return the engine's own hit on it, when its cache is empty again."""
    generate(shared_llm, PROMPT)
    settle(shared_llm)
    with no_restores(shared_llm):
        found = run(shared_llm)
    forget_local(shared_llm)
    return found


@contextmanager
def no_room(llm: Any) -> Iterator[None]:
    room = scheduler_side(llm)._restorer.step_room
    with patch.object(room, "suffices", lambda _: False):
        yield


def same(completion: Completion, reference: Completion) -> bool:
    assert completion.num_cached_tokens == CACHED
    return completion.tokens == reference.tokens and delta(completion, reference) <= 1e-4


def test_a_restore_takes_no_step_of_its_own(shared_llm: Any, hit: tuple[int, Completion]) -> None:
    steps, completion = run(shared_llm)
    assert same(completion, hit[1])
    assert steps == hit[0]


def test_with_few_blocks_it_takes_one(shared_llm: Any, hit: tuple[int, Completion]) -> None:
    with no_room(shared_llm):
        steps, completion = run(shared_llm)
    assert same(completion, hit[1])
    assert steps == hit[0] + 1


def test_the_next_turn_hits_what_was_restored(shared_llm: Any, hit: tuple[int, Completion]) -> None:
    run(shared_llm)
    with no_restores(shared_llm):
        assert same(run(shared_llm)[1], hit[1])


def test_without_the_second_copy_the_answer_is_another(
    shared_llm: Any, hit: tuple[int, Completion]
) -> None:
    """The comparison above can see what vLLM's copy of an empty block does."""
    with patch.object(Restorer, "build_running_load", lambda *_: None):
        assert not same(run(shared_llm)[1], hit[1])
    settle(shared_llm)
