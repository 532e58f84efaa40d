"""Windows rebuilt by a replay give the logprobs of the engine's own prefix hit.

Every checkpoint is dropped first, so that restores are replays. The power tests remove one part of
the mechanism at a time and check that the answer changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest

from hetero_connector.engine.scheduler import replays
from hetero_connector.engine.worker import slot_masks
from hetero_connector.engine.worker.host_device import HostDevice
from hetero_connector.engine.worker.pages import HostPages
from hetero_connector.planner.plan import WindowReplay
from hetero_connector.spec import StateType
from hetero_connector.tools import explanation
from hetero_connector.tools.inspection import find_models
from tests.engine.harness import (
    Completion,
    _completion,
    delta,
    forget,
    forget_checkpoints,
    forget_local,
    generate,
    generate_batch,
    leave_on_ssd_only,
    metric,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)
from tests.engine.replays import (
    CASES,
    CLEAR,
    PROMPT,
    Case,
    cut,
    error,
    own_hits,
    params,
    scheduler_of,
    steps_of,
)
from tests.engine.single_steps import add, step, worker_connector

pytestmark = pytest.mark.engine


_uncompressed = pytest.mark.parametrize("case", params(*CASES[:2]), indirect=True)
_compressing = pytest.mark.parametrize("case", params(*CASES[2:]), indirect=True)


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


own_hits_on_prompt: dict[str, Completion] = {}
"""The engine's own hit on PROMPT, by model."""


@pytest.fixture
def own_hit(llm: Any, case: Case) -> Completion:
    if case.name not in own_hits_on_prompt:
        own_hits_on_prompt[case.name] = own_hits(llm, [PROMPT], max_tokens=64)[0]
        forget(llm)
    return own_hits_on_prompt[case.name]


@pytest.fixture
def reference(llm: Any, own_hit: Completion) -> Completion:
    """Store PROMPT without checkpoints and return the answer that a replay must give."""
    generate(llm, PROMPT)
    forget_local(llm)
    forget_checkpoints(llm)
    return own_hit


@contextmanager
def replay_rule(llm: Any, rule: WindowReplay) -> Iterator[None]:
    side = scheduler_side(llm)
    with (
        patch.object(side._replays, "_rule", rule),
        patch.object(side.planner, "_replay_tokens", rule.tokens),
    ):
        yield


def rule_of(llm: Any) -> WindowReplay:
    rule = scheduler_side(llm)._replays._rule
    assert rule is not None
    return rule


def poison(pages: HostPages, block_ids: Any) -> None:
    """Fill every element with NaN, which an earlier request may have left there."""
    pages._pages[block_ids] = np.iinfo(pages._dtype).max


def test_power_without_a_mask(llm: Any, reference: Completion, case: Case) -> None:
    with patch.object(slot_masks, "protect", lambda *_: None):
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, reference) > CLEAR


def test_power_with_too_short_a_replay(llm: Any, case: Case, reference: Completion) -> None:
    rule = rule_of(llm)
    with replay_rule(llm, replace(rule, reach_tokens=rule.narrowest_tokens)):
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens > case.resume
    assert error(wrong, reference) > CLEAR


