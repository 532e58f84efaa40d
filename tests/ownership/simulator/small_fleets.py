"""Fleets and traces small enough to be followed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from benchmarks.synthetic_sessions import CODING_AGENT, Geometric, LogNormal, synthetic
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import (
    ComputeCoefficients,
    ComputeRegression,
    InterferenceCoefficients,
    InterferenceRegression,
)
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.load_model import LoadModel, TierRates
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.presets import PRESETS
from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POOLED
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.machine.worker import WorkerSpec
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace

GIB = 1 << 30
DENSE, HYBRID = "llama-3.1-8b", "deepseek-v4-flash"
COMPUTE = ComputeCoefficients(0.01, 1e-5, 1e-10)
DECODE = InterferenceCoefficients(0.01, 1e-4, 1e-8, 0.002, 1e-5, 1e-10)
AMPLE = TierBytes(40 * GIB, 64 * GIB, 256 * GIB)
TIGHT = {
    DENSE: TierBytes(6 * GIB, 4 * GIB, 8 * GIB),
    HYBRID: TierBytes(GIB // 2, GIB // 4, GIB // 2),
}
"""Room for few prompts of `agents`."""
CHUNK_BYTES = 256 * 131_072
"""Size of a chunk of 256 tokens of the dense model."""
LIMITS = EngineLimits()
FREE = ComputeCoefficients(0.0, 0.0, 0.0)
AT_ONCE = InterferenceCoefficients(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def costs(
    model: str = DENSE,
    compute: ComputeCoefficients = COMPUTE,
    decode: InterferenceCoefficients = DECODE,
    bytes_per_s: float = 10e9,
    step_tokens: int = 8192,
) -> CostModel:
    """`bytes_per_s` from SSD and peers; DRAM is twice as fast."""
    types = preset(model).state_types
    rates = TierRates(1e-4, dict.fromkeys(types, 1 / bytes_per_s), 1 / bytes_per_s)
    dram = TierRates(1e-4, dict.fromkeys(types, 0.5 / bytes_per_s), 0.5 / bytes_per_s)
    return CostModel(
        ComputeRegression(compute),
        LoadModel(types, dict.fromkeys(Tier, rates) | {Tier.DRAM: dram}),
        step_tokens=step_tokens,
        interference=InterferenceRegression(decode, compute),
    )


def fleet(
    count: int = 1,
    model: str = DENSE,
    capacity: TierBytes = AMPLE,
    chunk_tokens: int | None = None,
    limits: EngineLimits = LIMITS,
    cost_model: CostModel | None = None,
    roles: Sequence[Role] = (),
) -> FleetSpec:
    found = cost_model or costs(model, step_tokens=limits.step_tokens)
    workers = tuple(
        WorkerSpec(f"w{i}", found, capacity, roles[i] if roles else Role.BOTH) for i in range(count)
    )
    return FleetSpec("test", model, preset(model), workers, limits, {}, chunk_tokens)


def with_pools(policy: str, workers: int) -> str:
    """Give a policy the pools that it needs; where it can have none it is `colocated`: with one
    worker, and without DRAM."""
    name, _, options = policy.partition("+")
    if not POOLED.get(name):
        return policy
    can_hand_off = workers > 1 and "tiers=gpu" not in options
    pools = f"{name}+prefillers={workers // 2}" if can_hand_off else "colocated"
    return f"{pools}+{options}" if options else pools


@cache
def preset(model: str) -> ModelSpec:
    """Made once: one of a hundred layers takes as long as a small simulation."""
    return PRESETS[model]()


def agents(sessions: int = 12, rate: float = 0.05, seed: int = 0, block_tokens: int = 64) -> Trace:
    """Synthetic agent sessions of a few turns, some of which fork."""
    spec = replace(
        CODING_AGENT,
        turns=Geometric(8),
        fork_fraction=0.1,
        first_tokens=LogNormal(2000, 9000),
        preamble_tokens=LogNormal(1500, 4000),
        output_tokens=LogNormal(40, 200),
        context_tokens=30_000,
        summary_tokens=LogNormal(500, 1000),
    )
    return synthetic(spec, sessions=sessions, rate=rate, block_tokens=block_tokens, seed=seed)


def trace_of(*sessions: Session, block_tokens: int = 256) -> Trace:
    return Trace("by hand", "test", block_tokens, lambda: iter(sessions))


def prompt(
    first: int, tokens: int, output: int = 2, block_tokens: int = 256, **more: object
) -> Request:
    """A prompt of full blocks whose ids count from `first`."""
    blocks = BlockRuns(((first, tokens // block_tokens),))
    return Request(0.0, tokens, output, blocks, **more)  # type: ignore[arg-type]
