"""Start a small engine in this process, read full-vocabulary logprobs, shut it down.

    with engine("gemma3", {"dram_gib": 0.1}) as llm:
        first = generate(llm, prompt, max_tokens=8)
        llm.reset_prefix_cache()  # the engine's own cache; the connector's store stays
        again = generate(llm, prompt, max_tokens=8)
        assert delta(first, again) <= 1e-4

`conftest.py` sets the environment before vLLM is imported. One engine at a time.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
from prometheus_client import REGISTRY

from examples.checkpoints import write_checkpoint
from examples.cpu_kernels import unsupported_reason
from examples.serving import engine_arguments, kv_transfer_config
from hetero_connector.engine.scheduler.scheduler_side import SchedulerSide
from hetero_connector.spec import Family, StateType
from hetero_connector.store.catalog.nodes import Artifact

CHECKPOINTS = Path(__file__).parents[2] / ".cache" / "checkpoints"
HYBRID_MODELS = ("gemma3", "gptoss", "deepseek_v4", "qwen3_next")
MODELS = ("dense", *HYBRID_MODELS, "mla")
BF16_MODELS = ("deepseek_v4", "qwen3_next")
"""The CPU kernels of these take bfloat16 only; the others run in float32."""


@dataclass(frozen=True)
class Completion:
    """Greedy tokens, each with the logprobs of the whole vocabulary."""

    tokens: list[int]
    logprobs: np.ndarray
    """[num_tokens, vocabulary] float64."""
    num_cached_tokens: int
    """Prompt tokens that were not computed: local prefix hit plus external."""


def prompt_tokens(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random byte tokens."""
    return np.random.default_rng(seed).integers(0, 256, num_tokens).tolist()


def flipped(prompt: Sequence[int], position: int) -> list[int]:
    """Return the prompt with another token at `position`."""
    changed = list(prompt)
    changed[position] = (changed[position] + 101) % 256
    return changed


def make_llm(
    model: str, connector_extra: Mapping[str, Any] | None = None, **engine_args: Any
) -> Any:
    """Build an engine; with `connector_extra` (even empty) it runs HeteroConnector.

    Whatever is stored is restored, from where it was left, and every chunk boundary gets a
    checkpoint, so that a test may resume at any, unless `connector_extra` says otherwise.
    Keyword arguments override `engine_arguments(model)`; `kv_transfer_config` may be given
    whole. End it with `shutdown`. Skips the test where vLLM cannot run the model on this CPU.
    """
    from vllm import LLM

    if reason := unsupported_reason(model):
        pytest.skip(reason)
    arguments = engine_arguments(model)
    if connector_extra is not None:
        arguments["kv_transfer_config"] = kv_transfer_config(
            {
                "checkpoints": "full",
                "planner": "always_load",
                "prefetch": "off",
                **connector_extra,
            }
        )
    arguments["skip_tokenizer_init"] = True
    arguments |= engine_args
    with _nothing_left_of_a_failed_start():
        return LLM(
            model=str(write_checkpoint(model, CHECKPOINTS)),
            max_logprobs=-1,
            **arguments,
        )


def generate_batch(
    llm: Any,
    prompts: Sequence[Sequence[int] | Mapping[str, Any]],
    max_tokens: int = 1,
    *,
    lora: Any = None,
    **sampling: Any,
) -> list[Completion]:
    """Complete several prompts in one batch: tokens, or whatever else vLLM takes."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        **sampling,
    )
    inputs = [
        prompt if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
        for prompt in prompts
    ]
    outputs = llm.generate(inputs, parameters, use_tqdm=False, lora_request=lora)
    return [_completion(output) for output in outputs]


def generate(
    llm: Any, prompt: Sequence[int] | Mapping[str, Any], max_tokens: int = 1, **sampling: Any
) -> Completion:
    """Complete one prompt."""
    return generate_batch(llm, [prompt], max_tokens, **sampling)[0]


def delta(one: Completion, other: Completion) -> float:
    """Return the largest difference of a logprob, over the steps with equal contexts.

    Steps after the first differing token are left out: their contexts differ.
    """
    same = 0
    for a, b in zip(one.tokens, other.tokens, strict=True):
        same += 1
        if a != b:
            break
    return float(np.abs(one.logprobs[:same] - other.logprobs[:same]).max())


def scheduler_side(llm: Any) -> SchedulerSide:
    """Return the connector's scheduler side of an engine core in this process."""
    return cast(
        SchedulerSide, llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler
    )


def until(condition: Callable[[], bool], deadline_s: float = 60.0) -> None:
    """Wait until the condition is true, which another thread makes so."""
    end_s = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end_s, "it never happened"
        time.sleep(0.01)


def settle(llm: Any) -> None:
    """Step until every ordered save is sealed, as the busy loop of an engine core does."""
    side = scheduler_side(llm)
    while side.has_work:
        llm.llm_engine.step()


def forget_local(llm: Any) -> None:
    """Seal everything, then empty the engine's own prefix cache."""
    settle(llm)
    assert llm.reset_prefix_cache()


