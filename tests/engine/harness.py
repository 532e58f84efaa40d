"""Start a small engine in this process, read full-vocabulary logprobs, shut it down.

    with engine("gemma3", {"dram_gib": 0.1}) as llm:
        first = generate(llm, prompt, max_tokens=8)
        llm.reset_prefix_cache()  # the engine's own cache; the connector's store stays
        again = generate(llm, prompt, max_tokens=8)
        assert delta(first, again) <= 1e-4

`conftest.py` sets the environment before vLLM is imported. A process has one engine at a time.
A start takes as long as several tests, so the shared engines live on: `shared_engine` returns the
one that runs if it is the one asked for. Tests get it from the fixture `shared_llm`.
"""

from __future__ import annotations

import gc
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
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
from tests.engine.groups import MODELS as MODELS
from tests.waiting import until

CHECKPOINTS = Path(__file__).parents[2] / ".cache" / "checkpoints"
HYBRID_MODELS = ("gemma3", "gptoss", "deepseek_v4", "qwen3_next")
BF16_MODELS = ("deepseek_v4", "qwen3_next")
"""The CPU kernels of these take bfloat16 only; the others run in float32."""


def wide(models: Sequence[str], *in_make_test: str) -> list[Any]:
    """Return the models as pytest's parameters; those that `make test` leaves out are `wide`."""
    marks = {model: () if model in in_make_test else pytest.mark.wide for model in models}
    return [pytest.param(model, marks=marks[model]) for model in models]


@dataclass(frozen=True)
class Completion:
    """Tokens, greedy if not said otherwise, each with the logprobs of the whole vocabulary."""

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

    The shared engine is shut down first. Whatever is stored is restored, from where it was left,
    and every chunk boundary gets a checkpoint, so that a test may resume at any, unless
    `connector_extra` says otherwise. Keyword arguments override `engine_arguments(model)`;
    `kv_transfer_config` may be given whole. End it with `shutdown`. Skips the test where vLLM
    cannot run the model on this CPU.
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
    end_shared_engine()
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
        max_tokens=max_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        **{"temperature": 0.0, **sampling},
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
    store, saver = side.store, side._saver
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
    assert side._admissions.admitted == []
    assert side._admissions._parked == {}
    assert not side._early
    queue = side._queue
    assert (queue._waiting, queue._prefilling, queue._decoding) == ({}, {}, {})
    assert (queue._waiting_tokens, queue._prefilling_tokens, queue._decoding_tokens) == (0, 0, 0)
    assert (saver._reservations._reserved, saver.awaits_reports) == ({}, False)


def forget_checkpoints(llm: Any) -> None:
    """Drop all boundary state, as eviction would; prefix-proportional state stays."""
    settle(llm)
    store = scheduler_side(llm).store
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
    return [a for a in scheduler_side(llm).store.catalog.tiers.index.artifacts() if a.sealed]


@contextmanager
def wiped(llm: Any, state_type: StateType) -> Iterator[None]:
    """Set the stored bytes of one state type to zero in DRAM; no sampled hit reveals it."""
    store = scheduler_side(llm).store
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
    store = scheduler_side(llm).store
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


@dataclass(frozen=True)
class _Shared:
    """The shared engine that runs."""

    model: str
    has_connector: bool
    ssd_dir: Path
    llm: Any
    settings: tuple[object, ...]


_shared: _Shared | None = None


def shared_arguments(model: str) -> dict[str, Any]:
    """Return arguments with which a cold prompt takes several steps."""
    if model == "qwen3_next":
        # Its alignment is 640 tokens; by default the engine passes on the recurrent state of a
        # prompt's last boundary only.
        return {"max_num_batched_tokens": 768, "prefix_cache_retention_interval": 640}
    return {"max_num_batched_tokens": 512}


def shared_engine(model: str, *, has_connector: bool = True) -> Any:
    """Return the shared engine of a model; start it if it does not run.

    With the connector it has more DRAM than any test fills, and an SSD directory of its own.
    Without, it is the stock engine with its default arguments.
    """
    if _shared is None or (_shared.model, _shared.has_connector) != (model, has_connector):
        end_shared_engine()
        _start_shared(model, has_connector, Path(tempfile.mkdtemp(prefix="shared-engine-")))
    assert _shared is not None
    return _shared.llm


def restart_shared_engine() -> Any:
    """Shut the shared engine down, start it again on its SSD directory, and return it."""
    assert _shared is not None
    model, has_connector, ssd_dir = _shared.model, _shared.has_connector, _shared.ssd_dir
    _stop_shared()
    _start_shared(model, has_connector, ssd_dir)
    return _shared.llm


def end_shared_engine() -> None:
    """Shut down the shared engine, if one runs, and delete its SSD directory."""
    if _shared is not None:
        ssd_dir = _shared.ssd_dir
        _stop_shared()
        shutil.rmtree(ssd_dir)


def assert_shared_engine_is_as_at_its_start() -> None:
    """Check that a test has left nothing in the shared engine, and no setting changed."""
    assert _shared is not None
    assert_no_leaks(_shared.llm)
    assert _settings_of(_shared.llm) == _shared.settings


def _start_shared(model: str, has_connector: bool, ssd_dir: Path) -> None:
    global _shared
    if has_connector:
        extra = {"dram_gib": 0.25, "ssd_gib": 0.5, "ssd_dir": str(ssd_dir)}
        llm = make_llm(model, extra, disable_log_stats=False, **shared_arguments(model))
        _shared = _Shared(model, True, ssd_dir, llm, _settings_of(llm))
    else:
        # Of several MLA backends the one that takes float32 and runs on any CPU.
        llm = make_llm(model, **({"attention_backend": "CPU_MLA"} if model == "mla" else {}))
        _shared = _Shared(model, False, ssd_dir, llm, ())


def _stop_shared() -> None:
    global _shared
    assert _shared is not None
    llm, _shared = _shared.llm, None
    shutdown(llm)


def _settings_of(llm: Any) -> tuple[object, ...]:
    """Return what tests change in a running engine, and must change back."""
    side = scheduler_side(llm)
    scheduler, planner = llm.llm_engine.engine_core.engine_core.scheduler, side.planner
    tokens = scheduler.max_num_scheduled_tokens
    return planner.mode, planner.replay_when_missing, side._saver._policy, tokens


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
