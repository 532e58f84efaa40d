"""The restore planner learns on the real engine and decides by what it has learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec import StateType
from tests.engine.harness import (
    assert_no_leaks,
    delta,
    engine,
    forget,
    forget_local,
    generate,
    leave_on_ssd_only,
    metric,
    prompt_tokens,
    scheduler_side,
    settle,
)

pytestmark = pytest.mark.engine

PROMPT = prompt_tokens(1400, seed=83)
WHOLE = 1376
"""Up to the prompt's last block, though its chunk has tokens of the answer, too."""
KV = StateType.DENSE_KV


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    extra: dict[str, Any] = {"dram_gib": 0.1, "ssd_gib": 0.2, "planner": "cost"}
    extra["ssd_dir"] = str(tmp_path_factory.mktemp("ssd"))
    with engine("dense", extra, max_num_batched_tokens=512, disable_log_stats=False) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _empty(llm: Any) -> Iterator[None]:
    forget(llm)
    yield
    assert_no_leaks(llm)


def test_steps_loads_and_reads_are_learned_from(llm: Any) -> None:
    costs = scheduler_side(llm).costs
    steps, loads, reads = (
        costs.compute.samples,
        costs.load.errors(Tier.DRAM).count,
        costs.load.errors(Tier.SSD).count,
    )
    cold = generate(llm, PROMPT, max_tokens=40)
    # 1,400 tokens are three steps of at most 512; decode steps are sampled
    assert costs.compute.samples >= steps + 3
    assert 0 < costs.compute.predict(512.0, 0.0) < 60
    forget_local(llm)
    assert generate(llm, PROMPT, max_tokens=2).num_cached_tokens == WHOLE
    assert costs.load.errors(Tier.DRAM).count > loads
    leave_on_ssd_only(llm)
    forget_local(llm)
    from_ssd = generate(llm, PROMPT, max_tokens=40)
    assert from_ssd.num_cached_tokens == WHOLE
    settle(llm)
    assert costs.load.errors(Tier.SSD).count > reads
    assert delta(from_ssd, cold) <= 1e-4


def test_chunks_that_cost_more_to_load_than_to_compute_are_computed(llm: Any) -> None:
    side = scheduler_side(llm)
    cold = generate(llm, PROMPT, max_tokens=8)
    computed = metric("heterocache_decisions_total", choice="compute")
    half_a_minute = TierRates(30.0, {KV: 1e-3}, 1e-3)
    slow_memory = LoadModel([KV], {Tier.DRAM: half_a_minute})
    forget_local(llm)
    with patch.object(side.costs, "load", slow_memory):
        again = generate(llm, PROMPT, max_tokens=8)
    assert again.num_cached_tokens == 0
    assert delta(again, cold) <= 1e-4
    assert metric("heterocache_decisions_total", choice="compute") == computed + 1
    for kind in ("predicted", "observed"):
        assert metric("heterocache_ttft_seconds_count", kind=kind) > 0