@_compressing
def test_power_with_a_replay_one_step_of_the_grid_too_short(llm: Any, case: Case) -> None:
    """The length is the least that the grid has: 635 tokens are needed, 512 are not enough.

    The compared token is right after the boundary, because a prompt computes the windows of later
    tokens itself; but more than four tokens are computed, because AMX kernels round fewer
    differently.
    """
    prompt = PROMPT[: case.boundary() + 8]
    (right,) = own_hits(llm, [prompt])
    forget(llm)
    generate(llm, prompt)
    forget_local(llm)
    forget_checkpoints(llm)
    exact = generate(llm, prompt, max_tokens=8)
    assert exact.num_cached_tokens == case.resume
    case.same(exact, right)
    forget_local(llm)
    forget_checkpoints(llm)
    with replay_rule(llm, replace(rule_of(llm), reach_tokens=case.replayed - case.grid)):
        wrong = generate(llm, prompt, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume + case.grid
    assert error(wrong, right) > CLEAR


@_compressing
def test_power_without_a_mask_of_what_is_compressed(
    llm: Any, reference: Completion, case: Case
) -> None:
    """Layers that compress have a second slot mapping, in states instead of tokens."""
    protect = slot_masks.protect

    def in_tokens_only(layers: Any, blocks: Any, raw: Any, attention: Any) -> None:
        protect(layers, blocks, raw, {n: x for n, x in (attention or {}).items() if n not in raw})

    with patch.object(slot_masks, "protect", in_tokens_only):
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, reference) > CLEAR


def test_power_a_mask_after_the_forward_is_seen(
    llm: Any, reference: Completion, case: Case
) -> None:
    """Only the step that admits a request runs its load hook before the forward by itself."""
    side, scheduler = scheduler_side(llm), scheduler_of(llm)
    order = side._admissions.order_loads

    def late(output: Any, trackers: Any, meta: Any) -> None:
        before = output.has_sync_kv_loads
        order(output, trackers, meta)
        if meta.protected:
            output.has_sync_kv_loads = before
            scheduler.max_num_scheduled_tokens = 512

    with steps_of(llm, 32), patch.object(side._admissions, "order_loads", late):
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, reference) > CLEAR


