"""Aborts, resets, salts and samples leave right answers and nothing behind.

Preemption, prefix caching off and tiny tiers, which need engines of their own, are in
test_pressure.py.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.restore import Restore
from tests.engine.harness import (
    BF16_MODELS,
    Completion,
    delta,
    forget,
    forget_local,
    generate,
    leave_on_ssd_only,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
    shared_arguments,
    wide,
)
from tests.engine.single_steps import add, hooks_of_next_step, step, worker_connector

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1400, seed=41)


MODELS = ("gemma3", "deepseek_v4", "qwen3_next")
_each_model = pytest.mark.parametrize("model", MODELS, indirect=True)
"""For what happens while state of a kind is loaded, saved or computed."""


@pytest.fixture(scope="module", params=wide(MODELS, "gemma3"))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(shared_llm: Any) -> Any:
    return shared_llm


@pytest.fixture
def reference(llm: Any) -> Completion:
    """Store PROMPT and return the engine's own hit on it; its own cache is empty again."""
    generate(llm, PROMPT)
    settle(llm)
    with no_restores(llm):
        hit = generate(llm, PROMPT, max_tokens=8)
    forget_local(llm)
    return hit


def same(model: str, completion: Completion, reference: Completion) -> None:
    if model in BF16_MODELS:
        assert completion.num_cached_tokens == reference.num_cached_tokens
    assert completion.tokens == reference.tokens
    assert delta(completion, reference) <= (0.0 if model in BF16_MODELS else 1e-4)


def boundary(llm: Any, num_tokens: int) -> int:
    alignment = scheduler_side(llm).layout.model.alignment
    return (num_tokens - 1) // alignment * alignment


class Staging:
    """While entered, no restore gets further than being read from SSD."""

    def __enter__(self) -> None:
        self._patch = patch.object(Restore, "poll", return_value=False)
        self._patch.start()

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def test_abort_while_the_restore_is_read_from_ssd(
    llm: Any, model: str, reference: Completion
) -> None:
    leave_on_ssd_only(llm)
    with Staging():
        request_id = add(llm, PROMPT)
        step(llm, 2)
        assert scheduler_side(llm)._trackers
        llm.llm_engine.abort_request([request_id])
        step(llm)
    same(model, generate(llm, PROMPT, max_tokens=8), reference)


@_each_model
def test_abort_while_the_load_is_under_way(llm: Any, model: str, reference: Completion) -> None:
    kept_back: set[str] = set()
    worker = worker_connector()._worker
    assert worker is not None
    outcome = worker.outcome
    take = outcome.take_transfers

    def keep_back() -> tuple[set[str], set[str]]:
        finished, failed = take()
        assert not failed
        kept_back.update(finished)
        return set(), set()

    with patch.object(outcome, "take_transfers", keep_back):
        request_id = add(llm, PROMPT)
        step(llm)
        llm.llm_engine.abort_request([request_id])
        step(llm)
    if kept_back:  # a parked load: vLLM waits for its end before it frees the pages
        outcome._finished_recving |= kept_back
        other = generate(llm, prompt_tokens(50, seed=42))
        assert other.num_cached_tokens == 0
    forget_local(llm)
    same(model, generate(llm, PROMPT, max_tokens=8), reference)


@_each_model
def test_abort_between_the_steps_of_a_prefill(llm: Any, model: str) -> None:
    step_tokens = shared_arguments(model)["max_num_batched_tokens"]

    def prefill_a_part() -> None:
        request_id = add(llm, PROMPT)
        step(llm)
        assert scheduler_side(llm)._trackers
        llm.llm_engine.abort_request([request_id])
        settle(llm)

    prefill_a_part()
    with no_restores(llm):
        reference = generate(llm, PROMPT, max_tokens=8)
    assert reference.num_cached_tokens == boundary(llm, step_tokens + 1) > 0
    forget(llm)
    prefill_a_part()
    forget_local(llm)
    restored = generate(llm, PROMPT, max_tokens=8)
    assert restored.num_cached_tokens == reference.num_cached_tokens
    same(model, restored, reference)


