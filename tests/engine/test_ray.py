"""Workers that Ray starts on one host. They are no children of the engine core. `make test-ray`."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from tests.engine.harness import (
    assert_no_leaks,
    delta,
    engine,
    forget_local,
    generate,
    make_llm,
    no_restores,
    prompt_tokens,
    scheduler_side,
    settle,
    shutdown,
)
from tests.engine.ray_on_cpu import pretend_gpus
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

PROMPT = prompt_tokens(1400, seed=91)
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> Iterator[None]:
    pretend_gpus()
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the names of its sockets must be short
    ray.init(
        num_cpus=4,
        num_gpus=6,  # vLLM keeps those of an engine that has ended
        include_dashboard=False,
        object_store_memory=100 << 20,
        _temp_dir=folder,
        runtime_env={
            "worker_process_setup_hook": "tests.engine.ray_on_cpu.pretend_gpus",
            "env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]},
        },
    )
    yield
    ray.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


def workers() -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [child for child in found if "RayWorkerProc" in "".join(child.cmdline())]


def own_answer(llm: Any) -> Any:
    """Return the answer from the engine's own prefix cache; it is stored, too."""
    generate(llm, PROMPT)
    settle(llm)
    with no_restores(llm):
        return generate(llm, PROMPT, max_tokens=8)


def test_two_ranks_restore() -> None:
    with engine("gemma3", {"dram_gib": 0.1}, **TWO_RANKS) as llm:
        reference = own_answer(llm)
        forget_local(llm)
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == 1376
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) == 0.0
        assert_no_leaks(llm)


def test_a_killed_worker_ends_the_engine_and_the_next_one_restores(tmp_path: Path) -> None:
    extra = {"dram_gib": 0.1, "ssd_dir": str(tmp_path), "ssd_gib": 0.2}
    llm = make_llm("gemma3", extra, **TWO_RANKS)
    try:
        reference = own_answer(llm)
        assert scheduler_side(llm).store.flush(60.0)
        one, _ = workers()
        one.kill()
        until(lambda: llm.llm_engine.engine_core.engine_core.model_executor.is_failed)
    finally:
        shutdown(llm)
    with engine("gemma3", extra, **TWO_RANKS) as llm:
        restored = generate(llm, PROMPT, max_tokens=8)
        assert restored.num_cached_tokens == 1376
        assert restored.tokens == reference.tokens
        assert delta(restored, reference) == 0.0
