"""Restores are exact with draft models (EAGLE heads and small models), on the real engine.

The draft's layers are cache layers like any other: their state is stored and restored with the
target's. The answer depends on the target alone; how many drafts are accepted depends on the
draft's state too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from safetensors.torch import load_file, save_file

from examples.checkpoints import write_checkpoint
from hetero_connector.artifacts.layout import Segment
from hetero_connector.spec import StateType
from tests.engine.harness import (
    CHECKPOINTS,
    assert_no_leaks,
    delta,
    engine,
    forget_local,
    generate,
    metric,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
)
from tests.engine.single_steps import add, hooks_of_next_step, step

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1000, seed=3)
NUM_DRAFTS = 3
LONGEST = 1300
METHODS = ("draft_model", "eagle")


def write_eagle_head(target: Path, directory: Path) -> Path:
    """Write an EAGLE head for `target`: one of its layers behind a random projection."""
    config = json.loads((target / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "draft_vocab_size": config["vocab_size"]}
    (directory / "config.json").write_text(json.dumps(config))
    layer = {
        name.removeprefix("model."): weight
        for name, weight in load_file(next(target.glob("*.safetensors"))).items()
        if ".layers.0." in name and "input_layernorm" not in name
    }
    hidden = config["hidden_size"]
    projection = torch.randn(hidden, 2 * hidden, generator=torch.Generator().manual_seed(1))
    save_file(layer | {"fc.weight": projection / (2 * hidden) ** 0.5}, directory / "a.safetensors")
    return directory


@pytest.fixture(scope="module", params=METHODS)
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    target = draft = write_checkpoint("dense", CHECKPOINTS)
    if request.param == "eagle":
        draft = write_eagle_head(target, tmp_path_factory.mktemp("eagle"))
    speculative = {
        "method": request.param,
        "model": str(draft),
        "num_speculative_tokens": NUM_DRAFTS,
    }
    extra = {"dram_gib": 0.1, "layerwise": "on"}
    arguments = {"max_model_len": LONGEST, "speculative_config": speculative}
    with engine("dense", extra, disable_log_stats=False, **arguments) as llm:
        yield llm


def accepted(llm: Any, prompt: list[int]) -> tuple[Any, float]:
    """Return the answer and how many drafted tokens of it were accepted."""
    before = metric("vllm:spec_decode_num_accepted_tokens_total")
    answer = generate(llm, prompt, max_tokens=24)
    return answer, metric("vllm:spec_decode_num_accepted_tokens_total") - before


@contextmanager
def draft_state_zeroed(llm: Any) -> Iterator[None]:
    """Zero the stored bytes of every layer but the target's four."""
    side = scheduler_side(llm)
    for artifact in sealed(llm):
        chunk = artifact.node.chunk
        segments = side.layout.segments(StateType.DENSE_KV, chunk.start, chunk.end)
        for segment in segments[4:]:
            _bytes_of(side.store.arena.view, artifact.dram_offset, segment)[:] = 0
    yield


def _bytes_of(arena: Any, artifact_offset: int, segment: Segment) -> Any:
    start = artifact_offset + segment.offset
    return arena[start : start + segment.size_bytes]


def test_restored_as_the_own_hit(llm: Any) -> None:
    generate(llm, PROMPT, max_tokens=1)
    with no_restores(llm):
        own, accepted_by_own = accepted(llm, PROMPT)
    forget_local(llm)
    restored, accepted_by_restored = accepted(llm, PROMPT)
    assert restored.num_cached_tokens >= own.num_cached_tokens >= 960
    assert delta(restored, own) <= 1e-4
    assert accepted_by_restored == accepted_by_own
    assert_no_leaks(llm)


def test_without_the_drafts_state_fewer_drafts_are_accepted_and_the_answer_is_the_same(
    llm: Any, request: pytest.FixtureRequest
) -> None:
    """A random EAGLE head guesses nothing, so only the small model shows that."""
    with no_restores(llm):
        own, accepted_by_own = accepted(llm, PROMPT)
    forget_local(llm)
    with draft_state_zeroed(llm):
        wrong, accepted_without = accepted(llm, PROMPT)
    assert wrong.tokens == own.tokens
    if "draft_model" in request.node.name:
        assert accepted_without < accepted_by_own == 24 * NUM_DRAFTS / (NUM_DRAFTS + 1)


def test_a_step_without_the_drafter_may_load(llm: Any) -> None:
    """vLLM leaves the drafter out where any request of the batch is close to its length limit."""
    with no_restores(llm):
        generate(llm, PROMPT[:900], max_tokens=1)  # every layer has been asked for
    forget_local(llm)
    add(llm, prompt_tokens(LONGEST - 6, seed=5), max_tokens=6)
    step(llm, 2)
    hits = metric("heterocache_hit_tokens_total")
    add(llm, PROMPT, max_tokens=2)
    finished = [output for output in step(llm, 12) if output.finished]
    assert len(finished) == 2
    assert metric("heterocache_hit_tokens_total") - hits >= 992
    assert_no_leaks(llm)


def test_the_order_of_the_workers_hooks(llm: Any) -> None:
    """vLLM takes a step's results and ends it in the order of `docs/internals/hooks.md`."""
    is_second = llm.llm_engine.vllm_config.use_v2_model_runner
    ends_first = is_second and vllm.__version__.startswith("0.32.")
    add(llm, prompt_tokens(100, seed=8), max_tokens=2)
    called = hooks_of_next_step(llm)
    step(llm, 4)
    results = called.index("get_transfer_results"), called.index("build_connector_worker_meta")
    if ends_first:
        assert called.index("wait_for_save") < min(results)
    else:
        assert called[-1] == "wait_for_save"
    assert called[0] == "handle_preemptions"
    assert called.index("save_kv_layer") < called.index("start_load_kv") < min(results)