def test_abort_while_decoding(llm: Any, model: str, reference: Completion) -> None:
    request_id = add(llm, PROMPT, max_tokens=100)
    step(llm, 5)
    llm.llm_engine.abort_request([request_id])
    forget_local(llm)
    same(model, generate(llm, PROMPT, max_tokens=8), reference)


def test_the_last_pages_are_saved_without_holding_the_cache(llm: Any, model: str) -> None:
    generate(llm, PROMPT)
    # Only Gemma's alignment is finer than a chunk: it has a tail to save.
    assert bool(scheduler_side(llm)._early) == (model == "gemma3")
    assert llm.reset_prefix_cache(), "the request still has pages"
    settle(llm)
    assert generate(llm, PROMPT).num_cached_tokens == boundary(llm, len(PROMPT))


def test_a_restore_on_an_idle_engine_teaches_what_loads_take(
    llm: Any, reference: Completion
) -> None:
    """The reset is in the step of the first tokens, or in a step before."""
    load = scheduler_side(llm).costs.load
    learned = load.errors(Tier.DRAM).count
    generate(llm, PROMPT)
    assert load.errors(Tier.DRAM).count == learned + 1


def test_a_reset_forgets_everything(llm: Any, reference: Completion) -> None:
    leave_on_ssd_only(llm)
    generate(llm, PROMPT)  # and something in DRAM
    settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    assert sealed(llm) == []
    assert generate(llm, PROMPT).num_cached_tokens == 0


def test_a_reset_forgets_what_a_waiting_request_has_staged(llm: Any, reference: Completion) -> None:
    with Staging():
        add(llm, PROMPT, max_tokens=1)
        step(llm)
        assert llm.reset_prefix_cache(reset_connector=True)
    outputs = step(llm, 6)
    assert [o.num_cached_tokens for o in outputs if o.finished] == [0]


@_each_model
def test_a_reset_while_requests_run(llm: Any, model: str, reference: Completion) -> None:
    add(llm, PROMPT, max_tokens=20)
    step(llm, 5)
    # The engine's own cache cannot be emptied under a running request; the store can.
    assert not llm.reset_prefix_cache(reset_connector=True)
    assert sealed(llm) == []
    finished = [o for o in step(llm, 25) if o.finished]
    assert finished[0].outputs[0].token_ids[:8] == reference.tokens
    settle(llm)
    # Its pages are older than the reset: whatever the reset was for holds for them too.
    assert sealed(llm) == []
    forget_local(llm)
    assert generate(llm, PROMPT).num_cached_tokens == 0


@_each_model
def test_a_reset_that_preempts_running_requests(
    llm: Any, model: str, reference: Completion
) -> None:
    add(llm, PROMPT, max_tokens=8)
    step(llm, 5)
    assert llm.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    assert sealed(llm) == []
    finished = [o for o in step(llm, 20) if o.finished]
    if model not in BF16_MODELS:  # computed anew, in other shapes
        assert list(finished[0].outputs[0].token_ids) == reference.tokens
    # It was computed from its start, after the reset, and is stored again.
    forget_local(llm)
    same(model, generate(llm, PROMPT, max_tokens=8), reference)


def test_salts_never_share(llm: Any) -> None:
    def cached(salt: str | None) -> int:
        forget_local(llm)
        prompt: dict[str, Any] = {"prompt_token_ids": PROMPT}
        if salt is not None:
            prompt["cache_salt"] = salt
        from vllm import SamplingParams

        output = llm.generate(
            [prompt], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False
        )[0]
        return int(output.num_cached_tokens)

    last = boundary(llm, len(PROMPT))
    assert [cached(s) for s in ("one", "two", None)] == [0, 0, 0]
    assert [cached(s) for s in ("one", "two", None, "three")] == [last, last, last, 0]


def controlled(llm: Any, prompt: list[int], **params: Any) -> Completion:
    """Complete the prompt with these parameters, in an engine whose own cache is empty."""
    forget_local(llm)
    completion = generate(llm, prompt, max_tokens=8, extra_args={"kv_transfer_params": params})
    settle(llm)
    return completion


