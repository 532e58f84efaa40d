"""A real engine that plays a trace, and the facts that the simulator needs to do the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.accounts import Account, account_of_engine, gained, registered
from benchmarks.closed_loop import Clock, ClosedLoop
from benchmarks.engine_process import Engine
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
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.machine.worker import WorkerSpec
from ownership.simulator.policies import PolicySpec, parse_policy
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.session import Trace


@dataclass(frozen=True)
class EngineFacts:
    """The model, chunks, capacities and limits of an engine."""

    model: ModelSpec
    chunk_tokens: int
    capacity: TierBytes
    limits: EngineLimits

    @classmethod
    def of(cls, llm: Any) -> EngineFacts:
        """Read them from a `vllm.LLM` whose engine core runs in this process."""
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        layout, tiers = scheduler.connector._scheduler.layout, _store(llm).catalog.tiers
        pools = scheduler.kv_cache_config
        hbm = (pools.num_blocks - 1) * _block_bytes(layout.model)
        ssd = tiers.ssd.geometry.num_chunks if tiers.ssd else 0
        slot_bytes = sum(layout.max_bytes.values())
        config = scheduler.scheduler_config
        return cls(
            layout.model,
            layout.chunk_tokens,
            TierBytes(hbm, tiers.dram.geometry.num_chunks * slot_bytes, ssd * slot_bytes),
            EngineLimits(
                config.max_num_batched_tokens,
                config.max_num_seqs,
                pools.prefix_cache_retention_interval,
            ),
        )

    def worker(self, costs: CostModel) -> WorkerSpec:
        """Return its twin."""
        return WorkerSpec("engine", costs, self.capacity)

    def fleet(self, workers: tuple[WorkerSpec, ...]) -> FleetSpec:
        """Return a fleet of engines like this one."""
        return FleetSpec(
            "an engine", "its own", self.model, workers, self.limits, {}, self.chunk_tokens
        )


def policy_of(checkpoints: str, scheduling: str = "colocated") -> PolicySpec:
    """Return the policy of these benchmarks: restore everything, answers included."""
    return parse_policy(f"{scheduling}+checkpoints={checkpoints}+restores=always_load+answers=kept")


def played(llm: Any, trace: Trace, clock: Clock | None = None) -> tuple[Account, ClosedLoop]:
    """Play a trace on an engine in this process; return the account."""
    _publish(llm)
    before = registered()
    loop = ClosedLoop(llm, trace)
    session_s = loop.play(clock)
    if not _store(llm).flush(60.0):
        raise RuntimeError("the store did not reach the SSD in time")
    _publish(llm)
    cached_tokens = sum(sent.cached_tokens for sent in loop.sent)
    ttft_s = {(sent.session, sent.index): sent.ttft_s for sent in loop.sent}
    counters = gained(registered(), before)
    return account_of_engine(counters, cached_tokens, ttft_s, session_s), loop


class FaithfulEngine(Engine):
    """The engine in its own process."""

    def __init__(
        self, model: str, extra: Mapping[str, Any] | None, engine_args: Mapping[str, Any]
    ) -> None:
        super().__init__(model, extra, engine_args)
        self.complete([1, 2, 3], 40, False)  # the first steps include late setup

    def facts(self) -> EngineFacts:
        return EngineFacts.of(self._llm)

    def play(self, trace: Trace) -> Account:
        return played(self._llm, trace)[0]


def _block_bytes(model: ModelSpec) -> int:
    """Return the bytes of one block of the pool, which any group of layers may use."""
    by_group: Counter[int] = Counter()
    for layer in model.layers:
        by_group[layer.group] += layer.page_stride_bytes
    return max(by_group.values())


def _publish(llm: Any) -> None:
    """Make a step, which publishes counters. The prompt is too short to be stored."""
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate([{"prompt_token_ids": [1, 2, 3]}], parameters, use_tqdm=False)


def _store(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler.connector._scheduler.store


def steps_alone_cost(model: ModelSpec, step_tokens: int, step_s: float) -> CostModel:
    """Return costs by which every step takes `step_s` seconds, and nothing else takes any time."""
    compute = ComputeCoefficients(step_s, 0.0, 0.0)
    decode = InterferenceCoefficients(step_s, 0.0, 0.0, 0.0, 0.0, 0.0)
    free = TierRates(0.0, dict.fromkeys(model.state_types, 0.0), 0.0)
    return CostModel(
        ComputeRegression(compute),
        LoadModel(model.state_types, dict.fromkeys(Tier, free)),
        step_tokens=step_tokens,
        interference=InterferenceRegression(decode, compute),
    )
