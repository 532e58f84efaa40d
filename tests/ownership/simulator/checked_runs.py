"""Simulations whose invariants are checked as they run."""

from __future__ import annotations

from collections import Counter

from ownership.scheduling.ledger import Share
from ownership.simulator.figures import Figures
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.worker import Worker
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload


def run_of(trace: Trace, spec: FleetSpec, policy: str = "ownerserve") -> FleetSimulation:
    """Run a simulation and check its invariants after every answer."""
    tokens = spec.chunk_tokens or chunk_tokens_for(trace.block_tokens, spec.model.alignment)
    shape = StateShape.of(spec.model, tokens)

    def check() -> None:
        for worker in run.workers.values():
            for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
                assert 0 <= tier.used_bytes + tier.reserved_bytes <= tier.capacity_bytes

    run = FleetSimulation(
        spec, parse_policy(policy), shape, iter(trace), trace.block_tokens, 0, on_answer=check
    )
    run.run()
    for router in run.routers.routers:
        assert (len(router.ledger), router.ledger.lost_requests) == (0, 0)
        assert all(router.ledger.own(name) == Share() for name in run.workers)
    for worker in run.workers.values():
        check_tiers(worker)
        written, ssd = worker.flows.written, worker.memory.ssd
        chunks = written.chunks + written.short_chunks.total()
        checkpoints = written.checkpoints.total() + written.short_checkpoints.total()
        assert shape.moved_bytes(chunks, checkpoints) == ssd.used_bytes + ssd.evicted_bytes
        _check_one_owner(run)
        engine = worker.engine
        assert (engine.queued_tokens, engine.context_tokens, engine.running_decodes) == (0, 0, 0)
    return run


def check_tiers(worker: Worker) -> None:
    """Check the tiers of a worker without requests."""
    for tier in (worker.memory.hbm, worker.memory.dram, worker.memory.ssd):
        tier.check_integrity()
        assert tier.reserved_bytes == 0, "a request kept pages"
        assert not any(one.pins for one in (tier.root, *tier.runs())), "a pin was left"


def _check_one_owner(run: FleetSimulation) -> None:
    """Check that no chunk is on two SSDs, if nothing was evicted from them."""
    if any(worker.memory.ssd.evicted_bytes for worker in run.workers.values()):
        return
    chunks = Counter(
        one.first + at
        for worker in run.workers.values()
        for one in worker.memory.ssd.runs()
        if not one.is_missing
        for at in range(one.count)
    )
    assert not chunks or max(chunks.values()) == 1


def figures(trace: Trace, spec: FleetSpec, policy: str = "colocated", **sent: float) -> Figures:
    return simulate(trace, spec, parse_policy(policy), Workload(**sent)).figures  # type: ignore[arg-type]
