"""Requests of attention models that are parked while they are loaded, as on CUDA.

A CPU copies on the thread that computes, so nothing is parked there; here everything is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.engine.worker.copy_plan import Copies
from hetero_connector.engine.worker.devices import StartTimer, Wait
from hetero_connector.errors import StoreError
from tests.engine.harness import (
    Completion,
    _completion,
    assert_no_leaks,
    delta,
    forget_local,
    generate,
    leave_on_ssd_only,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
    wide,
)
from tests.engine.single_steps import add, step, worker_connector
from tests.waiting import until

pytestmark = pytest.mark.engine

PROMPT, OTHER = prompt_tokens(1400, seed=43), prompt_tokens(100, seed=44)
CACHED = 1376


@pytest.fixture(scope="module", params=wide(("dense", "gemma3"), "gemma3"))
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def llm(shared_llm: Any) -> Iterator[Any]:
    with patch.object(scheduler_side(shared_llm), "_parking", "always"):
        yield shared_llm


@pytest.fixture
def reference(llm: Any) -> Completion:
    """Store PROMPT and return the engine's own hit on it; its own cache is empty again."""
    generate(llm, PROMPT)
    settle(llm)
    with no_restores(llm):
        hit = generate(llm, PROMPT, max_tokens=8)
    forget_local(llm)
    return hit


class ParkedLoads:
    """The parked loads of a worker; they are copied when they are released."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._held: list[Wait] = []
        self.count = 0
        self.is_released = False

    def load_parked(self, copies: Sequence[Copies], time: StartTimer) -> Callable[[], bool]:
        self._held += self._device.load(copies, [list(self._device._layers)], time)
        self.count += 1
        if self.is_released:
            self.release()
        return lambda: not self._held

    def release(self) -> None:
        """Copy what is held, and later loads at once."""
        self.is_released = True
        for copy in self._held:
            copy()
        self._held.clear()


@contextmanager
def held_loads() -> Iterator[ParkedLoads]:
    worker = worker_connector()._worker
    assert worker is not None
    loads = ParkedLoads(worker._device)
    with patch.object(worker._device, "load_parked", loads.load_parked):
        yield loads
        loads.release()


def finish(llm: Any) -> dict[str, Completion]:
    """Run all requests to their end; return what they answered, by id."""
    finished: dict[str, Completion] = {}
    while llm.llm_engine.has_unfinished_requests():
        finished |= {x.request_id: _completion(x) for x in step(llm) if x.finished}
    return finished


def same(completion: Completion, reference: Completion) -> None:
    assert completion.num_cached_tokens == CACHED
    assert completion.tokens == reference.tokens
    assert delta(completion, reference) <= 1e-4


@pytest.mark.parametrize("tier", ["dram", "ssd"])
def test_others_decode_while_a_request_is_parked(
    llm: Any, reference: Completion, tier: str
) -> None:
    if tier == "ssd":
        leave_on_ssd_only(llm)
    with no_restores(llm):
        alone = generate(llm, OTHER, max_tokens=20)
    with held_loads() as loads:
        other = add(llm, OTHER, max_tokens=20, logprobs=-1)
        step(llm, 2)
        parked = add(llm, PROMPT, logprobs=-1)
        if tier == "ssd":
            until(lambda: bool(step(llm) and loads.count))
        else:
            step(llm)
        outputs = step(llm, 4)
        assert [x.request_id for x in outputs] == [other] * 4
        assert loads.count == 1
        loads.release()
        answers = finish(llm)
    same(answers[parked], reference)
    assert answers[other].tokens == alone.tokens
    assert delta(answers[other], alone) <= 1e-4


def test_requests_with_one_prompt_share_the_pages_of_one_parked_load(
    llm: Any, reference: Completion
) -> None:
    with held_loads() as loads:
        ids = [add(llm, PROMPT, logprobs=-1) for _ in range(3)]
        assert step(llm, 3) == []
        loads.release()
        answers = finish(llm)
        assert loads.count == 1
    for request_id in ids:
        same(answers[request_id], reference)


def test_the_pages_of_an_aborted_request_are_free_when_its_load_has_ended(
    llm: Any, reference: Completion
) -> None:
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    with held_loads() as loads:
        request_id = add(llm, PROMPT)
        step(llm)
        llm.llm_engine.abort_request([request_id])
        step(llm, 2)
        assert pool.get_num_free_blocks() < free
        assert scheduler.has_requests(), "an idle engine would not learn that it has ended"
        loads.release()
        step(llm)
    assert pool.get_num_free_blocks() == free
    forget_local(llm)
    same(generate(llm, PROMPT, max_tokens=8), reference)


def test_a_preempted_request_is_parked_again(llm: Any, reference: Completion) -> None:
    with held_loads() as loads:
        loads.release()
        request_id = add(llm, PROMPT, logprobs=-1)
        step(llm, 4)
        assert llm.reset_prefix_cache(reset_running_requests=True)
        answers = finish(llm)
        assert loads.count == 2
    assert answers[request_id].tokens == reference.tokens
    assert delta(answers[request_id], reference) <= 1e-4


def test_a_parked_load_that_fails_fails_its_request_alone(llm: Any, reference: Completion) -> None:
    """vLLM's default for a failed load; then nothing more is loaded, and all is computed."""
    worker, side = worker_connector()._worker, scheduler_side(llm)
    assert worker is not None
    with no_restores(llm):
        alone = generate(llm, OTHER, max_tokens=20)
    failing = patch.object(worker._device, "load_parked", side_effect=StoreError("no such slot"))
    try:
        with failing:
            other = add(llm, OTHER, max_tokens=20, logprobs=-1)
            step(llm, 2)
            parked = add(llm, PROMPT, logprobs=-1)
            outputs = step(llm, 3)
        answers = {x.request_id: x for x in outputs if x.finished}
        assert [x.finish_reason for x in answers.pop(parked).outputs] == ["error"]
        answer = finish(llm)[other]
        assert answer.tokens == alone.tokens
        assert delta(answer, alone) <= 1e-4
        assert generate(llm, PROMPT, max_tokens=8).tokens == reference.tokens
        forget_local(llm)
        assert generate(llm, PROMPT, max_tokens=8).num_cached_tokens == 0
        assert_no_leaks(llm)
    finally:
        worker.outcome.broken = side.is_stopped = False
        side._recorder.set("heterocache_cache_alive", 1.0)
    forget_local(llm)
    same(generate(llm, PROMPT, max_tokens=8), reference)
