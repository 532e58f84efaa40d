"""`simulate`: replay a trace on a fleet under a policy, and return its figures."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import SimulationError
from hetero_connector.spec.model_spec import ModelSpec
from hetero_connector.spec.state_types import StateType
from hetero_connector.timeline import Timeline
from hetero_connector.units import GIB
from ownership.simulator.figures import (
    Figures,
    Objectives,
    Overhead,
    SimulationResult,
    mean,
    percentile,
)
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.channel import Flow
from ownership.simulator.machine.engine import EngineTotals
from ownership.simulator.machine.token_gaps import TokenGaps
from ownership.simulator.machine.worker import Flows, WorkerSpec, WorkerTotals
from ownership.simulator.policies import PolicySpec
from ownership.simulator.recording import Recording
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.shape import StateShape, dense_paged
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

_Number = TypeVar("_Number", int, float)


def simulate(
    trace: Trace,
    fleet: FleetSpec,
    policy: PolicySpec,
    workload: Workload | None = None,
    *,
    timeline: Timeline | None = None,
    objectives: Objectives | None = None,
) -> SimulationResult:
    """Simulate from the first arrival to the last answer.

    `workload`: how the trace is sent; None: as recorded. `objectives`: what a request has to keep
    to count as goodput; None: the defaults. Everything that the workers do is added to `timeline`,
    about 2 kB a request.

    Raises:
        TraceError: the trace is not what its format says.
        SimulationError: it has no starts and no rate is given, or chunks do not fit its blocks.
    """
    workload = workload or Workload()
    sent = workload.trace(trace)
    model = fleet.model if policy.state == "typed" else dense_paged(fleet.model)
    shape = StateShape.of(model, chunk_tokens_of(trace, fleet, model))
    collecting = gc.isenabled()
    gc.disable()  # only runs of chunks are in reference cycles: all are freed after the simulation
    try:
        run = FleetSimulation(
            fleet, policy, shape, iter(sent), trace.block_tokens, workload.seed,
            recording=None if timeline is None else Recording(timeline), objectives=objectives,
            window=workload.window, population=workload.population,
        )  # fmt: skip
        run.run()
        decisions, specs = run.tally.decision_s, [x.spec for x in run.workers.values()]
        return SimulationResult(
            policy=policy.text,
            workers=len(fleet.workers),
            model=fleet.model_name,
            trace=sent.source,
            caveats=(*sent.caveats, *_guesses(specs, fleet.model_name)),
            seed=workload.seed,
            parameters=workload.parameters(),
            figures=figures_of(run),
            state_bytes=state_bytes_of(shape, run.totals()),
            blocks=run.tally.blocks(),
            overhead=Overhead(len(decisions), 1e6 * percentile(decisions, 50)),
        )
    finally:
        if collecting:
            gc.enable()


def chunk_tokens_of(trace: Trace, fleet: FleetSpec, model: ModelSpec) -> int:
    """Return the fleet's chunk size, or else the least that fits the trace and the model."""
    block, wanted = trace.block_tokens, fleet.chunk_tokens
    if wanted is None:
        return chunk_tokens_for(block, model.alignment)
    if wanted % block:
        problem = f"{wanted} is no multiple of the {block}-token blocks of {trace.source}"
        raise SimulationError(fleet.source, problem, "chunk_tokens")
    return wanted


def _guesses(workers: Sequence[WorkerSpec], model: str) -> Iterator[str]:
    """Yield sentences on what workers' profiles have measured: which model, and which tiers that
    are used they have not. `model`: the fleet's."""
    if measured := dict.fromkeys(x.measured_model for x in workers if x.measured_model):
        yield f"Profiles are of {' and '.join(measured)}; the state that is moved is of {model}."
    readers = {
        Tier.DRAM: [x for x in workers if x.capacity.dram],
        Tier.SSD: [x for x in workers if x.capacity.ssd],
        Tier.PEER: [x for x in workers if x.capacity.dram and len(workers) > 1],
    }
    guessed = [
        tier.value
        for tier, found in readers.items()
        if not all(worker.costs.load.is_measured(tier) for worker in found)
    ]
    if guessed:
        yield f"Profiles have not measured loads from {' and '.join(guessed)}: speeds are guesses."


