"""A restore gives the logprobs of the engine's own prefix hit, whatever the request looks like.

The reference of every case is the engine's own hit on state that it computed, at the same number of
cached tokens. The power tests show that wrong state would change the logprobs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hetero_connector.spec import StateType
from tests.engine.harness import (
    BF16_MODELS,
    HYBRID_MODELS,
    Completion,
    delta,
    flipped,
    forget,
    forget_local,
    generate,
    generate_batch,
    leave_on_ssd_only,
    metric,
    no_restores,
    prompt_tokens,
    restart_shared_engine,
    scheduler_side,
    settle,
    wiped,
)

pytestmark = pytest.mark.engine

CLEAR = 0.02
"""A logprob difference that rounding cannot cause."""
PROMPT = prompt_tokens(1400, seed=21)


@dataclass
class Engine:
    """One model's engine."""

    model: str
    llm: Any

    @property
    def tolerance(self) -> float:
        return 0.0 if self.model in BF16_MODELS else 1e-4

    @property
    def state_types(self) -> tuple[StateType, ...]:
        return scheduler_side(self.llm).layout.model.state_types

    def boundary(self, num_tokens: int) -> int:
        """Return the last token at which a prompt of `num_tokens` can resume."""
        alignment = scheduler_side(self.llm).layout.model.alignment
        return (num_tokens - 1) // alignment * alignment

    def own_hit(self, prompts: Sequence[Sequence[int]], max_tokens: int = 1) -> list[Completion]:
        """Return the reference: the engine's own hit, without the store."""
        with no_restores(self.llm):
            return generate_batch(self.llm, prompts, max_tokens)

    def compare(self, restored: Completion, reference: Completion) -> None:
        if self.model in BF16_MODELS:
            # Another number of cached tokens is another shape, which rounds differently.
            assert restored.num_cached_tokens == reference.num_cached_tokens
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) <= self.tolerance


def models(**marks: pytest.MarkDecorator) -> list[Any]:
    """Return the models as pytest's parameters; the two of `make check` are marked."""
    marks |= {"dense": pytest.mark.smoke, "gemma3": pytest.mark.smoke}
    return [pytest.param(x, marks=marks.get(x, ())) for x in ("dense", *HYBRID_MODELS)]


_each_model = pytest.mark.parametrize("model", models(), indirect=True)


# The windows of gpt-oss are those of Gemma: few tests of `make test` try both.
@pytest.fixture(scope="module", params=models(gptoss=pytest.mark.wide))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(model: str, shared_llm: Any) -> Engine:
    return Engine(model, shared_llm)


def test_power_a_flipped_early_token_shows(engine: Engine) -> None:
    base = generate(engine.llm, PROMPT)
    assert delta(base, generate(engine.llm, flipped(PROMPT, 3))) > CLEAR


@_each_model
def test_power_every_state_type_shows(engine: Engine) -> None:
    # With fewer tokens the index selects every compressed entry, whatever it holds.
    prompt = prompt_tokens(3000, seed=22) if engine.model == "deepseek_v4" else PROMPT
    generate(engine.llm, prompt)
    forget_local(engine.llm)
    right = generate(engine.llm, prompt, max_tokens=8)
    assert right.num_cached_tokens == engine.boundary(len(prompt))
    moved = {}
    for state_type in engine.state_types:
        forget_local(engine.llm)
        with wiped(engine.llm, state_type):
            wrong = generate(engine.llm, prompt, max_tokens=8)
        assert wrong.num_cached_tokens == right.num_cached_tokens
        moved[state_type] = delta(right, wrong)
    assert min(moved.values()) > CLEAR, moved


@_each_model
def test_restored_from_dram(engine: Engine) -> None:
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    reference = engine.own_hit([PROMPT], max_tokens=64)[0]
    forget_local(engine.llm)
    before = metric("heterocache_hit_tokens_total", tier="dram")
    restored = generate(engine.llm, PROMPT, max_tokens=64)
    assert restored.num_cached_tokens == engine.boundary(len(PROMPT))
    assert metric("heterocache_hit_tokens_total", tier="dram") - before == (
        restored.num_cached_tokens
    )
    engine.compare(restored, reference)


@_each_model
def test_restored_from_ssd(engine: Engine) -> None:
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    reference = engine.own_hit([PROMPT], max_tokens=64)[0]
    leave_on_ssd_only(engine.llm)
    forget_local(engine.llm)
    before = metric("heterocache_hit_tokens_total", tier="ssd")
    restored = generate(engine.llm, PROMPT, max_tokens=64)
    assert restored.num_cached_tokens == engine.boundary(len(PROMPT))
    assert metric("heterocache_hit_tokens_total", tier="ssd") - before == (
        restored.num_cached_tokens
    )
    engine.compare(restored, reference)


