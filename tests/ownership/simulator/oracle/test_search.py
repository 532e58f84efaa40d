"""On few requests: the bound, then the best of all placements, then every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from ownership.scheduling.fleet import Role
from ownership.scheduling.registry import POLICIES
from ownership.scheduling.step_pricing import Route
from ownership.simulator.fleet_file import Failure
from ownership.simulator.oracle.bound import bound
from ownership.simulator.oracle.search import best_placement
from ownership.simulator.policies import parse_policy
from ownership.simulator.results import mean
from ownership.simulator.simulation import FleetSimulation
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.session import Session, Trace
from tests.ownership.simulator.oracle.few_requests import few_requests
from tests.ownership.simulator.small_fleets import costs, fleet, prompt, trace_of

ROLES = (Role.PREFILL, Role.DECODE)
SPEC = fleet(2, roles=ROLES, cost_model=costs(bytes_per_s=20e9))


def mean_ttft_s(run: FleetSimulation) -> float:
    return mean(run.tally.ttft_s)


def simulated(trace: Trace, policy: str) -> float:
    shape = StateShape.of(SPEC.model, 256)
    run = FleetSimulation(SPEC, parse_policy(policy), shape, iter(trace), 256, 0)
    run.run()
    return mean_ttft_s(run)


@settings(max_examples=5, deadline=None)
@given(few_requests())
def test_no_policy_beats_the_best_placement_and_that_not_the_bound(trace: Trace) -> None:
    found = best_placement(trace, SPEC, 256, mean_ttft_s)
    assert found.tried == 8**3
    assert mean(bound(trace, SPEC, 256).ttft_s) <= found.cost + 1e-9
    for policy in POLICIES:
        assert simulated(trace, policy) >= found.cost - 1e-9, policy


def test_two_prompts_at_once_are_best_computed_apart() -> None:
    pair = [Session(n, (prompt(i, 8_192),), 0.0) for n, i in (("a", 0), ("b", 900))]
    found = best_placement(trace_of(*pair), SPEC, 256, mean_ttft_s)
    assert found.routes == (Route(0, 0), Route(1, 1))
    alone = bound(trace_of(*pair), SPEC, 256)
    assert found.cost == pytest.approx(mean(alone.ttft_s))


def test_too_many_are_not_tried() -> None:
    many = [Session(str(i), (prompt(0, 512),), 0.0) for i in range(9)]
    with pytest.raises(ValueError, match="9 requests on 2 workers: 134217728 placements"):
        best_placement(trace_of(*many), SPEC, 256, mean_ttft_s)


def test_a_fleet_with_failures_is_not_searched() -> None:
    dying = replace(SPEC, failures=(Failure("w0", 0.5, 1.0),))
    trace = trace_of(Session("a", (prompt(0, 512),), 0.0))
    with pytest.raises(ValueError, match="1 failures: only fleets without them are searched"):
        best_placement(trace, dying, 256, mean_ttft_s)
