"""The simulator does what the engine does: the same sessions, the same hits and bytes.

Both run on a clock on which every step takes equally long, so that bytes and steps can be compared
exactly: which requests share a step, and when each prompt's first token comes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from benchmarks.accounts import account_of_simulation
from benchmarks.closed_loop import StepClock
from benchmarks.faithful_engine import EngineFacts, played, policy_of, steps_alone_cost
from benchmarks.synthetic_sessions import CODING_AGENT, Constant, Geometric, LogNormal, synthetic
from ownership.simulator.traces.session import Trace
from tests.engine.harness import engine, scheduler_side

STEP_S = 0.01
SESSIONS = replace(
    CODING_AGENT,
    num_preambles=2,
    preamble_tokens=Constant(200),
    first_tokens=LogNormal(500, 900),
    turns=Geometric(5),
    tool_tokens=LogNormal(80, 200),
    user_tokens=LogNormal(80, 200),
    output_tokens=LogNormal(20, 40),
    tool_latency_s=LogNormal(0.3, 0.6),
    think_s=LogNormal(0.5, 1.0),
    fork_fraction=0.2,
    fork_width=Constant(1),
    fork_turns=Constant(1),
    context_tokens=1500,
    summary_tokens=Constant(200),
)


def sessions(block_tokens: int, seed: int, number: int = 5) -> Trace:
    return synthetic(SESSIONS, sessions=number, rate=2.0, block_tokens=block_tokens, seed=seed)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("model", "num_blocks", "checkpoints", "dram_gib", "tiers"),
    [
        # Pages for two prompts: some are preempted.
        pytest.param("dense", 66, "full", 0.1, {"hbm", "dram"}, marks=pytest.mark.wide),
        ("gemma3", 500, "periodic:4", 0.1, {"hbm", "dram"}),
        ("dense", 66, "full", 0.005, {"hbm", "dram", "ssd"}),  # DRAM for two prompts
    ],
)
def test_an_engine_and_its_twin_agree(
    model: str, num_blocks: int, checkpoints: str, dram_gib: float, tiers: set[str], tmp_path: Path
) -> None:
    extra: dict[str, Any] = {"dram_gib": dram_gib, "chunk_tokens": 32, "checkpoints": checkpoints}
    if "ssd" in tiers:
        extra |= {"ssd_dir": str(tmp_path), "ssd_gib": 0.1}
    limits = {"num_gpu_blocks_override": num_blocks, "max_model_len": 2048}
    with engine(model, extra, disable_log_stats=False, max_num_batched_tokens=512, **limits) as llm:
        facts, trace = EngineFacts.of(llm), sessions(32, seed=int(model == "gemma3"))
        # The simulator has no chain users, which would order evictions from DRAM.
        with patch.object(scheduler_side(llm).store.retention, "protect_chain"):
            real, _ = played(llm, trace, StepClock(STEP_S))
    costs = steps_alone_cost(facts.model, facts.limits.step_tokens, STEP_S)
    fleet = facts.fleet((facts.worker(costs),))
    twin = account_of_simulation(trace, fleet, policy_of(checkpoints), facts.chunk_tokens)
    assert real.hit_tokens.keys() == tiers, "nothing was asked of a tier"
    assert twin == real
    assert twin.ttft_s == pytest.approx(real.ttft_s)
    assert sorted(twin.session_s) == pytest.approx(sorted(real.session_s))
