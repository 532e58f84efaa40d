"""A Llama-4-type model resumes where a chunk of local attention begins without any of its state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hetero_connector.spec import StateType
from tests.engine.harness import (
    assert_no_leaks,
    delta,
    flipped,
    forget_local,
    generate,
    make_llm,
    no_restores,
    prompt_tokens,
    sealed,
    settle,
    shutdown,
    wiped,
)

pytestmark = pytest.mark.engine

LOCAL_CHUNK = 512
TOLERANCE, CLEAR = 1e-4, 0.02
PROMPT = prompt_tokens(1400, seed=440)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    llm = make_llm("llama4", {"dram_gib": 0.1}, max_num_batched_tokens=512)
    yield llm
    shutdown(llm)


def test_power_a_flipped_early_token_and_the_state_of_a_local_chunk_show(llm: Any) -> None:
    base = generate(llm, PROMPT, 8)
    assert delta(base, generate(llm, flipped(PROMPT, 3), 8)) > CLEAR
    forget_local(llm)
    right = generate(llm, PROMPT, 8)
    assert right.num_cached_tokens > 2 * LOCAL_CHUNK
    forget_local(llm)
    with wiped(llm, StateType.CHUNKED_LOCAL):
        wrong = generate(llm, PROMPT, 8)
    assert wrong.num_cached_tokens == right.num_cached_tokens
    assert delta(right, wrong) > CLEAR


@pytest.mark.parametrize("shared", [256, 512, 768, 1024])
def test_restored_at_each_boundary_as_the_engines_own_hit(llm: Any, shared: int) -> None:
    other = PROMPT[:shared] + prompt_tokens(150, seed=shared)
    generate(llm, PROMPT)
    forget_local(llm)
    with no_restores(llm):
        generate(llm, PROMPT[: shared + 1])
        settle(llm)
        reference = generate(llm, other, 8)
    assert reference.num_cached_tokens == shared
    forget_local(llm)
    restored = generate(llm, other, 8)
    assert restored.num_cached_tokens == shared
    assert restored.tokens == reference.tokens
    assert delta(restored, reference) <= TOLERANCE
    local = {a.node.chunk.end for a in sealed(llm) if a.state_type is StateType.CHUNKED_LOCAL}
    assert (shared in local) == (shared % LOCAL_CHUNK != 0)
    assert_no_leaks(llm)
