"""No answer mixes state of different weights when they change in a running engine. The weights of
one engine are changed in place, as a trainer does, and back.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.engine.scheduler import weight_updates
from hetero_connector.errors import UnsupportedVersionError
from tests.engine.harness import (
    Completion,
    assert_no_leaks,
    delta,
    engine,
    forget_local,
    generate,
    leave_on_ssd_only,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)
from tests.engine.single_steps import add, step

pytestmark = pytest.mark.engine

MODEL = "gemma3"
PROMPT = prompt_tokens(700, seed=43)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path_factory.mktemp("ssd")), "ssd_gib": 0.2}
    with engine(MODEL, extra) as llm:
        yield llm


@pytest.fixture(scope="module")
def answers(llm: Any) -> dict[int, Completion]:
    """Return the computed answer under each set of weights."""
    found = {}
    for which in (0, 1):
        load(llm, which)
        assert llm.reset_prefix_cache()
        with no_restores(llm):
            found[which] = generate(llm, PROMPT, max_tokens=8)
    assert delta(found[0], found[1]) > 100 * TOLERANCE, "the weights make no difference"
    load(llm, 0)
    return found


@pytest.fixture(autouse=True)
def _first_weights(llm: Any, answers: dict[int, Completion]) -> Iterator[None]:
    load(llm, 0)
    name(llm, "default")
    settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)
    name(llm, "default")
    yield
    assert_no_leaks(llm)


def load(llm: Any, which: int) -> None:
    """Write weights 0 (of the files) or 1 into the running model without a call of the engine core,
    as a trainer that shares their memory does."""

    def change(worker: Any) -> None:
        model = worker.model_runner.model
        kept = getattr(model, "weights_of_the_files", {})
        for layer, weight in model.named_parameters():
            if layer.endswith("input_layernorm.weight"):
                first = kept.setdefault(layer, weight.data.clone())
                weight.data.copy_(first + 0.3 * which)
        model.weights_of_the_files = kept

    llm.llm_engine.engine_core.engine_core.model_executor.collective_rpc(change)


def name(llm: Any, version: str) -> None:
    llm.llm_engine.set_weight_version(version)


def restored(llm: Any) -> Completion:
    forget_local(llm)
    return generate(llm, PROMPT, max_tokens=8)


def test_without_a_reset_or_a_version_old_state_would_be_used(
    llm: Any, answers: dict[int, Completion]
) -> None:
    """Power test: such a change is not noticed without a reset or a version."""
    generate(llm, PROMPT, max_tokens=8)
    load(llm, 1)
    mixed = restored(llm)
    assert mixed.num_cached_tokens > 0
    assert delta(mixed, answers[1]) > 100 * TOLERANCE


def test_after_an_update_and_a_reset_answers_are_of_the_new_weights(
    llm: Any, answers: dict[int, Completion]
) -> None:
    generate(llm, PROMPT, max_tokens=8)
    leave_on_ssd_only(llm)
    load(llm, 1)
    assert llm.reset_prefix_cache(reset_connector=True)
    fresh = generate(llm, PROMPT, max_tokens=8)
    assert fresh.num_cached_tokens == 0
    assert delta(fresh, answers[1]) <= TOLERANCE
    again = restored(llm)
    assert again.num_cached_tokens > 0
    assert delta(again, answers[1]) <= TOLERANCE


def test_state_of_each_version_is_found_with_that_version_alone(
    llm: Any, answers: dict[int, Completion]
) -> None:
    generate(llm, PROMPT, max_tokens=8)
    for which, version, was_stored in ((1, "v1", False), (0, "default", True), (1, "v1", True)):
        load(llm, which)
        name(llm, version)
        leave_on_ssd_only(llm)
        completion = restored(llm)
        assert (completion.num_cached_tokens > 0) == was_stored
        assert delta(completion, answers[which]) <= TOLERANCE


def test_a_request_that_runs_across_an_update_is_not_stored(
    llm: Any, answers: dict[int, Completion]
) -> None:
    add(llm, PROMPT, max_tokens=8)
    step(llm, 3)
    load(llm, 1)
    name(llm, "v1")
    step(llm, 12)
    settle(llm)
    completion = restored(llm)
    assert completion.num_cached_tokens == 0
    assert delta(completion, answers[1]) <= TOLERANCE


def test_vllms_pages_of_other_weights_are_not_found(
    llm: Any, answers: dict[int, Completion]
) -> None:
    """vLLM empties its own prefix cache at an update only if it is told to, and no request runs."""
    generate(llm, PROMPT, max_tokens=8)
    load(llm, 1)
    assert generate(llm, PROMPT, max_tokens=8).num_cached_tokens > 0, "an update that none notices"
    load(llm, 0)
    other = prompt_tokens(300, seed=44)
    add(llm, other, max_tokens=80)
    step(llm, 3)
    load(llm, 1)
    name(llm, "v1")
    asked = add(llm, PROMPT, max_tokens=8)
    (answer,) = [x for x in step(llm, 30) if x.request_id.startswith(asked) and x.finished]
    assert answer.num_cached_tokens == 0
    assert llm.llm_engine.has_unfinished_requests(), "the one from before runs all the time"
    step(llm, 60)
    assert not llm.llm_engine.has_unfinished_requests()
    assert generate(llm, other).num_cached_tokens == 0, "its pages are found by none"
    own = generate(llm, PROMPT, max_tokens=8)
    assert own.num_cached_tokens > 0
    assert delta(own, answers[1]) <= TOLERANCE
    stored = restored(llm)
    assert stored.num_cached_tokens > 0
    assert delta(stored, answers[1]) <= TOLERANCE


@pytest.mark.parametrize("method", ["start_weight_update", "update_weights", "reload_weights"])
def test_an_update_by_vllms_own_methods_is_noticed(llm: Any, method: str) -> None:
    """This holds also for an update that fails: it may have changed some of the weights."""
    generate(llm, PROMPT)
    settle(llm)
    assert scheduler_side(llm).root.is_shared is False, "a reset came before"
    name(llm, "v1")
    generate(llm, PROMPT)
    settle(llm)
    root = scheduler_side(llm).root.hasher
    with pytest.raises(TypeError):
        llm.llm_engine.engine_core.collective_rpc(method, args=("nonsense", 1, 2, 3, 4))
    assert scheduler_side(llm).root.hasher is not root
    assert restored(llm).num_cached_tokens == 0
    name(llm, "v2")
    assert restored(llm).num_cached_tokens == 0


def test_a_worker_extensions_method_counts_as_an_update(llm: Any) -> None:
    name(llm, "v1")
    generate(llm, PROMPT)
    llm.llm_engine.engine_core.collective_rpc(lambda worker: None)
    assert restored(llm).num_cached_tokens == 0


def test_other_calls_to_the_workers_change_nothing(llm: Any) -> None:
    root = scheduler_side(llm).root.hasher
    llm.llm_engine.engine_core.collective_rpc("determine_available_memory")
    name(llm, "default")
    assert scheduler_side(llm).root.hasher is root


@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_finds_nothing_stored_before_it_slept(
    llm: Any, answers: dict[int, Completion], level: int
) -> None:
    """A trainer may change the weights while the engine sleeps, at either level."""
    generate(llm, PROMPT, max_tokens=8)
    leave_on_ssd_only(llm)
    before = scheduler_side(llm).store.generation
    llm.sleep(level=level)
    assert sealed(llm) == []
    load(llm, 1)
    llm.wake_up()
    assert scheduler_side(llm).store.generation.tag != before.tag
    completion = generate(llm, PROMPT, max_tokens=8)
    assert completion.num_cached_tokens == 0
    assert delta(completion, answers[1]) <= TOLERANCE


def test_a_pause_that_keeps_vllms_cache_keeps_stored_state(llm: Any) -> None:
    generate(llm, PROMPT)
    settle(llm)
    core = llm.llm_engine.engine_core.engine_core
    core.pause_scheduler(mode="abort", clear_cache=False)
    core.resume_scheduler()
    assert restored(llm).num_cached_tokens > 0


def test_a_vllm_without_the_methods_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine import core

    monkeypatch.setattr(core, "EngineCore", SimpleNamespace())
    with pytest.raises(UnsupportedVersionError, match="set_weight_version"):
        weight_updates.observe()
