"""Engines of other tensor-parallel sizes use each other's state: over NIXL, and from an SSD.

This needs `tp_sizes: any`. Other ranks round sums differently, so restored state differs in the
last digits from computed state. The tolerances are measured, and a test shows how far off a wrong
cut would be.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from examples.checkpoints import write_checkpoint
from examples.disaggregated_prefill.fleet import value
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Reply, Server, kv_transfer_config, logprob_distance
from hetero_connector.artifacts.tensor_parallel import whole_model
from hetero_connector.spec import LayerSpec, StateType
from tests.engine.fleets import computed, is_answered, until
from tests.engine.harness import (
    CHECKPOINTS,
    delta,
    engine,
    flipped,
    forget,
    forget_local,
    generate,
    leave_on_ssd_only,
    no_restores,
    prompt_tokens,
    scheduler_side,
    sealed,
    settle,
)

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MAX_TOKENS = 8
RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ANY = {"dram_gib": 0.1, "tp_sizes": "any"}
PROMPT = prompt_tokens(1400, seed=230)
TOLERANCES = {"dense": 1e-4, "gemma3": 1e-4, "gptoss": 5e-4}
"""Largest difference of a logprob, as measured (docs/internals/exactness.md). bfloat16 models have
none: there greedy answers of two TP sizes differ in any case."""
POWER = 0.05
"""Smallest logprob difference that a wrong cut or another token must cause."""
STATE_TOLERANCES = {"dense": 1e-5, "gemma3": 1e-5, "gptoss": 1e-4, "qwen3_next": 0.1}
"""Largest difference of a layer's state, relative to its norm."""
CUT_BY_HEADS = (StateType.DENSE_KV, StateType.WINDOW_SWA, StateType.RECURRENT)