def test_power_of_the_pool_guard(llm: Any, reference: Completion, case: Case) -> None:
    """Without the guard a later request would use windows that are not exact."""
    retained = -(-case.resume // 256) * 256  # only if the engine keeps windows
    other = PROMPT[:retained] + prompt_tokens(30, seed=28)
    with no_restores(llm):
        right = generate(llm, other, max_tokens=8)
    forget_local(llm)
    forget_checkpoints(llm)
    with patch.object(replays, "hide_inexact_windows", lambda *_: None):
        generate(llm, PROMPT)
    with no_restores(llm):
        wrong = generate(llm, other, max_tokens=8)
    assert wrong.num_cached_tokens == retained
    assert error(wrong, right) > CLEAR


def test_replayed_from_dram(llm: Any, reference: Completion, case: Case) -> None:
    before = metric("heterocache_replayed_tokens_total")
    hits = metric("heterocache_hit_tokens_total", tier="dram")
    replayed = generate(llm, PROMPT, max_tokens=64)
    assert replayed.num_cached_tokens == case.resume
    assert metric("heterocache_replayed_tokens_total") - before == case.replayed
    assert metric("heterocache_hit_tokens_total", tier="dram") - hits == case.resume
    case.same(replayed, reference)


def test_replayed_from_ssd(llm: Any, reference: Completion, case: Case) -> None:
    leave_on_ssd_only(llm)
    hits = metric("heterocache_hit_tokens_total", tier="ssd")
    replayed = generate(llm, PROMPT, max_tokens=8)
    assert replayed.num_cached_tokens == case.resume
    assert metric("heterocache_hit_tokens_total", tier="ssd") - hits == case.resume
    case.same(replayed, reference)


@_compressing
def test_replayed_where_the_index_selects(llm: Any, case: Case) -> None:
    """With fewer tokens it takes every compressed entry, whatever it holds."""
    prompt = prompt_tokens(3000, seed=22)
    right = own_hits(llm, [prompt], max_tokens=40)[0]
    forget_local(llm)
    generate(llm, prompt)
    forget_local(llm)
    forget_checkpoints(llm)
    replayed = generate(llm, prompt, max_tokens=40)
    assert replayed.num_cached_tokens == case.boundary(len(prompt)) - case.replayed
    case.same(replayed, right)


def test_the_planner_chooses_a_replay_if_it_is_cheapest(llm: Any, case: Case) -> None:
    prompt = prompt_tokens(3000, seed=30)
    generate(llm, prompt)  # from which it learns what computing takes
    forget_local(llm)
    forget_checkpoints(llm)
    planner = scheduler_side(llm).planner
    with patch.object(planner, "mode", "cost"):
        assert generate(llm, prompt).num_cached_tokens == (
            case.boundary(len(prompt)) - case.replayed
        )
        forget_local(llm)  # but not the checkpoint at its end, which is cheaper
        assert generate(llm, prompt).num_cached_tokens == case.boundary(len(prompt))


def test_explain_offers_what_this_engine_would_replay(
    llm: Any, reference: Completion, case: Case
) -> None:
    leave_on_ssd_only(llm)
    config = llm.llm_engine.vllm_config.kv_transfer_config.kv_connector_extra_config
    (directory,) = find_models(Path(config["ssd_dir"]))
    explained = explanation.decide(directory, PROMPT, None, in_dram=False)
    offered = explained.decision.candidates()
    assert (case.boundary(), case.resume) in [(c.boundary, c.resume_tokens) for c in offered]


@pytest.mark.parametrize("step_tokens", [32, 100, 250])
def test_replayed_in_several_steps(
    llm: Any, reference: Completion, case: Case, step_tokens: int
) -> None:
    with steps_of(llm, step_tokens):
        replayed = generate(llm, PROMPT, max_tokens=8)
    assert replayed.num_cached_tokens == case.resume
    case.same(replayed, reference)


def test_recycled_pages_are_cleared(llm: Any, case: Case, reference: Completion) -> None:
    clear = HostPages.clear

    def recycled(pages: HostPages, block_ids: Any) -> None:
        poison(pages, block_ids)
        clear(pages, block_ids)

    with patch.object(HostPages, "clear", recycled):
        case.same(generate(llm, PROMPT, max_tokens=64), reference)


@_uncompressed
def test_power_of_clearing(llm: Any, case: Case, reference: Completion) -> None:
    with patch.object(HostPages, "clear", poison):
        wrong = generate(llm, PROMPT, max_tokens=64)
    assert not error(wrong, reference) <= CLEAR  # it is NaN
    forget(llm)
    worker = worker_connector()._worker
    assert worker is not None
    for _, pages_of_runs in cast(HostDevice, worker._device)._layers.values():
        for pages, _ in pages_of_runs:
            pages._pages[:] = 0  # the engine itself clears no window pages


def test_the_engine_holds_a_part(llm: Any, reference: Completion, case: Case) -> None:
    with no_restores(llm):
        generate(llm, PROMPT[: case.resume - 100])
        local = generate(llm, PROMPT[: case.resume - 99]).num_cached_tokens
    assert 0 < local < case.resume
    forget_checkpoints(llm)
    hits = metric("heterocache_hit_tokens_total")
    replayed = generate(llm, PROMPT, max_tokens=8)
    assert replayed.num_cached_tokens == case.resume
    assert metric("heterocache_hit_tokens_total") - hits == case.resume - local
    case.same(replayed, reference)


@_uncompressed
def test_the_engine_holds_a_part_of_the_first_window(
    llm: Any, reference: Completion, case: Case
) -> None:
    """The local hit's pages are shared: they are neither cleared nor loaded over."""
    with no_restores(llm):
        generate(llm, PROMPT[: case.resume - 31])
        hit = generate(llm, [*PROMPT[: case.resume - 31], 1], max_tokens=8)
    assert hit.num_cached_tokens == case.resume - 32
    forget_checkpoints(llm)
    assert generate(llm, PROMPT, max_tokens=8).num_cached_tokens == case.resume
    with no_restores(llm):
        unharmed = generate(llm, [*PROMPT[: case.resume - 31], 1], max_tokens=8)
    assert unharmed.num_cached_tokens == case.resume - 32
    case.same(unharmed, hit)


def test_a_replay_that_would_begin_in_the_local_hit_is_not_planned(
    llm: Any, reference: Completion, case: Case
) -> None:
    with no_restores(llm):
        generate(llm, PROMPT[: case.resume + 2 * case.grid + 1])
    forget_checkpoints(llm)
    before = metric("heterocache_replayed_tokens_total")
    computed = generate(llm, PROMPT, max_tokens=8)
    assert metric("heterocache_replayed_tokens_total") == before
    assert computed.num_cached_tokens == case.resume + 2 * case.grid
    case.same(computed, reference)


def test_a_later_local_hit_is_right(llm: Any, case: Case, reference: Completion) -> None:
    with steps_of(llm, 100):
        generate(llm, PROMPT)
    with no_restores(llm):
        local = generate(llm, PROMPT, max_tokens=64)
    assert local.num_cached_tokens == case.boundary()
    case.same(local, reference)
    for shared in (1030, 1290, 1330):
        other = PROMPT[:shared] + prompt_tokens(20, seed=shared)
        forget_local(llm)
        forget_checkpoints(llm)
        generate(llm, PROMPT)
        with no_restores(llm):
            served = generate(llm, other, max_tokens=4)
            forget_local(llm)
            case.same(served, generate(llm, other, max_tokens=4))


def test_a_replay_saves_exact_state(llm: Any, reference: Completion, case: Case) -> None:
    generate(llm, PROMPT)  # at more tokens the windows of the boundary are gone
    settle(llm)
    checkpoints = {a.node.chunk.end for a in sealed(llm) if a.state_type is StateType.WINDOW_SWA}
    assert checkpoints
    assert min(checkpoints) >= case.resume + rule_of(llm).reach_tokens
    forget_local(llm)
    loaded = generate(llm, PROMPT, max_tokens=64)
    assert loaded.num_cached_tokens == case.boundary()
    case.same(loaded, reference)


def test_a_replay_for_another_suffix(llm: Any, case: Case, reference: Completion) -> None:
    other = PROMPT[:1100] + prompt_tokens(200, seed=29)
    with no_restores(llm):
        right = generate(llm, other, max_tokens=8)
    forget_local(llm)
    replayed = generate(llm, other, max_tokens=8)
    assert replayed.num_cached_tokens == 1024 - case.replayed
    case.same(replayed, right)


def test_replays_cold_and_local_requests_in_one_batch(llm: Any, case: Case) -> None:
    second, local, cold = (prompt_tokens(n, seed=n) for n in (1200, 900, 350))
    batch = [PROMPT, cold, second, local]
    references = own_hits(llm, batch)
    forget(llm)
    generate_batch(llm, [PROMPT, second])
    forget_local(llm)
    forget_checkpoints(llm)
    with no_restores(llm):
        generate(llm, local)
    with steps_of(llm, 170):
        answers = generate_batch(llm, batch, max_tokens=8)
    expected = [case.resume, 0, case.boundary(1200) - case.replayed, case.boundary(900)]
    assert [c.num_cached_tokens for c in answers] == expected
    for answer, right in zip(answers, references, strict=True):
        case.same_in_batch(answer, right)


def test_the_same_prompt_twice_at_once(llm: Any, case: Case, reference: Completion) -> None:
    with steps_of(llm, 300):
        for answer in generate_batch(llm, [PROMPT, PROMPT], max_tokens=8):
            case.same_in_batch(answer, reference)


def preempted(
    llm: Any, after_tokens: int = 0, resumed_under: AbstractContextManager[Any] | None = None
) -> Completion:
    """Return PROMPT's answer, preempted after two steps or after the given number of decoded
    tokens. vLLM preempts as it does without free blocks. Its prefix cache and the stored
    checkpoints are dropped, so the request can resume only from other stored state.
    """
    add(llm, PROMPT, max_tokens=8, logprobs=-1)
    outputs = step(llm, 2)
    while after_tokens and not (outputs and len(outputs[0].outputs[0].token_ids) == after_tokens):
        outputs = step(llm)
    replaying = bool(scheduler_side(llm)._replays._running)
    assert llm.reset_prefix_cache(reset_running_requests=True)
    forget_checkpoints(llm)
    with resumed_under or nullcontext():
        (output,) = [o for o in step(llm, 40) if o.finished]
    assert replaying == (output.num_cached_tokens > 0 and not after_tokens)
    return _completion(output)


def test_control_preempted_by_itself_the_engine_answers_the_same(llm: Any) -> None:
    """The answer is equal to the last digit, also in bfloat16, if nothing was decoded before."""
    with no_restores(llm), steps_of(llm, 100):
        undisturbed = generate(llm, PROMPT, max_tokens=8)
        forget_local(llm)
        again = preempted(llm)
    assert (undisturbed.num_cached_tokens, again.num_cached_tokens) == (0, 0)
    assert again.tokens == undisturbed.tokens
    assert delta(again, undisturbed) == 0.0


def test_power_preempted_in_the_middle(llm: Any, reference: Completion, case: Case) -> None:
    """The answer comes from the second replay, so only its windows count."""
    unmasked = patch.object(slot_masks, "protect", lambda *_: None)
    with steps_of(llm, 100):
        wrong = preempted(llm, resumed_under=unmasked)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, reference) > CLEAR


