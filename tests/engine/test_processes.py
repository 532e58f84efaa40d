"""Engine cores and tensor-parallel workers in their own processes, and MultiConnector."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector import __version__
from tests.engine.event_consumer import Consumer, Subscriber
from tests.engine.harness import (
    CHECKPOINTS,
    delta,
    engine,
    forget_local,
    generate,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
)
from tests.engine.process_group import run_apart

pytestmark = pytest.mark.engine

EXTRA = {"dram_gib": 0.1, "planner": "always_load"}
PROMPT = prompt_tokens(1400, seed=91)


@pytest.mark.parametrize("model", [pytest.param("dense", marks=pytest.mark.slow), "gemma3"])
def test_two_tensor_parallel_workers(model: str) -> None:
    workers = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(model, {"dram_gib": 0.1}, **workers) as llm:
        generate(llm, PROMPT)
        settle(llm)
        with no_restores(llm):
            reference = generate(llm, PROMPT, max_tokens=8)
        for parking in ("never", "always"):
            forget_local(llm)
            with patch.object(scheduler_side(llm), "_parking", parking):
                restored = generate(llm, PROMPT, max_tokens=8)
            assert restored.num_cached_tokens == 1376
            assert restored.tokens == reference.tokens
            assert delta(restored, reference) <= 1e-4


@pytest.mark.slow
def test_four_ranks_with_two_heads_restore_their_own_bits() -> None:
    """Each pair of ranks has the same KV head; on a CPU their sums differ in the last digits."""
    workers = {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}
    with engine("dense", {"dram_gib": 0.1}, **workers) as llm:
        generate(llm, PROMPT)
        settle(llm)
        (layer, *_) = scheduler_side(llm).layout.model.layers
        assert layer.parts == 4
        with no_restores(llm):
            reference = generate(llm, PROMPT, max_tokens=8)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == 1376
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) == 0.0


def test_a_server_with_an_engine_core_of_its_own(tmp_path: Path) -> None:
    transfer = kv_transfer_config(EXTRA, kv_connector_module_path="hetero_connector.connector")
    model = write_checkpoint("gemma3", CHECKPOINTS)
    with Server(model, tmp_path / "server.log", transfer) as server:
        server.complete(PROMPT, max_tokens=1)
        reference = server.complete(PROMPT, max_tokens=8)
        server.reset_prefix_cache()
        restored = server.complete(PROMPT, max_tokens=8)
        metrics = server.metrics()
    assert restored.cached_tokens == 1376
    assert restored.tokens == reference.tokens
    for ours, theirs in zip(restored.top_logprobs, reference.top_logprobs, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-4)

    def value(name: str, **labels: str) -> float:
        parts = [f'{k}="{v}"' for k, v in labels.items()]
        found = [v for k, v in metrics.items() if k.split("{")[0] == name]
        assert found, f"{name} is not on /metrics"
        return sum(
            v
            for k, v in metrics.items()
            if k.split("{")[0] == name and all(part in k for part in parts)
        )

    assert value("heterocache_hits_total") >= 1
    assert value("heterocache_hit_tokens_total", tier="dram") >= 1376
    assert value("heterocache_restored_tokens_total", state_type="window_swa") > 0
    assert value("heterocache_restored_bytes_total", state_type="dense_kv") >= 1376 * 1536
    assert value("heterocache_saved_bytes_total", state_type="dense_kv") >= 1376 * 1536
    assert value("heterocache_load_seconds_count") >= 1
    assert value("heterocache_save_seconds_count") >= 1
    assert value("heterocache_capacity_bytes", tier="dram") > 0
    assert value("vllm:external_prefix_cache_hits_total") >= 1376
    assert value("heterocache_info", version=__version__) == 1
    assert value("heterocache_prediction_ratio_count", choice="load") == 1
    for ours, native in (("restored", "load"), ("saved", "store")):
        moved = value(f"heterocache_{ours}_bytes_total")
        assert value(f"vllm:kv_offload_{native}_bytes_total") == moved
    sources = {k: v for k, v in metrics.items() if "source" in k and v}
    assert any("host" in k.lower() for k in sources), sources


def test_a_child_of_multi_connector(tmp_path: Path) -> None:
    example = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer: dict[str, Any] = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [kv_transfer_config(EXTRA), example]},
    }
    from vllm.config import KVEventsConfig

    endpoints = [f"ipc://{tmp_path}/{name}" for name in ("events", "replay")]
    events = KVEventsConfig(
        enable_kv_cache_events=True, endpoint=endpoints[0], replay_endpoint=endpoints[1]
    )
    with (
        engine(
            "dense",
            kv_transfer_config=transfer,
            kv_events_config=events,
            disable_hybrid_kv_cache_manager=True,
        ) as llm,
        closing(Subscriber(*endpoints)) as subscriber,
    ):
        cold = generate(llm, PROMPT, max_tokens=8)
        core = llm.llm_engine.engine_core.engine_core
        while core.scheduler.connector.has_pending_push_work():
            llm.llm_engine.step()
        reference = generate(llm, PROMPT, max_tokens=8)
        assert llm.reset_prefix_cache()
        restored = generate(llm, PROMPT, max_tokens=8)
        ours = core.scheduler.connector._connectors[0]._scheduler
        router = Consumer()
        router.apply(subscriber.replay())
        assert len(router.of("CPU")) * 32 >= 1376, "announced again after the reset"
        assert [a for a in ours.store.catalog.tiers.index.artifacts() if a.uses]
    assert restored.num_cached_tokens == 1376
    assert restored.tokens == cold.tokens == reference.tokens
    assert delta(restored, reference) <= 1e-4


def test_a_process_may_begin_with_a_few_tokens() -> None:
    """After a restore few tokens are left. That ends stock vLLM 0.32.0 on CPUs with AMX tiles."""
    ended = run_apart("""
from tests.engine.harness import engine, generate, prompt_tokens
with engine("dense-bf16", {"dram_gib": 0.1}) as llm:
    assert len(generate(llm, prompt_tokens(4), max_tokens=2).tokens) == 2
""")
    assert ended.returncode == 0, ended.stdout[-4000:]
