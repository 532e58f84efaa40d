"""The bound as a sweep's result: a row beside the policies'."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from hetero_connector.errors import SimulationError
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.oracle.bound import bound
from ownership.simulator.simulating import chunk_tokens_of
from ownership.simulator.traces.session import Trace
from ownership.simulator.workload import Workload

ORACLES = {"oracle": False, "oracle+answers=kept": True}
"""As a comparison names it; whether it may reuse decoded tokens."""


def is_oracle(policy: str) -> bool:
    """Whether a comparison's policy is a bound. Raises SimulationError for half of one."""
    if policy not in ORACLES and policy.partition("+")[0] == "oracle":
        problem = f"there are {', '.join(ORACLES)}"
        raise SimulationError(f"policy {policy!r}", problem)
    return policy in ORACLES


def oracle_result(
    policy: str, trace: Trace, fleet: FleetSpec, workload: Workload
) -> dict[str, Any]:
    """What `SimulationResult.as_json` says, as far as there is a bound; raises what it raises."""
    sent = workload.trace(trace)
    chunk_tokens = chunk_tokens_of(trace, fleet, fleet.model)
    found = bound(sent, fleet, chunk_tokens, keep_answers=ORACLES[policy])
    return {
        "policy": policy,
        "workers": len(fleet.workers),
        "model": fleet.model_name,
        "trace": sent.source,
        "caveats": sent.caveats,
        "seed": workload.seed,
        "parameters": {k: v for k, v in asdict(workload).items() if v is not None and k != "seed"},
        "figures": found.figures(),
    }