def figures_of(run: FleetSimulation) -> Figures:
    """Return the figures of a simulation that has run."""
    tally, workers, span_s = run.tally, run.totals(), run.span_s
    answered, attained = len(tally.step_s), int(sum(tally.attained))

    def total(count: Callable[[EngineTotals], _Number]) -> _Number:
        return sum((count(w.engine) for w in workers[1:]), count(workers[0].engine))

    def moved(flow: str) -> int:
        return sum(_flow_bytes(run.shape, getattr(w.flows, flow)) for w in workers)

    decode_s = total(lambda engine: engine.decode_s)
    session_bytes = _ratio(total(lambda e: e.resident_byte_s), total(lambda e: e.resident_s))
    gaps = TokenGaps()
    for worker in workers:
        gaps.merge(worker.engine.gaps)
    hbm, dram, ssd, peer = tally.hits
    waits_s = [_ratio(wait_s, answered) for wait_s in tally.waits_s]
    return Figures(
        requests=answered,
        refused=tally.refused,
        sessions=len(tally.task_s),
        span_s=span_s,
        ttft_mean_s=mean(tally.ttft_s),
        ttft_p50_s=percentile(tally.ttft_s, 50),
        ttft_p95_s=percentile(tally.ttft_s, 95),
        ttft_p99_s=percentile(tally.ttft_s, 99),
        task_mean_s=mean(tally.task_s),
        task_p50_s=percentile(tally.task_s, 50),
        task_p95_s=percentile(tally.task_s, 95),
        task_wait_mean_s=mean(tally.task_wait_s),
        task_wait_p95_s=percentile(tally.task_wait_s, 95),
        task_slowdown_mean=mean(tally.task_slowdown),
        task_slowdown_p99=percentile(tally.task_slowdown, 99),
        step_p50_s=percentile(tally.step_s, 50),
        step_p95_s=percentile(tally.step_s, 95),
        step_p99_s=percentile(tally.step_s, 99),
        token_mean_s=gaps.mean_s,
        token_p50_s=gaps.percentile_s(50),
        token_p99_s=gaps.percentile_s(99),
        attained_share=_ratio(attained, answered + tally.refused),
        goodput_per_s=_ratio(attained, span_s),
        length_unfairness=tally.length_unfairness(),
        hbm_gib_per_session=session_bytes / GIB,
        most_live_sessions=run.sessions.most_live,
        prompt_tokens=tally.prompt_tokens,
        matched_tokens=tally.matched_tokens,
        saved_tokens=hbm + dram + ssd + peer,
        hbm_hit_tokens=hbm,
        dram_hit_tokens=dram,
        ssd_hit_tokens=ssd,
        peer_hit_tokens=peer,
        duplicate_factor=mean(tally.duplicates) or run.duplicate_factor(),
        network_bytes=moved("fetched"),
        ssd_read_bytes=moved("staged"),
        ssd_written_bytes=moved("written"),
        sealed_bytes=moved("sealed"),
        owner_hit_rate=_ratio(tally.owner_hits, tally.owned_turns),
        moved_sessions=tally.moved_sessions,
        decode_late_share=_ratio(total(lambda engine: engine.late_s), decode_s),
        busy_share=_ratio(total(lambda engine: engine.busy_s), span_s * len(workers)),
        queue_mean_s=waits_s[0],
        restore_network_mean_s=waits_s[1],
        restore_ssd_mean_s=waits_s[2],
        restore_exposed_mean_s=_ratio(total(lambda engine: engine.exposed_s), answered),
        preemptions=total(lambda engine: engine.preemptions),
    )


def state_bytes_of(
    shape: StateShape, workers: Sequence[WorkerTotals]
) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes that workers moved, by flow and state type."""
    return {
        name: {
            state_type.value: sum(
                _type_bytes(shape, getattr(worker.flows, name), state_type) for worker in workers
            )
            for state_type in shape.model.state_types
        }
        for name in Flows.__dataclass_fields__
    }


def _flow_bytes(shape: StateShape, flow: Flow) -> int:
    return sum(_type_bytes(shape, flow, kind) for kind in shape.model.state_types)


def _type_bytes(shape: StateShape, flow: Flow, state_type: StateType) -> int:
    is_prefix, artifact_bytes = state_type in shape.prefix_bytes, shape.layout.artifact_bytes
    short = flow.short_chunks if is_prefix else flow.short_checkpoints
    short_bytes = sum(count * artifact_bytes(state_type, *span) for span, count in short.items())
    if is_prefix:
        return flow.chunks * shape.prefix_bytes[state_type] + short_bytes
    return short_bytes + sum(
        count * artifact_bytes(state_type, 0, boundary * shape.chunk_tokens)
        for boundary, count in flow.checkpoints.items()
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
