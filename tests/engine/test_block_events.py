"""A router that reads the engine's events sees what the store can restore."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector.engine.scheduler.idle_steps import Loop
from tests.engine.event_consumer import Consumer, Subscriber
from tests.engine.harness import (
    CHECKPOINTS,
    engine,
    flipped,
    forget,
    forget_checkpoints,
    forget_local,
    generate,
    leave_on_ssd_only,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.waiting import until

pytestmark = pytest.mark.engine
CHUNK = 256
BLOCK = 32


@contextmanager
def publishing(model: str, folder: Path, **extra: Any) -> Iterator[tuple[Any, Subscriber]]:
    """Yield an engine that publishes its events, and a subscriber."""
    from vllm.config import KVEventsConfig

    endpoints = [f"ipc://{folder}/{name}" for name in ("events", "replay")]
    settings = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    stored = {"dram_gib": 0.1, "ssd_gib": 0.2, "ssd_dir": str(folder / "ssd"), **extra}
    subscriber = Subscriber(*endpoints)
    try:
        with engine(model, {"chunk_tokens": CHUNK, **stored}, kv_events_config=settings) as llm:
            yield llm, subscriber
    finally:
        subscriber.close()


def publish(llm: Any) -> None:
    """Let an idle engine step until it has published all changes."""
    side = scheduler_side(llm)
    settle(llm)

    def is_published() -> bool:
        if not side._has_news():
            return True
        side.idle_steps.look(Loop(lambda: None, lambda: False))
        llm.llm_engine.step()
        return False

    until(is_published, pause_s=0.1)


def view(subscriber: Subscriber) -> Consumer:
    """Return what a router knows that asks for everything since the start."""
    consumer = Consumer()
    consumer.apply(subscriber.replay())
    return consumer


def tokens_in(consumer: Consumer, medium: str) -> int:
    return len(consumer.of(medium)) * BLOCK


def test_a_router_follows_a_dense_model_through_all_tiers(tmp_path: Path) -> None:
    prompt = prompt_tokens(600)
    with publishing("dense", tmp_path) as (llm, subscriber):
        generate(llm, prompt)
        settle(llm)
        assert scheduler_side(llm).store.flush(30.0)
        publish(llm)
        seen = view(subscriber)
        in_pages = seen.of("GPU")
        assert len(in_pages) * BLOCK == 576
        assert seen.of("CPU") == in_pages, "both chunks, and the short one at the end"
        assert seen.of("STORAGE") == in_pages
        assert seen.blocks["CPU"] == seen.blocks["GPU"], "the tokens of each block"
        subscriber.read()

        generate(llm, flipped(prompt, 300))
        publish(llm)
        seen.apply(subscriber.read())
        assert tokens_in(seen, "CPU") == 576 + 576 - CHUNK - BLOCK, "equal blocks are one"
        assert seen.blocks == view(subscriber).blocks, "a late subscriber has missed nothing"

        leave_on_ssd_only(llm)
        publish(llm)
        seen = view(subscriber)
        assert seen.of("CPU") == set()
        assert seen.of("STORAGE") >= in_pages

        assert llm.reset_prefix_cache()  # consumers forget every medium
        generate(llm, prompt_tokens(40, seed=5))
        publish(llm)
        seen = view(subscriber)
        assert seen.of("STORAGE") >= in_pages, "announced again"
        assert not seen.of("GPU") & in_pages
        again = generate(llm, [*prompt, *prompt_tokens(60, seed=6)])
        assert again.num_cached_tokens == len(in_pages) * BLOCK, "as was announced"

        forget(llm)
        publish(llm)
        seen = view(subscriber)
        assert (seen.of("CPU"), seen.of("STORAGE")) == (set(), set())


@pytest.mark.slow
def test_after_kill_9_a_router_learns_of_a_chain_with_its_first_request(tmp_path: Path) -> None:
    prompt = prompt_tokens(600)
    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    settings = {"endpoint": endpoints[0], "replay_endpoint": endpoints[1]}
    extra = {"ssd_dir": str(tmp_path / "ssd"), "ssd_gib": 0.2, "dram_gib": 0.1}
    server = Server(
        write_checkpoint("dense", CHECKPOINTS),
        tmp_path / "server.log",
        kv_transfer_config({"chunk_tokens": CHUNK, "planner": "always_load", **extra}),
        {"kv_events_config": json.dumps({"enable_kv_cache_events": True, **settings})},
    )
    seen: list[set[int]] = []
    try:
        for is_first in (True, False):
            server.start()
            with closing(Subscriber(*endpoints)) as subscriber:
                server.complete(prompt_tokens(40, seed=5), 1)
                assert tokens_in(view(subscriber), "STORAGE") <= BLOCK, "it knows no tokens yet"
                reply = server.complete(prompt, 1)
                until(lambda: tokens_in(view(subscriber), "STORAGE") >= 576)
                assert reply.cached_tokens == (0 if is_first else 576)
                seen.append(view(subscriber).of("STORAGE"))
            server.kill()
    finally:
        server.kill()
    assert seen[0] <= seen[1], "the same hashes as before"


def test_chunks_without_windows_do_not_count(tmp_path: Path) -> None:
    prompt = prompt_tokens(600)
    with publishing("gemma3", tmp_path, checkpoints="zero", replay="off") as (llm, subscriber):
        generate(llm, prompt)
        publish(llm)
        events = subscriber.replay()
        ours = [event for event in events if event.get("medium") == "CPU"]
        kinds = {(event["group_idx"], event["kv_cache_spec_kind"]) for event in ours}
        assert kinds == {(2, "full_attention")}
        announced = view(subscriber).of("CPU")
        assert len(announced) * BLOCK == 576
        forget_local(llm)
        again = generate(llm, [*prompt, *prompt_tokens(60, seed=6)])
        assert again.num_cached_tokens == len(announced) * BLOCK, "as was announced"

        forget_checkpoints(llm)
        forget_local(llm)
        generate(llm, prompt_tokens(40, seed=5))
        publish(llm)
        assert not view(subscriber).of("CPU") & announced
        assert generate(llm, prompt).num_cached_tokens == 0
