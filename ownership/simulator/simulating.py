"""`simulate`: from a trace, a fleet and a policy to figures."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import asdict

from hetero_connector.errors import SimulationError
from hetero_connector.spec.model_spec import ModelSpec
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.measuring import figures_of, overhead_of, state_bytes_of
from ownership.simulator.policies import PolicySpec
from ownership.simulator.results import SimulationResult
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.chunks import chunk_tokens_for
from ownership.simulator.state.shape import StateShape, dense_paged
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload


def simulate(
    trace: Trace,
    fleet: FleetSpec,
    policy: PolicySpec,
    workload: Workload | None = None,
    *,
    served: Callable[[], None] | None = None,
    timer: Callable[[], float] = time.perf_counter,
) -> SimulationResult:
    """Replay a trace against a fleet under a policy, from the first arrival to the last answer.

    `workload`: how the trace is sent; None: as recorded. `served` is told of every answer.
    `timer` measures what decisions take; the figures do not depend on it.

    Raises:
        TraceError: the trace is not what its format says.
        SimulationError: it records no starts and no rate is given, or chunks do not fit its blocks.
    """
    workload = workload or Workload()
    sent = workload.trace(trace)
    model = fleet.model if policy.state == "typed" else dense_paged(fleet.model)
    shape = StateShape.of(model, chunk_tokens_of(trace, fleet, model))
    begun = timer()
    run = FleetSimulation(
        fleet, policy, shape, iter(sent), trace.block_tokens, workload.seed, timer, served
    )
    collecting = gc.isenabled()
    gc.disable()  # nothing here is thrown away in cycles but runs of chunks, which are few
    try:
        run.run()
    finally:
        if collecting:
            gc.enable()
    return SimulationResult(
        policy=policy.text,
        workers=len(fleet.workers),
        model=fleet.model_name,
        trace=sent.source,
        caveats=sent.caveats,
        seed=workload.seed,
        parameters={k: v for k, v in asdict(workload).items() if v is not None and k != "seed"},
        figures=figures_of(run),
        state_bytes=state_bytes_of(run),
        overhead=overhead_of(run, timer() - begun),
    )


def chunk_tokens_of(trace: Trace, fleet: FleetSpec, model: ModelSpec) -> int:
    """Of the fleet's file, else the least that the trace's blocks and the model share."""
    block, wanted = trace.block_tokens, fleet.chunk_tokens
    if wanted is None:
        return chunk_tokens_for(block, model.alignment)
    if wanted % block:
        problem = f"{wanted} is no multiple of the {block}-token blocks of {trace.source}"
        raise SimulationError(fleet.source, problem, "chunk_tokens")
    return wanted
