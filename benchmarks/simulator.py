"""`python -m benchmarks.simulator --mooncake FILE --sessions FILE [--json]`: the simulator's speed.

- `mooncake_requests_per_s`: requests of the Mooncake file simulated per CPU second on one core,
  with chunks of 512 tokens, four H200 workers and all three tiers, reading included.
- `agent_file_s`: CPU seconds for all coding-agent sessions on four workers of a DeepSeek-V4-type
  model, under `ownerserve`.
- `growth_ratio`: the time of a request in a trace of ten times as many synthetic sessions, over the
  shorter one.
- `peak_gib`: the largest memory of all of it.
- `simulator_decision_us_64`: median of a decision over 64 workers while sessions are simulated.

Figures of a file that is not given are left out, and then no results are written.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.goals import goal_table
from benchmarks.measure import machine_line, publish, rounded
from benchmarks.synthetic_sessions import CODING_AGENT, synthetic
from hetero_connector.spec.presets import PRESETS
from hetero_connector.units import GIB
from ownership.scheduling.fleet import Role
from ownership.simulator.figures import SimulationResult
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.machine.costs import (
    COMPUTE,
    H200,
    derived_costs,
    page_bytes_of,
    roofline_of,
)
from ownership.simulator.machine.engine import EngineLimits
from ownership.simulator.machine.worker import WorkerSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.state.memory import TierBytes
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

DENSE, HYBRID = "llama-3.1-8b", "deepseek-v4-flash"
_STEP_TOKENS = 8192
_GROWTH_ROUNDS = 3


def fleet_of(model_name: str, count: int, gpus: int) -> FleetSpec:
    """Return H200 workers with a quarter of a TiB of DRAM and two TiB of SSD."""
    model, compute = PRESETS[model_name](tp_size=gpus), COMPUTE[model_name]
    roofline = roofline_of(H200, gpus, model, compute)
    costs = derived_costs(H200, gpus, model, roofline, _STEP_TOKENS)
    capacity = TierBytes(page_bytes_of(H200, gpus, compute), 256 * GIB, 2048 * GIB)
    workers = [WorkerSpec(f"w{i:02}", costs, capacity, Role.BOTH, roofline) for i in range(count)]
    limits = EngineLimits(_STEP_TOKENS, 256)
    return FleetSpec("benchmark", model_name, model, tuple(workers), limits, {})


def timed(
    trace: Trace, fleet: FleetSpec, policy: str, sent: Workload
) -> tuple[float, SimulationResult]:
    """Return the CPU seconds of a simulation, and its result."""
    gc.collect()
    begun = time.process_time()
    result = simulate(trace, fleet, parse_policy(policy), sent)
    return time.process_time() - begun, result


def mooncake(path: Path, rounds: int) -> dict[str, float]:
    """Measure requests per second, best of some rounds: other processes only slow it down."""
    fleet, sent = fleet_of(DENSE, 4, 1), Workload()
    runs = [timed(open_trace(path), fleet, "colocated", sent) for _ in range(rounds)]
    requests = runs[0][1].figures.requests
    seconds = [s for s, _ in runs]
    return {
        "mooncake_requests_per_s": requests / min(seconds),
        "mooncake_requests_per_s_median": requests / statistics.median(seconds),
    }


def agents(path: Path) -> dict[str, float]:
    """Simulate the whole file."""
    trace = open_trace(path)
    seconds, result = timed(trace, fleet_of(HYBRID, 4, 2), "ownerserve", Workload(rate=0.1))
    return {"agent_file_s": seconds, "agent_requests": result.figures.requests}


def decisions(sessions: int) -> dict[str, float]:
    """Measure decisions over 64 workers while they serve."""
    trace = _synthetic(sessions, rate=4.0)
    _, result = timed(trace, fleet_of(HYBRID, 64, 2), "ownerserve", Workload())
    return {"simulator_decision_us_64": result.overhead.decision_p50_us}


def growth(sessions: int) -> dict[str, float]:
    """Measure the time of a request as the trace grows, at the same rate; best of some rounds."""
    fleet = fleet_of(HYBRID, 2, 2)
    us = []
    for number in (sessions, 10 * sessions):
        trace = _synthetic(number, 0.05)
        rounds = [timed(trace, fleet, "colocated", Workload()) for _ in range(_GROWTH_ROUNDS)]
        us.append(min(1e6 * seconds / result.figures.requests for seconds, result in rounds))
    return {"us_per_request_x1": us[0], "us_per_request_x10": us[1], "growth_ratio": us[1] / us[0]}


def _synthetic(sessions: int, rate: float) -> Trace:
    """Make sessions, drawn before the timing."""
    trace = synthetic(CODING_AGENT, sessions=sessions, rate=rate, block_tokens=64, seed=0)
    drawn = list(trace)
    return replace(trace, sessions=lambda: iter(drawn))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulator")
    parser.add_argument("--mooncake", type=Path, help="Mooncake's conversation trace")
    parser.add_argument("--sessions", type=Path, help="the coding-agent sessions")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--quick", action="store_true", help="less of all")
    arguments = parser.parse_args(argv)
    figures: dict[str, float] = {}
    if arguments.mooncake:
        figures |= mooncake(arguments.mooncake, 1 if arguments.quick else 5)
    if arguments.sessions:
        figures |= agents(arguments.sessions)
    figures |= decisions(4 if arguments.quick else 16) | growth(2 if arguments.quick else 40)
    figures["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
    figures = rounded(figures)
    text = f"{machine_line()}\n\n{goal_table('simulator', figures)}"
    complete = arguments.mooncake and arguments.sessions and not arguments.quick
    publish("simulator", text, figures, {}, as_json=arguments.json, write=bool(complete))


if __name__ == "__main__":
    main()
