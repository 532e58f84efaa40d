"""Under async scheduling restores and replays give what the engine's own prefix hit gives.

The real engine schedules every step before the last one was reported (`async_engine`). So the end
of a chunk, a load or a replay is learned a step late, and tokens are scheduled that are not known
yet. `test_overlapping_steps` has single orders of calls, `test_async_soak` engines with few blocks
and workers in their own processes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.engine.worker import slot_masks
from tests.engine.async_engine import async_engine, drain
from tests.engine.harness import (
    BF16_MODELS,
    Completion,
    _completion,
    assert_no_leaks,
    flipped,
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
    settle,
    shared_arguments,
    wiped,
)
from tests.engine.overlapping import REPLAYED, watched
from tests.engine.replays import CASES, CLEAR, PROMPT, Case, error, own_hits, params, steps_of
from tests.engine.single_steps import add, step
from tests.engine.soaking import HITS

pytestmark = pytest.mark.engine

RECURRENT = Case("qwen3_next", grid=640, replayed=0)
"""The model's state is loaded between two steps, and never rebuilt by a replay."""
_replaying = pytest.mark.parametrize("case", params(*CASES), indirect=True)


@pytest.fixture(scope="module", params=params(*CASES, RECURRENT))
def case(request: pytest.FixtureRequest) -> Case:
    assert isinstance(request.param, Case)
    return request.param


@pytest.fixture(scope="module")
def llm(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    extra = {"dram_gib": 0.25, "ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_gib": 0.5}
    arguments = {"disable_log_stats": False, **shared_arguments(case.name)}
    with async_engine(case.name, extra, **arguments) as llm:
        scheduler_side(llm).planner.replay_when_missing = True
        yield llm


@pytest.fixture(autouse=True)
def _nothing_left_behind(llm: Any) -> Iterator[None]:
    drain(llm)
    forget(llm)
    yield
    drain(llm)
    assert_no_leaks(llm)


@pytest.fixture(scope="module")
def own_hit(llm: Any) -> Completion:
    """The engine's own hit on PROMPT."""
    return own_hits(llm, [PROMPT], max_tokens=64)[0]


@pytest.fixture
def reference(llm: Any, own_hit: Completion) -> Completion:
    """Store PROMPT and return the answer that its restore must give."""
    generate(llm, PROMPT)
    drain(llm)
    forget_local(llm)
    return own_hit


def test_power(llm: Any, reference: Completion, case: Case) -> None:
    with no_restores(llm):
        assert error(generate(llm, flipped(PROMPT, 3)), reference) > CLEAR
    moved = {}
    for state_type in scheduler_side(llm).layout.model.state_types:
        if case.name == "deepseek_v4" and "INDEX" in state_type.name:
            continue  # which selects every entry of a prompt this short, whatever it holds
        forget_local(llm)
        with wiped(llm, state_type):
            wrong = generate(llm, PROMPT, max_tokens=8)
        assert wrong.num_cached_tokens == case.boundary()
        moved[state_type] = error(wrong, reference)
    assert min(moved.values()) > CLEAR, moved


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_restored(llm: Any, reference: Completion, case: Case, tier: str) -> None:
    if tier == "ssd":
        leave_on_ssd_only(llm)
    before = metric(HITS, tier=tier)
    with watched(llm) as events:
        restored = generate(llm, PROMPT, max_tokens=64)
    assert events[:2] == ["scheduled"] * 2, "the next step waited for the report"
    assert restored.num_cached_tokens == case.boundary()
    assert metric(HITS, tier=tier) - before == case.boundary()
    case.same(restored, reference)


def test_a_second_turn_resumes_after_decoded_tokens(llm: Any, case: Case) -> None:
    """The chunk of decoded tokens is saved in a step that was scheduled before they were known."""
    first = prompt_tokens(1300 if case is RECURRENT else 1240, seed=23)
    reply = generate(llm, first, max_tokens=80).tokens
    turn = first + reply + prompt_tokens(60, seed=24)
    settle(llm)
    with no_restores(llm):
        reference = generate(llm, turn, max_tokens=8)
    forget_local(llm)
    restored = generate(llm, turn, max_tokens=8)
    # Recurrent state is stored at boundaries of prompts only.
    stored = len(first) if case is RECURRENT else len(first) + len(reply)
    assert restored.num_cached_tokens == case.boundary(stored)
    if case.name in BF16_MODELS:  # another shape rounds differently
        assert restored.num_cached_tokens == reference.num_cached_tokens
    case.same(restored, reference)


def test_restored_cold_and_local_requests_in_one_batch(llm: Any, case: Case) -> None:
    local, cold = prompt_tokens(900, seed=25), prompt_tokens(350, seed=26)
    batch = [PROMPT, cold, local]
    references = own_hits(llm, batch)
    forget(llm)
    generate(llm, PROMPT)
    forget_local(llm)
    generate(llm, local)
    answers = generate_batch(llm, batch, max_tokens=8)
    assert [c.num_cached_tokens for c in answers] == [case.boundary(), 0, case.boundary(900)]
    for answer, right in zip(answers, references, strict=True):
        case.same_in_batch(answer, right)


@_replaying
@pytest.mark.parametrize("step_tokens", [512, 100])
def test_replayed(llm: Any, reference: Completion, case: Case, step_tokens: int) -> None:
    forget_checkpoints(llm)
    before = metric(REPLAYED)
    with steps_of(llm, step_tokens), watched(llm) as events:
        replayed = generate(llm, PROMPT, max_tokens=64)
    if step_tokens == 100:
        assert events[:2] == ["replaying"] * 2, "the next step waited for the report"
    assert replayed.num_cached_tokens == case.resume
    assert metric(REPLAYED) - before == case.replayed
    case.same(replayed, reference)
    with no_restores(llm):  # what it left in the engine's own cache
        case.same(generate(llm, PROMPT, max_tokens=8), reference)


@_replaying
def test_power_of_a_replay(llm: Any, reference: Completion, case: Case) -> None:
    forget_checkpoints(llm)
    with steps_of(llm, 100), patch.object(slot_masks, "protect", lambda *_: None):
        wrong = generate(llm, PROMPT, max_tokens=8)
    assert wrong.num_cached_tokens == case.resume
    assert error(wrong, reference) > CLEAR


@_replaying
def test_preempted_in_the_middle_of_a_replay(llm: Any, reference: Completion, case: Case) -> None:
    """The preemption is between steps: with a connector vLLM waits for a running step's report."""
    forget_checkpoints(llm)
    before = metric(REPLAYED)
    with steps_of(llm, 100):
        add(llm, PROMPT, max_tokens=8, logprobs=-1)
        with watched(llm) as events:
            step(llm, 2)
        assert events == ["replaying", "replaying", "reported"]
        with steps_of(llm, 0):
            step(llm)
        assert scheduler_side(llm)._replays._running
        assert llm.reset_prefix_cache(reset_running_requests=True)
        forget_checkpoints(llm)
        (output,) = [o for o in step(llm, 60) if o.finished]
    assert metric(REPLAYED) - before == 2 * case.replayed
    case.same(_completion(output), reference)


@_replaying
def test_aborted_in_the_middle_of_a_replay(llm: Any, reference: Completion, case: Case) -> None:
    forget_checkpoints(llm)
    with steps_of(llm, 100):
        request_id = add(llm, PROMPT)
        step(llm, 2)
        assert scheduler_side(llm)._replays._running
        llm.llm_engine.abort_request([request_id])
        drain(llm)
    assert scheduler_side(llm)._replays._running == {}
    case.same(generate(llm, PROMPT, max_tokens=8), reference)
