"""A prompt that one engine computes and another decodes is resumed at its last token, exactly.

vLLM's own prefix cache resumes on its grid only. So the reference off the grid is an engine without
restores whose steps end there: with `STEP` tokens a step, the last token of a prompt of k STEP + 1
tokens is computed alone, as after a handoff.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from hetero_connector.spec import StateType
from tests.engine.harness import (
    Completion,
    assert_no_leaks,
    delta,
    flipped,
    forget,
    forget_local,
    generate,
    make_llm,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    shutdown,
)

pytestmark = pytest.mark.engine

STEP = 437
CLEAR = 0.02
"""A logprob difference that rounding cannot cause."""
HANDOFF = {"extra_args": {"kv_transfer_params": {"do_remote_decode": True}}}
ANSWER = 120
"""Tokens: enough to fold every row of a block of 128 that was open at the handoff."""


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    extra = {"dram_gib": 0.25, "exact_handoffs": True}
    llm = make_llm("deepseek_v4", extra, max_num_batched_tokens=STEP)
    yield llm
    shutdown(llm)


def cold(llm: Any, prompt: Sequence[int]) -> Completion:
    forget(llm)
    with no_restores(llm):
        return generate(llm, prompt, ANSWER)


def hand_off(llm: Any, prompt: Sequence[int]) -> None:
    """Compute the prompt as a prefiller does, and empty the engine's cache."""
    forget(llm)
    generate(llm, prompt, 1, **HANDOFF)
    forget_local(llm)


@contextmanager
def without_rows(llm: Any, boundary: int, window: int) -> Iterator[None]:
    """Set the compressors' rows of one window to zero in the stored boundary state."""
    side = scheduler_side(llm)
    (stored,) = (
        a
        for a in sealed(llm)
        if a.state_type is StateType.TAIL_STATE and a.node.chunk.end == boundary
    )
    artifact = side.store.arena.view[stored.dram_offset :][: stored.size_bytes]
    kept = artifact.copy()
    for segment in side.layout.segments(StateType.TAIL_STATE, stored.node.chunk.start, boundary):
        if segment.layer.window == window:
            assert artifact[segment.offset :][: segment.size_bytes].any()
            artifact[segment.offset :][: segment.size_bytes] = 0
    yield
    artifact[:] = kept


@pytest.mark.parametrize("steps", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_off_the_grid_it_resumes_at_the_last_token_and_exactly(llm: Any, steps: int) -> None:
    prompt = prompt_tokens(steps * STEP + 1, seed=steps)
    reference = cold(llm, prompt)
    hand_off(llm, prompt)
    restored = generate(llm, prompt, ANSWER)
    assert restored.num_cached_tokens == steps * STEP
    assert restored.tokens == reference.tokens
    assert delta(restored, reference) == 0.0
    assert_no_leaks(llm)


@pytest.mark.parametrize("window", [8, 128])
def test_power_both_compressors_rows_are_needed_there(llm: Any, window: int) -> None:
    prompt = prompt_tokens(STEP + 1, seed=1)
    reference = cold(llm, prompt)
    assert delta(reference, cold(llm, flipped(prompt, 3))) > CLEAR
    hand_off(llm, prompt)
    with without_rows(llm, STEP, window):
        broken = generate(llm, prompt, ANSWER)
    assert broken.num_cached_tokens == STEP
    assert delta(broken, reference) > CLEAR


def test_a_prompt_resumed_off_the_grid_stores_the_same_state(llm: Any) -> None:
    turn = prompt_tokens(3 * STEP, seed=9)
    forget(llm)
    with no_restores(llm):
        generate(llm, turn[:513])
        reference = generate(llm, turn, 8)  # the engine's own hit
    hand_off(llm, turn[: STEP + 1])
    assert generate(llm, turn[:600]).num_cached_tokens == STEP
    forget_local(llm)
    restored = generate(llm, turn, 8)
    assert restored.num_cached_tokens == reference.num_cached_tokens == 512
    assert restored.tokens == reference.tokens
    assert delta(restored, reference) == 0.0