def test_parameters_of_a_request_act_and_its_answer_is_exact(
    llm: Any, model: str, reference: Completion
) -> None:
    side = scheduler_side(llm)
    end, size = boundary(llm, len(PROMPT)), side.layout.chunk_tokens

    def tokens(**params: Any) -> int:
        completion = controlled(llm, PROMPT, **params)
        assert completion.tokens == reference.tokens, params
        return completion.num_cached_tokens

    whole = tokens()
    assert 0 < whole <= end
    assert tokens(max_load_tokens=0) == 0
    limit = min(2 * size, whole - size)
    limited = tokens(max_load_tokens=limit)
    assert limited <= limit
    # Recurrent state is there at a prompt's end alone: nothing before it can be resumed from.
    assert limited > 0 or StateType.RECURRENT in side.layout.model.state_types
    assert tokens(heterocache={"no_store": True, "nonsense": [1]}, max_load_tokens="all") == whole
    leave_on_ssd_only(llm)
    assert tokens(kv_load_tiers=[], heterocache={"no_store": True}) == 0
    assert tokens(kv_load_tiers=[{"medium": "STORAGE"}]) == whole

    other = prompt_tokens(1400, seed=43)
    controlled(llm, other, heterocache={"no_store": True})
    assert controlled(llm, other, max_offload_tokens=size).num_cached_tokens == 0
    assert controlled(llm, other).num_cached_tokens <= size
    assert controlled(llm, other).num_cached_tokens > 0

    pins = side.store.catalog.tiers.timed_pins
    controlled(llm, PROMPT, session_id="s", heterocache={"pin_s": 60})
    assert len(pins) == 1
    controlled(llm, PROMPT, session_id="s", heterocache={"end_session": True})
    assert len(pins) == 0


def test_a_request_that_skips_the_cache_restores_nothing(llm: Any, reference: Completion) -> None:
    unread = generate(llm, PROMPT, skip_reading_prefix_cache=True)
    assert unread.num_cached_tokens == 0
    forget_local(llm)
    # Logprobs of the prompt need every position's hidden state.
    assert generate(llm, PROMPT, prompt_logprobs=1).num_cached_tokens == 0
    forget_local(llm)
    assert generate(llm, PROMPT).num_cached_tokens == boundary(llm, len(PROMPT))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 20, "top_p": 0.9},
        {"min_p": 0.1},
        {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    ],
    ids="-".join,
)
def test_several_samples_of_one_prompt(
    llm: Any, reference: Completion, options: dict[str, Any]
) -> None:
    from vllm import SamplingParams

    parameters = SamplingParams(
        n=3, temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, detokenize=False, **options
    )

    def samples() -> list[list[int]]:
        output = llm.generate([{"prompt_token_ids": PROMPT}], parameters, use_tqdm=False)[0]
        assert output.num_cached_tokens == boundary(llm, len(PROMPT))
        return [list(sample.token_ids) for sample in output.outputs]

    restored = samples()
    with no_restores(llm):
        assert samples() == restored
    assert len({tuple(sample) for sample in restored}) == 3


def test_the_order_of_the_workers_hooks(llm: Any, model: str, reference: Completion) -> None:
    """The hooks come in the order of `docs/internals/hooks.md`, whether or not the step loads."""
    ends = ["start_load_kv", "wait_for_save", "get_transfer_results"]
    ends += ["get_block_ids_with_load_errors", "build_connector_worker_meta"]
    add(llm, prompt_tokens(100, seed=8), max_tokens=4)
    without = [x for x in hooks_of_next_step(llm) if "layer" not in x]
    assert without == ["handle_preemptions", *ends]
    add(llm, PROMPT, max_tokens=2)
    loading = hooks_of_next_step(llm)
    assert loading[:2] == ["handle_preemptions", "start_load_kv"]
    assert loading[-4:] == ends[1:]
    while llm.llm_engine.has_unfinished_requests():
        step(llm)
