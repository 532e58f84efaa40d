"""A handoff costs more than both engines' steps and the bytes that it moves."""

from __future__ import annotations

import pytest

from hetero_connector.planner.cost_model import HandoffCost
from ownership.scheduling.fleet import Role
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.traces.session import Session
from tests.ownership.simulator.checked_runs import figures
from tests.ownership.simulator.small_fleets import COMPUTE, costs, fleet, prompt, trace_of

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
