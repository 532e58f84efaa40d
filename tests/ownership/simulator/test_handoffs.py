"""A handoff costs more than both engines' steps and the bytes that it moves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.planner.compute_model import ComputeCoefficients
from hetero_connector.planner.cost_model import HandoffCost
from ownership.scheduling.fleet import Role
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.policies import parse_policy
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import figures, run_of
from tests.ownership.simulator.small_fleets import (
    COMPUTE,
    DECODE,
    costs,
    fleet,
    prompt,
    trace_of,
)

TRACE = trace_of(Session("a", (prompt(0, 8_192, output=20),), 0.0))
COST = HandoffCost(0.3, 1e-5)
PREFILL_S = COMPUTE.step_s + 8_192 * COMPUTE.token_s + COMPUTE.attention_s * 8_192**2 / 2


def apart(cost: HandoffCost) -> FleetSpec:
    cost_model = costs(bytes_per_s=100e9)
    cost_model.handoff = cost
    roles = (Role.PREFILL, Role.DECODE, Role.DECODE)
    return fleet(3, roles=roles, cost_model=cost_model)


def test_a_handoff_delays_the_first_token_by_its_cost() -> None:
    free, dear = (figures(TRACE, apart(cost), "static_pd") for cost in (HandoffCost(), COST))
    assert dear.ttft_p50_s == pytest.approx(free.ttft_p50_s + 0.3 + 8_192e-5)
    moving_s = pytest.approx(free.restore_network_mean_s)
    assert dear.restore_network_mean_s == moving_s, "nothing moves meanwhile"


def test_a_worker_that_decodes_its_own_prefill_pays_no_handoff() -> None:
    free, dear = (figures(TRACE, apart(cost), "colocated") for cost in (HandoffCost(), COST))
    assert dear == free


BURST = trace_of(*(Session(str(i), (prompt(100 * i, 8_192, output=200),), 0.0) for i in range(12)))


@pytest.mark.parametrize("policy", ["static_pd", "conductor"])
def test_a_burst_is_spread_over_the_decode_pool(policy: str) -> None:
    """All are placed before the first one is handed off."""
    roles = (Role.PREFILL, *[Role.DECODE] * 4)
    run = run_of(BURST, fleet(5, roles=roles), policy)
    decoded = [worker.totals().engine.gaps.count for worker in run.workers.values()]
    assert decoded == [0, *[3 * 199] * 4]


def test_requests_on_a_slow_handoff_are_not_given_up() -> None:
    """No worker reports them meanwhile; `run_of` checks that none is lost."""
    run = run_of(BURST, apart(HandoffCost(10.0)), "static_pd+reports=1")
    assert len(run.tally.ttft_s) == 12


@pytest.mark.parametrize(("tiers", "rest"), [("all", 256), ("gpu", 0)])
def test_no_prompt_is_computed_twice(tiers: str, rest: int) -> None:
    """One worker computes fast and the other decodes fast. Without DRAM nothing can be handed
    off, and with it the decoder computes what is behind the last full chunk."""
    prefiller = costs(bytes_per_s=100e9, decode=DECODE._replace(step_s=1.0))
    decoder = costs(bytes_per_s=100e9, compute=ComputeCoefficients(0.01, 1e-3, 1e-8))
    spec = fleet(2)
    pair = zip(spec.workers, (prefiller, decoder), strict=True)
    spec = replace(spec, workers=tuple(replace(worker, costs=x) for worker, x in pair))
    policy = parse_policy(f"ownerserve+copies=0.01+tiers={tiers}")
    trace = trace_of(Session("a", (prompt(0, 8_192, output=100),), 0.0))
    run = FleetSimulation(spec, policy, StateShape.of(spec.model, 256), iter(trace), 256, 0)
    computed: list[int] = []
    for worker in run.workers.values():
        worker.engine.on_step = lambda step: computed.append(step.prefill_tokens)
    run.run()
    assert sum(computed) == 8_192 + rest