def test_preempted_in_the_middle(llm: Any, reference: Completion, case: Case) -> None:
    """Logprobs of the prompt cannot be compared: a request for them reads no cache in vLLM."""
    replayed = metric("heterocache_replayed_tokens_total")
    with steps_of(llm, 100):
        again = preempted(llm)
    assert again.num_cached_tokens == case.resume
    assert metric("heterocache_replayed_tokens_total") - replayed == 2 * case.replayed
    case.same(again, reference)
    with no_restores(llm):  # what it left in the engine's own cache
        case.same(generate(llm, PROMPT, max_tokens=8), reference)


def test_preempted_while_decoding_and_replayed_again(
    llm: Any, reference: Completion, case: Case
) -> None:
    """Decoded tokens are then prefilled, which moves bfloat16 logprobs in any engine.

    So the tokens after it are compared with the engine's own hit on all those before.
    """
    replayed = metric("heterocache_replayed_tokens_total")
    again = preempted(llm, after_tokens=5)
    assert metric("heterocache_replayed_tokens_total") - replayed == 2 * case.replayed
    case.same(cut(again, 5), reference)
    settle(llm)
    with no_restores(llm):
        rest = generate(llm, PROMPT + again.tokens[:5], max_tokens=3)
    assert rest.num_cached_tokens == case.boundary()
    case.same(replace(again, tokens=again.tokens[5:], logprobs=again.logprobs[5:]), rest)


def test_aborted_in_the_middle(llm: Any, case: Case, reference: Completion) -> None:
    with steps_of(llm, 100):
        request_id = add(llm, PROMPT)
        step(llm, 2)
        assert scheduler_side(llm)._replays._running
        llm.llm_engine.abort_request([request_id])
        settle(llm)
    assert scheduler_side(llm)._replays._running == {}
    assert not [a for a in sealed(llm) if a.state_type is StateType.WINDOW_SWA]
    case.same(generate(llm, PROMPT, max_tokens=8), reference)


def test_the_store_is_reset_in_the_middle(llm: Any, case: Case, reference: Completion) -> None:
    with steps_of(llm, 100):
        add(llm, PROMPT, max_tokens=8)
        step(llm, 2)
        llm.reset_prefix_cache(reset_connector=True)
        assert sealed(llm) == []
        outputs = [o for _ in range(40) for o in step(llm) if o.finished]
    assert list(outputs[0].outputs[0].token_ids) == reference.tokens[:8]
    assert sealed(llm) == []
