"""Simulations that are compared with the bound that no policy can beat."""

from __future__ import annotations

from benchmarks.research.bound import oracle_result
from ownership.simulator.figures import Figures
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulate import simulate
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

SECONDS = [
    "ttft_mean_s", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "step_p50_s", "step_p95_s",
    "step_p99_s", "task_mean_s", "task_p50_s", "task_p95_s", "task_wait_mean_s",
    "task_wait_p95_s",
]  # fmt: skip


def check(trace: Trace, spec: FleetSpec, policy: str) -> Figures:
    """Simulate, and check that no figure is better than the bound."""
    found = simulate(trace, spec, parse_policy(policy)).figures
    oracle = "oracle+answers=kept" if "answers=kept" in policy else "oracle"
    least = oracle_result(oracle, trace, spec, Workload())["figures"]
    assert (found.requests, found.sessions, found.refused) == (
        least["requests"],
        least["sessions"],
        0,
    )
    for name in SECONDS:
        assert getattr(found, name) >= least[name] - 1e-9, name
    assert found.saved_tokens <= least["saved_tokens"]
    return found