def forget(llm: Any) -> None:
    """Empty the engine's own prefix cache and the store."""
    settle(llm)
    assert llm.reset_prefix_cache(reset_connector=True)


def assert_no_leaks(llm: Any) -> None:
    """Check that ended requests have left no pins, no slots and no other state."""
    settle(llm)
    side = scheduler_side(llm)
    store, saver = side._store, side._saver
    assert store.flush(60.0)  # what is being written is pinned
    store.check_integrity()
    tiers = store.catalog.tiers
    until(lambda: not tiers.pinned())  # a sampled hit is pinned while it is checked
    assert len(tiers._pins) == 0
    artifacts = list(tiers.index.artifacts())
    assert all(artifact.sealed for artifact in artifacts)
    for kind in tiers.dram.geometry.stride_bytes:
        in_dram = [a for a in artifacts if a.state_type is kind and a.dram]
        assert tiers.dram.num_used(kind) == len(in_dram)
    assert (side._trackers, side._admissions.loading, side._replays._running) == ({}, {}, {})
    assert (side._admissions.admitted, side._predictions._open) == ([], {})
    assert not side._early
    queue = side._queue
    assert (queue._waiting, queue._prefilling, queue._decoding) == ({}, {}, set())
    assert (queue._waiting_tokens, queue._prefilling_tokens) == (0, 0)
    assert (saver._reservations._reserved, saver.awaits_reports) == ({}, False)


def forget_checkpoints(llm: Any) -> None:
    """Drop all boundary state, as eviction would; prefix-proportional state stays."""
    settle(llm)
    store = scheduler_side(llm)._store
    assert store.flush(30.0)
    with store.catalog.locked():
        for artifact in sealed(llm):
            if artifact.state_type.family is Family.BOUNDARY:
                store.catalog.tiers.forget(artifact)


@contextmanager
def no_restores(llm: Any) -> Iterator[None]:
    """Let the connector match nothing, so that hits are the engine's own: the reference."""
    side = scheduler_side(llm)
    with patch.object(side, "match", lambda request, local_tokens: (0, False)):
        yield


def sealed(llm: Any) -> list[Artifact]:
    """Return every sealed artifact."""
    return [a for a in scheduler_side(llm)._store.catalog.tiers.index.artifacts() if a.sealed]


@contextmanager
def wiped(llm: Any, state_type: StateType) -> Iterator[None]:
    """Set the stored bytes of one state type to zero in DRAM; no sampled hit reveals it."""
    store = scheduler_side(llm)._store
    samples = store.catalog.samples
    assert store.flush(30.0)  # the checksums are those of the right bytes
    until(lambda: not samples and not store.catalog.tiers.pinned())
    spans = [
        store.arena.view[a.dram_offset :][: a.size_bytes]
        for a in sealed(llm)
        if a.state_type is state_type
    ]
    kept = [span.copy() for span in spans]
    assert any(span.any() for span in spans)
    for span in spans:
        span[:] = 0
    with patch.object(samples, "hit"):
        yield
    for span, before in zip(spans, kept, strict=True):
        span[:] = before


def leave_on_ssd_only(llm: Any) -> None:
    """Write everything to SSD, then drop the DRAM copies, as eviction would."""
    settle(llm)
    store = scheduler_side(llm)._store
    assert store.flush(30.0)
    until(lambda: not store.catalog.tiers.pinned())  # a sampled hit is pinned while it is checked
    assert all(artifact.ssd is not None for artifact in sealed(llm))
    store.leave_to_ssd()


def metric(name: str, **labels: str) -> float:
    """Return the sum of this process's Prometheus series `name` that have these labels.

    Counters outlive an engine: compare two readings.
    """
    total = 0.0
    for family in REGISTRY.collect():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total


def shutdown(llm: Any) -> None:
    """Shut the engine down and free its memory, so that the next one can start."""
    try:
        llm.llm_engine.engine_core.shutdown()
    finally:
        _clean_up()


def _clean_up() -> None:
    """Drop vLLM's state of this process: else the next engine would use this one's connector."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ensure_kv_transfer_shutdown()
    cleanup_dist_env_and_memory()
    gc.collect()


@contextmanager
def _nothing_left_of_a_failed_start() -> Iterator[None]:
    try:
        yield
    except BaseException:
        _clean_up()
        raise


@contextmanager
def engine(
    model: str, connector_extra: Mapping[str, Any] | None = None, **engine_args: Any
) -> Iterator[Any]:
    """Yield an engine of `make_llm` and shut it down at the end."""
    llm = make_llm(model, connector_extra, **engine_args)
    try:
        yield llm
    finally:
        shutdown(llm)


def _completion(output: Any) -> Completion:
    sample = output.outputs[0]
    steps = [
        [step[token].logprob for token in sorted(step)]  # one entry per vocabulary id
        for step in sample.logprobs
    ]
    return Completion(
        tokens=list(sample.token_ids),
        logprobs=np.array(steps),
        num_cached_tokens=output.num_cached_tokens,
    )
