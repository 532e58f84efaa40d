"""Replayed sessions: every policy sees the same requests, and differs as it should."""

from __future__ import annotations

import pytest

from benchmarks.agent_sessions import synthetic
from benchmarks.checkpoint_policies import figures_of
from benchmarks.policy_replay import PolicyRun, replay
from tests.benchmarks.scaled_agents import scaled

pytestmark = pytest.mark.long

MODEL = "deepseek-v4-flash"


@pytest.fixture(scope="module")
def runs() -> dict[str, PolicyRun]:
    sessions = [scaled(s, 8, 25) for s in synthetic(6, seed=11)]
    return {
        r.policy: r for r in replay([MODEL], ["full", "periodic:4", "zero", "adaptive"], sessions)
    }


def test_all_policies_store_the_same_chunks_and_differ_in_checkpoints(
    runs: dict[str, PolicyRun],
) -> None:
    assert len({r.chunk_bytes for r in runs.values()}) == 1
    assert len({r.new_tokens for r in runs.values()}) == 1
    zero, periodic, full = (runs[p].checkpoint_bytes for p in ("zero", "periodic:4", "full"))
    assert 0 < zero < periodic < full
    sizes = runs["full"].sizes
    assert runs["full"].chunk_bytes % sizes.chunk_bytes == 0
    chunks = runs["full"].chunk_bytes // sizes.chunk_bytes
    assert full <= chunks * sizes.checkpoint_bytes


def test_with_a_checkpoint_everywhere_nothing_is_computed_twice(runs: dict[str, PolicyRun]) -> None:
    assert runs["full"].recompute_s == pytest.approx(0.0, abs=0.05)
    assert runs["zero"].recompute_s > runs["full"].recompute_s + 0.1
    assert runs["zero"].percentile_s(1.0) > runs["full"].percentile_s(1.0)


def test_adaptive_is_on_or_under_the_front_of_the_fixed_policies(
    runs: dict[str, PolicyRun],
) -> None:
    figures = figures_of(list(runs.values()))
    assert figures[f"over_hull_{MODEL}"] <= 1.01
    assert figures[f"objective_{MODEL}"] <= 1.01