@pytest.mark.parametrize("model", ["dense", "gemma3"])
@pytest.mark.parametrize(("num_tokens", "tier"), [(1280, "dram"), (1344, "ssd")])
def test_a_prompt_whose_last_chunk_ends_with_it(engine: Engine, num_tokens: int, tier: str) -> None:
    """The full or short chunk is cut; with windows, the request resumes at the chunk before."""
    prompt, layout = PROMPT[:num_tokens], scheduler_side(engine.llm).layout
    generate(engine.llm, prompt)
    settle(engine.llm)
    reference = engine.own_hit([prompt], max_tokens=64)[0]
    if tier == "ssd":
        leave_on_ssd_only(engine.llm)
    forget_local(engine.llm)
    before = metric("heterocache_hit_tokens_total", tier=tier)
    restored = generate(engine.llm, prompt, max_tokens=64)
    step = layout.chunk_tokens if layout.model.boundary_types else layout.model.alignment
    assert restored.num_cached_tokens == (num_tokens - 1) // step * step
    assert metric("heterocache_hit_tokens_total", tier=tier) - before == (
        restored.num_cached_tokens
    )
    engine.compare(restored, reference)


@pytest.mark.parametrize("model", ["dense"])
@pytest.mark.parametrize(("num_tokens", "answer"), [(1376, 96), (1376, 300)])
def test_the_same_prompt_after_an_answer_that_goes_on_in_its_last_chunk(
    engine: Engine, num_tokens: int, answer: int
) -> None:
    """The chunk, short or full, has tokens of the answer: it is cut where they begin."""
    prompt, other = PROMPT[:num_tokens], flipped(PROMPT[:num_tokens], num_tokens - 40)
    generate(engine.llm, prompt, max_tokens=answer)
    settle(engine.llm)
    reference, unlike = engine.own_hit([prompt, other], max_tokens=8)
    forget_local(engine.llm)
    restored = generate(engine.llm, prompt, max_tokens=8)
    assert restored.num_cached_tokens == engine.boundary(num_tokens)
    engine.compare(restored, reference)
    forget_local(engine.llm)
    computed = generate(engine.llm, other, max_tokens=8)
    assert computed.num_cached_tokens == num_tokens // 256 * 256
    engine.compare(computed, unlike)


@pytest.mark.parametrize("shared", [300, 700, 1100])
def test_restored_at_an_earlier_boundary_with_another_suffix(engine: Engine, shared: int) -> None:
    other = PROMPT[:shared] + prompt_tokens(150, seed=shared)
    chunk = scheduler_side(engine.llm).layout.chunk_tokens
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    reference = engine.own_hit([other], max_tokens=4)[0]
    forget_local(engine.llm)
    restored = generate(engine.llm, other, max_tokens=4)
    assert restored.num_cached_tokens == shared // chunk * chunk
    engine.compare(restored, reference)


def test_sessions_share_a_restored_prefix(engine: Engine) -> None:
    sessions, other = _sessions(2), PROMPT + prompt_tokens(300, seed=29)
    for session in sessions:
        generate(engine.llm, session)
    own = engine.own_hit(sessions)
    forget_local(engine.llm)
    with no_restores(engine.llm):
        generate(engine.llm, sessions[0])
        reference = generate(engine.llm, other, max_tokens=8)
    shared = reference.num_cached_tokens
    assert 1200 < shared < len(PROMPT)
    forget_local(engine.llm)
    before = metric("heterocache_hit_tokens_total", tier="dram")
    restored = generate_batch(engine.llm, sessions)  # the second waits for what they share
    end = engine.boundary(len(sessions[0]))
    loaded = metric("heterocache_hit_tokens_total", tier="dram") - before
    assert loaded == 2 * end - shared
    for ours, theirs in zip(restored, own, strict=True):
        engine.compare(ours, theirs)
    with no_restores(engine.llm):
        hit = generate(engine.llm, other, max_tokens=8)
    assert hit.num_cached_tokens == shared
    engine.compare(hit, reference)