@contextmanager
def heads_swapped(llm: Any, *kinds: StateType) -> Iterator[None]:
    """Swap the halves of each page in DRAM, as if ranks had been mixed up."""
    store, layout = scheduler_side(llm).store, scheduler_side(llm).layout

    def swap() -> None:
        for artifact in sealed(llm):
            chunk = artifact.node.chunk
            for segment in layout.segments(artifact.state_type, chunk.start, chunk.end):
                if artifact.state_type in kinds:
                    at, size = artifact.dram_offset + segment.offset, segment.size_bytes
                    pages = store.arena.view[at : at + size].reshape(segment.num_pages, 2, -1)
                    pages[:] = pages[:, ::-1].copy()

    swap()
    yield
    swap()


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [
        ("gemma3", RANKS, {}),
        pytest.param("gemma3", {}, RANKS, marks=pytest.mark.slow),
        pytest.param("dense", RANKS, {}, marks=pytest.mark.slow),
        pytest.param("gptoss", RANKS, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", RANKS, {}, marks=pytest.mark.slow),
        pytest.param("qwen3_next", {}, RANKS, marks=pytest.mark.slow),
    ],
)
def test_an_engine_started_again_with_other_ranks_uses_its_ssd(
    model: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    extra = {**ANY, "ssd_dir": str(tmp_path), "ssd_gib": 0.2}
    with engine(model, extra, **before) as llm:
        generate(llm, PROMPT)
        leave_on_ssd_only(llm)
    with engine(model, extra, **after) as llm:
        with no_restores(llm):
            generate(llm, PROMPT)
            settle(llm)
            reference = generate(llm, PROMPT, MAX_TOKENS)
            other = generate(llm, flipped(PROMPT, 40), MAX_TOKENS)
        assert delta(other, reference) > POWER
        forget_local(llm)
        restored = generate(llm, PROMPT, MAX_TOKENS)
        assert restored.num_cached_tokens >= 1280
        assert {a.ssd is not None for a in sealed(llm) if a.uses} == {True}
        theirs = state_of(llm)
        if model in TOLERANCES:
            print(f"{model}: logprobs {delta(restored, reference):.1e}")
            assert delta(restored, reference) <= TOLERANCES[model]
            for kind in {a.state_type for a in sealed(llm)}.intersection(CUT_BY_HEADS):
                with heads_swapped(llm, kind):
                    forget_local(llm)
                    mixed_up = generate(llm, PROMPT, MAX_TOKENS)
                assert mixed_up.num_cached_tokens == restored.num_cached_tokens
                assert delta(mixed_up, reference) > POWER, kind
        forget(llm)
        generate(llm, PROMPT)
        settle(llm)
        ours = state_of(llm)
    assert theirs.keys() & ours.keys() >= {key for key in theirs if key.end == 1280}
    errors = {key: distance(theirs[key], ours[key]) for key in theirs.keys() & ours.keys()}
    print(f"{model}: state {max(errors.values()):.1e}")
    assert max(errors.values()) <= STATE_TOLERANCES[model]
    for key in errors:
        if key.state_type in CUT_BY_HEADS:
            assert distance(np.roll(theirs[key], 1, axis=1), ours[key]) > 0.5, key


class Pages(NamedTuple):
    """A range of a prompt's pages."""

    layer: str
    state_type: StateType
    start: int
    end: int


def state_of(llm: Any) -> dict[Pages, np.ndarray]:
    """Return each layer's state in DRAM, `[pages, halves, numbers]`, of heads 0 and 1."""
    side = scheduler_side(llm)
    whole = {layer.layer: layer for layer in whole_model(side.layout.model).layers}
    state = {}
    for artifact in sealed(llm):
        chunk = artifact.node.chunk
        for segment in side.layout.segments(artifact.state_type, chunk.start, chunk.end):
            if artifact.dram is not None and segment.num_pages:
                at, spec = artifact.dram_offset + segment.offset, whole[segment.layer.layer]
                pages = side.store.arena.view[at : at + segment.size_bytes]
                numbers = numbers_of(spec, pages.reshape(segment.num_pages, -1))
                key = Pages(spec.layer, artifact.state_type, chunk.start, chunk.end)
                state[key] = numbers.reshape(len(numbers), 2, -1)
    return state


def numbers_of(spec: LayerSpec, pages: np.ndarray) -> np.ndarray:
    """Return `[pages, bytes] uint8` as float32; a delta net's convolution state is bfloat16."""
    if spec.state_type is StateType.RECURRENT:
        conv = sum(spec.runs[:-1])
        state = np.ascontiguousarray(pages[:, conv:]).view(np.float32)
        return np.concatenate([widened(pages[:, :conv]), state], axis=1)
    return widened(pages) if spec.dtype == "bfloat16" else pages.copy().view(spec.dtype)


def widened(pages: np.ndarray) -> np.ndarray:
    """Return bfloat16 bytes as float32."""
    return (np.ascontiguousarray(pages).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def distance(one: np.ndarray, other: np.ndarray) -> float:
    """Return the norm of the difference, relative to that of `other`."""
    return float(np.linalg.norm(one - other) / np.linalg.norm(other))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gemma3", "dense"])
def test_servers_read_each_other_across_tp_sizes(model: str, tmp_path: Path) -> None:
    seeds = count(3_000)
    with fleet(model, tmp_path) as (one, two):
        for seed, producer, consumer in ((231, two, one), (232, one, two)):
            prompt = prompt_tokens(1400, seed)
            theirs = computed(producer, prompt)
            # On a busy machine Redis may have missed a deadline: then it is not waited for.
            until(lambda s=consumer: is_answered(s, next(seeds)), "it is answered")
            before = value(consumer, "hit_tokens", tier="peer")
            restored = consumer.complete(prompt, MAX_TOKENS)
            from_peer = value(consumer, "hit_tokens", tier="peer") - before
            assert restored.cached_tokens == from_peer >= 1280
            own = own_hit(consumer, prompt)
            assert logprob_distance(own_hit(consumer, flipped(prompt, 40)), own) > POWER
            assert logprob_distance(restored, own) <= TOLERANCES[model]
            assert logprob_distance(restored, theirs) <= TOLERANCES[model]


@pytest.mark.slow
def test_servers_with_own_state_only_find_no_other_tp_size(
    tmp_path: Path,
) -> None:
    with fleet("gemma3", tmp_path, first={"tp_sizes": "own"}) as (one, two):
        prompt = prompt_tokens(1400, 233)
        computed(two, prompt)
        one.complete(prompt, MAX_TOKENS)
        assert value(one, "directory_lookups", outcome="nothing") > 0
        assert value(one, "hit_tokens", tier="peer") == 0


def own_hit(server: Server, prompt: list[int]) -> Reply:
    """Return the answer from state that the server computed itself: a salt excludes all else."""
    server.complete(prompt, max_tokens=1, cache_salt="own")
    return server.complete(prompt, MAX_TOKENS, cache_salt="own")


@contextmanager
def fleet(
    model: str, folder: Path, first: dict[str, Any] | None = None
) -> Iterator[tuple[Server, Server]]:
    """Yield a server with one rank (configured by `first`) and one with two; both have joined."""
    with ExitStack() as stack:
        redis = stack.enter_context(EmbeddedRedis())
        given = {
            **ANY,
            "planner": "always_load",
            "checkpoints": "full",
            "directory": redis.url,
            "load_deadline_s": 100,  # a lookup gets 1 s of it: the machine may be busy
        }
        checkpoint = write_checkpoint(model, CHECKPOINTS)
        one = Server(
            checkpoint,
            folder / "one.log",
            kv_transfer_config(given | {"worker_name": "one"} | (first or {})),
        )
        two = Server(
            checkpoint,
            folder / "two.log",
            kv_transfer_config(given | {"worker_name": "two"}),
            RANKS,
        )
        for server in (one, two):
            server.launch()
            stack.callback(server.stop)
        for server in (one, two):
            server.start()
            until(lambda s=server: value(s, "directory_joined") == 1, "it has joined")
        yield one, two
