"""Simulations that are looked at as they run, and held against what no policy can beat."""

from __future__ import annotations

from collections import Counter

from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.oracle.result import oracle_result
from ownership.simulator.policies import parse_policy
from ownership.simulator.results import Figures
from ownership.simulator.simulating import simulate
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

LEAST_IS_BEST = [
    "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "step_p50_s", "step_p95_s",
    "step_p99_s", "task_mean_s", "task_p50_s", "task_p95_s", "task_wait_mean_s",
    "task_wait_p95_s",
]  # fmt: skip


def run_of(trace: Trace, spec: FleetSpec, policy: str = "ownerserve") -> FleetSimulation:
    """A simulation whose invariants are looked at after every answer."""
    tokens = spec.chunk_tokens or chunk_tokens_for(trace.block_tokens, spec.model.alignment)
    shape = StateShape.of(spec.model, tokens)

    def check() -> None:
        for worker in run.workers.values():
            for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
                assert 0 <= tier.used_bytes + tier.reserved_bytes <= tier.capacity_bytes

    run = FleetSimulation(
        spec, parse_policy(policy), shape, iter(trace), trace.block_tokens, 0, served=check
    )
    run.run()
    for worker in run.workers.values():
        for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
            tier.check_integrity()
            assert tier.reserved_bytes == 0, "a request kept pages"
            assert not any(one.pins for one in (tier.root, *tier.runs())), "a pin was left"
        written, ssd = worker.flows.written, worker.memory.ssd
        assert shape.moved_bytes(written.slots, written.boundaries) == (
            ssd.used_bytes + ssd.evicted_bytes
        )
        if not spec.failures:
            _check_one_owner(run)
        engine = worker.engine
        assert (engine.queued_tokens, engine.context_tokens, engine.running_decodes) == (0, 0, 0)
    return run


def _check_one_owner(run: FleetSimulation) -> None:
    """While nobody dies no chunk is on two SSDs that was not first let go by one of them."""
    if any(worker.memory.ssd.evicted_bytes for worker in run.workers.values()):
        return
    chunks = Counter(
        one.first + at
        for worker in run.workers.values()
        for one in worker.memory.ssd.runs()
        if not one.gap
        for at in range(one.count)
    )
    assert not chunks or max(chunks.values()) == 1


def figures(trace: Trace, spec: FleetSpec, policy: str = "colocated", **sent: float) -> Figures:
    return simulate(trace, spec, parse_policy(policy), Workload(**sent)).figures  # type: ignore[arg-type]


def check(trace: Trace, spec: FleetSpec, policy: str) -> Figures:
    """That a policy does not beat the oracle in anything."""
    found = simulate(trace, spec, parse_policy(policy)).figures
    keeps = "oracle+answers=kept" if "answers=kept" in policy else "oracle"
    least = oracle_result(keeps, trace, spec, Workload())["figures"]
    assert (found.requests, found.sessions, found.refused) == (
        least["requests"],
        least["sessions"],
        0,
    )
    for name in LEAST_IS_BEST:
        assert getattr(found, name) >= least[name] - 1e-9, name
    assert found.saved_tokens <= least["saved_tokens"]
    return found