def test_power_wrong_shared_state_shows(engine: Engine) -> None:
    first, second = _sessions(2)
    other = PROMPT + prompt_tokens(300, seed=29)
    generate(engine.llm, first)
    generate(engine.llm, second)
    forget_local(engine.llm)
    generate(engine.llm, first)
    with no_restores(engine.llm):
        right = generate(engine.llm, other, max_tokens=8)
    model = scheduler_side(engine.llm).layout.model
    moved = {}
    for state_type in model.boundary_types_at(right.num_cached_tokens) or model.prefix_types:
        forget_local(engine.llm)
        with wiped(engine.llm, state_type):
            generate(engine.llm, first)
        with no_restores(engine.llm):
            wrong = generate(engine.llm, other, max_tokens=8)
        assert wrong.num_cached_tokens == right.num_cached_tokens
        moved[state_type] = delta(right, wrong)
    assert min(moved.values()) > CLEAR, moved


def _sessions(count: int) -> list[list[int]]:
    """Return prompts that leave each other after `PROMPT`, and have a chunk each of their own."""
    return [PROMPT + prompt_tokens(700, seed=280 + i) for i in range(count)]


def test_a_second_turn_resumes_after_decoded_tokens(engine: Engine) -> None:
    first = prompt_tokens(680, seed=23)
    reply = generate(engine.llm, first, max_tokens=100).tokens
    settle(engine.llm)
    second = first + reply + prompt_tokens(60, seed=24)
    reference = engine.own_hit([second], max_tokens=8)[0]
    forget_local(engine.llm)
    restored = generate(engine.llm, second, max_tokens=8)
    # The last decoded token was never an input, so its state does not exist.
    assert restored.num_cached_tokens == engine.boundary(len(first) + len(reply))
    engine.compare(restored, reference)


def test_restored_cold_and_local_requests_in_one_batch(engine: Engine) -> None:
    stored, local, cold = PROMPT[:1000], prompt_tokens(900, seed=25), prompt_tokens(350, seed=26)
    batch = [stored, cold, local]
    generate_batch(engine.llm, [stored, local])
    settle(engine.llm)
    reference = engine.own_hit(batch, max_tokens=8)
    forget(engine.llm)
    generate(engine.llm, stored)
    forget_local(engine.llm)
    generate(engine.llm, local)
    settle(engine.llm)
    restored = generate_batch(engine.llm, batch, max_tokens=8)
    expected = [engine.boundary(1000), 0, engine.boundary(900)]
    assert [c.num_cached_tokens for c in restored] == expected
    for ours, theirs in zip(restored, reference, strict=True):
        engine.compare(ours, theirs)


def test_a_restored_prefix_then_a_prefill_in_several_chunks(engine: Engine) -> None:
    prompt = PROMPT[:660] + prompt_tokens(1300, seed=27)
    generate(engine.llm, PROMPT[:660])
    settle(engine.llm)
    reference = engine.own_hit([prompt], max_tokens=4)[0]
    forget(engine.llm)
    generate(engine.llm, PROMPT[:660])
    forget_local(engine.llm)
    restored = generate(engine.llm, prompt, max_tokens=4)
    assert restored.num_cached_tokens == engine.boundary(661)
    engine.compare(restored, reference)
    # What was saved during those chunks restores as well.
    reference = engine.own_hit([prompt], max_tokens=4)[0]
    forget_local(engine.llm)
    again = generate(engine.llm, prompt, max_tokens=4)
    assert again.num_cached_tokens == engine.boundary(len(prompt))
    engine.compare(again, reference)


def test_the_engine_holds_a_part_and_the_store_the_rest(engine: Engine) -> None:
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    reference = engine.own_hit([PROMPT], max_tokens=8)[0]
    forget_local(engine.llm)
    generate(engine.llm, PROMPT[:700])
    local = engine.own_hit([PROMPT[:701]])[0].num_cached_tokens
    assert 0 < local <= 700
    before = metric("heterocache_hit_tokens_total")
    restored = generate(engine.llm, PROMPT, max_tokens=8)
    assert restored.num_cached_tokens == engine.boundary(len(PROMPT))
    external = metric("heterocache_hit_tokens_total") - before
    assert external == restored.num_cached_tokens - local
    engine.compare(restored, reference)


def test_restored_from_ssd_after_a_restart(engine: Engine) -> None:
    generate(engine.llm, PROMPT)
    settle(engine.llm)
    reference = engine.own_hit([PROMPT], max_tokens=8)[0]
    engine.llm = restart_shared_engine()
    before = metric("heterocache_hit_tokens_total", tier="ssd")
    restored = generate(engine.llm, PROMPT, max_tokens=8)
    assert restored.num_cached_tokens == engine.boundary(len(PROMPT))
    assert metric("heterocache_hit_tokens_total", tier="ssd") - before == (
        restored.num_cached_tokens
    )
    engine.compare(restored, reference)
