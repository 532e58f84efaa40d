"""On a real engine adapters and prompt embeddings restore exactly their own state."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.engine.scheduler import request_identifier
from hetero_connector.engine.scheduler.chain_answer import ChainAnswer
from hetero_connector.engine.scheduler.request_identifier import RequestIdentity
from ownership.router.identity import ChainCache, Prompt
from ownership.router.view import PublishedChain
from tests.engine.harness import (
    Completion,
    assert_no_leaks,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(700)
BOUNDARY = 672  # whole pages of 32 tokens
EXACT, VISIBLE = 1e-4, 0.05
_HIDDEN, _RANK, _LAYERS = 128, 8, 4
_OUT = {"q_proj": 128, "k_proj": 64, "v_proj": 64, "o_proj": 128}


def write_adapter(path: Path, seed: int) -> Path:
    """A PEFT adapter over every attention projection, strong enough to be seen."""
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for name, out in _OUT.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{stem}.lora_A.weight"] = torch.randn(_RANK, _HIDDEN, generator=rng) / 11
            tensors[f"{stem}.lora_B.weight"] = torch.randn(out, _RANK, generator=rng) / 3
    path.mkdir(exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "target_modules": list(_OUT),
        "bias": "none", "task_type": "CAUSAL_LM",
    }  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@dataclass
class Adapters:
    """Yield an engine and requests for the adapters that it may serve."""

    llm: Any
    a: Any
    b: Any
    copy_of_a: Any

    def answer(self, lora: Any) -> Completion:
        return generate(self.llm, PROMPT, max_tokens=4, lora=lora)


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    arguments = {"enable_lora": True, "max_lora_rank": _RANK, "max_loras": 2, "max_cpu_loras": 4}
    with engine("dense", {"dram_gib": 0.1}, enable_prompt_embeds=True, **arguments) as made:
        yield made


@pytest.fixture(scope="module")
def adapters(llm: Any, tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    from vllm.lora.request import LoRARequest

    root = tmp_path_factory.mktemp("adapters")
    paths = [write_adapter(root / name, seed) for name, seed in (("a", 1), ("b", 2), ("again", 1))]
    a, b, again = (LoRARequest(path.name, 1 + i, str(path)) for i, path in enumerate(paths))
    return Adapters(llm, a, b, again)


@pytest.fixture(autouse=True)
def nothing_stays(llm: Any) -> Iterator[None]:
    forget(llm)
    yield
    assert_no_leaks(llm)


def test_power_an_adapter_left_out_of_the_key_is_seen(adapters: Adapters) -> None:
    cold = [adapters.answer(lora) for lora in (None, adapters.a, adapters.b)]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert delta(cold[one], cold[other]) > VISIBLE
    forget(adapters.llm)
    with patch.object(request_identifier, "RequestIdentity", lambda *_: RequestIdentity()):
        adapters.answer(adapters.a)
        forget_local(adapters.llm)
        mixed = adapters.answer(adapters.b)
    assert mixed.num_cached_tokens == BOUNDARY
    assert delta(mixed, cold[2]) > VISIBLE


def test_each_adapter_restores_only_its_own_state(adapters: Adapters) -> None:
    cold = []
    for lora in (None, adapters.a, adapters.b):
        forget_local(adapters.llm)
        cold.append(adapters.answer(lora))
        assert cold[-1].num_cached_tokens == 0  # the other adapters' state is not used
    for lora, expected in zip((None, adapters.a, adapters.b), cold, strict=True):
        forget_local(adapters.llm)
        restored = adapters.answer(lora)
        assert restored.num_cached_tokens == BOUNDARY
        assert delta(restored, expected) <= EXACT


def test_a_router_names_the_chains_of_adapters_as_the_engine_does(adapters: Adapters) -> None:
    side = scheduler_side(adapters.llm)
    about = {"model": "dense", "served_as": "dense", "tokenizer": ""}
    tell = ChainAnswer(about, side.layout, side.root, side.commands.clearings, side.identifier)
    prompt = Prompt(tokens=PROMPT, model="a")
    known = set[ChunkKey]()
    for lora in (None, adapters.a, adapters.b):
        adapters.answer(lora)
        settle(adapters.llm)
        model = "dense" if lora is None else lora.lora_name
        naming = PublishedChain.of(tell()).naming(replace(prompt, model=model))
        assert naming is not None
        named = set(ChainCache().of_tokens(PROMPT, naming).keys)
        new = {x.node.chunk.key for x in sealed(adapters.llm)} - known
        assert len(named) == len(PROMPT) // side.layout.chunk_tokens
        assert named <= new, "the router's keys are those of what this request has stored"
        known |= new
    assert PublishedChain.of(tell()).naming(replace(prompt, model="never used")) is None


def test_a_cleared_adapter_is_computed_and_the_others_are_restored(adapters: Adapters) -> None:
    each = (None, adapters.a, adapters.b)
    cold = []
    for lora in each:
        forget_local(adapters.llm)
        cold.append(adapters.answer(lora))
    settle(adapters.llm)
    commands = scheduler_side(adapters.llm).commands
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(commands.clear, {"model": "b"})
        while not answer.done():
            commands.steps.run()  # an engine inside this process takes no step by itself
    assert answer.result()["pages"]
    for lora, expected, cached in zip(each, cold, (BOUNDARY, BOUNDARY, 0), strict=True):
        forget_local(adapters.llm)
        again = adapters.answer(lora)
        assert again.num_cached_tokens == cached
        assert delta(again, expected) <= EXACT
    forget_local(adapters.llm)
    assert adapters.answer(adapters.b).num_cached_tokens == BOUNDARY


def test_an_adapter_s_copy_under_another_name_is_the_same_adapter(adapters: Adapters) -> None:
    expected = adapters.answer(adapters.a)
    forget_local(adapters.llm)
    restored = adapters.answer(adapters.copy_of_a)
    assert restored.num_cached_tokens == BOUNDARY
    assert delta(restored, expected) <= EXACT


def test_an_adapter_whose_files_change_is_not_cached_any_more(
    adapters: Adapters, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    lora = LoRARequest("changing", 9, str(write_adapter(tmp_path / "changing", 3)))
    adapters.answer(lora)
    config = tmp_path / "changing" / "adapter_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 2 * _RANK}))
    forget_local(adapters.llm)
    assert adapters.answer(lora).num_cached_tokens == 0


def test_an_adapter_is_what_was_loaded_and_not_what_a_later_request_finds(
    adapters: Adapters, tmp_path: Path
) -> None:
    """vLLM loads an adapter when it is told of it; its first request may come hours later."""
    from vllm.lora.request import LoRARequest

    path = write_adapter(tmp_path / "loaded", 3)
    lora = LoRARequest("loaded", 10, str(path))
    assert adapters.llm.llm_engine.add_lora(lora)
    write_adapter(path, 4)
    before = len(sealed(adapters.llm))
    answer = adapters.answer(lora)
    forget_local(adapters.llm)
    assert adapters.answer(lora).num_cached_tokens == 0
    settle(adapters.llm)
    assert len(sealed(adapters.llm)) == before
    other = LoRARequest("other", 11, str(path))
    changed = adapters.answer(other)
    assert delta(answer, changed) > VISIBLE, "vLLM goes on computing with what it has loaded"
    forget_local(adapters.llm)
    restored = adapters.answer(other)
    assert restored.num_cached_tokens == BOUNDARY
    assert delta(restored, changed) <= EXACT


def test_nothing_is_stored_under_an_adapter_that_was_replaced_in_place(
    adapters: Adapters, tmp_path: Path
) -> None:
    from vllm.lora.request import LoRARequest

    paths = [str(write_adapter(tmp_path / name, seed)) for name, seed in (("one", 5), ("two", 6))]
    one = LoRARequest("x", 12, paths[0])
    first = adapters.answer(one)
    settle(adapters.llm)
    before = len(sealed(adapters.llm))
    assert before > 0
    assert adapters.llm.llm_engine.add_lora(LoRARequest("x", 12, paths[1], load_inplace=True))
    forget_local(adapters.llm)
    second = adapters.answer(one)  # a request that was sent before
    assert second.num_cached_tokens == 0
    assert delta(first, second) > VISIBLE, "vLLM computes it with the new weights"
    settle(adapters.llm)
    assert len(sealed(adapters.llm)) == before


def embeddings(seed: int = 0) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((700, _HIDDEN), dtype=np.float32))


def test_prompt_embeddings_restore_exactly_and_never_another_s(llm: Any) -> None:
    one = embeddings()
    other = one.clone()
    other[3] += 0.5
    cold = generate(llm, {"prompt_embeds": one}, max_tokens=4)
    forget_local(llm)
    changed = generate(llm, {"prompt_embeds": other}, max_tokens=4)
    assert changed.num_cached_tokens == 0
    assert delta(cold, changed) > VISIBLE  # the power: a row more or less is seen
    forget_local(llm)
    restored = generate(llm, {"prompt_embeds": one}, max_tokens=4)
    assert restored.num_cached_tokens == BOUNDARY
    assert delta(restored, cold) <= EXACT
    forget_local(llm)
    shared = torch.cat([one[:600], embeddings(1)[:100]])
    assert generate(llm, {"prompt_embeds": shared}).num_cached_tokens == 512  # whole chunks
