from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetero_connector.errors import SimulationError
from ownership.scheduling.dynamo import Dynamo
from ownership.scheduling.fleet import Role
from ownership.scheduling.ownerserve import OwnerServe
from ownership.simulator.machine.worker import CachePolicy
from ownership.simulator.policies import TERMS, parse_policy
from ownership.simulator.state.memory import TierBytes
from tests.ownership.simulator.small_fleets import GIB, fleet


def test_a_name_is_a_policy_with_its_defaults() -> None:
    spec = parse_policy("ownerserve")
    assert isinstance(spec.scheduler(random.Random(0)), OwnerServe)
    assert (spec.cache, spec.tiers, spec.state) == (CachePolicy(), "all", "typed")


def test_options_follow_the_name() -> None:
    text = "colocated+checkpoints=periodic:4+eviction=value+restores=never_load"
    spec = parse_policy(f"{text}+tiers=dram+state=paged")
    assert spec.cache == CachePolicy("periodic:4", "value", "never_load")
    assert (spec.tiers, spec.state) == ("dram", "paged")
    assert parse_policy("colocated+answers=kept").answers == "kept"
    cheaper = parse_policy("ownerserve+copies=1").scheduler(random.Random(0))
    assert isinstance(cheaper, OwnerServe)
    assert cheaper.weights == replace(OwnerServe().weights, copy=1.0)

    dynamo = parse_policy("dynamo+prefill_scale=4").scheduler(random.Random(0))
    assert isinstance(dynamo, Dynamo)
    assert dynamo.prefill_scale == 4.0


@pytest.mark.parametrize("zero", ["0", "0.0", "0e3"])
def test_zero_may_be_written_in_any_way(zero: str) -> None:
    assert parse_policy(f"ownerserve+prefix_lag={zero}") == replace(
        parse_policy("ownerserve"), text=f"ownerserve+prefix_lag={zero}"
    )


def test_tiers_are_left_out() -> None:
    workers = fleet(2).workers
    (dram, _), (gpu, _) = (
        parse_policy(f"colocated+tiers={x}").workers(workers) for x in ("dram", "gpu")
    )
    assert (dram.capacity.dram, dram.capacity.ssd) == (workers[0].capacity.dram, 0)
    assert (gpu.capacity.dram, gpu.capacity.ssd) == (0, 0)


def test_prefillers_are_the_first_workers() -> None:
    """The option takes the place of the roles in the fleet's file."""
    workers = fleet(3, roles=(Role.DECODE, Role.BOTH, Role.PREFILL)).workers
    found = parse_policy("conductor+prefillers=1").workers(workers)
    assert [worker.role for worker in found] == [Role.PREFILL, Role.DECODE, Role.DECODE]
    kept = parse_policy("conductor").workers(workers)
    assert [worker.role for worker in kept] == [worker.role for worker in workers]


@pytest.mark.parametrize("name", ["static_pd", "round_robin_pd", "conductor"])
def test_pools_that_a_policy_needs_are_asked_for(name: str) -> None:
    """Without them a policy of two pools would prefill and decode at the same workers."""
    workers = fleet(3).workers
    with pytest.raises(SimulationError, match=r"two roles: set role .* or add \+prefillers=N"):
        parse_policy(name).workers(workers)
    with pytest.raises(SimulationError, match="prefillers: 3 of 3 workers leaves none to decode"):
        parse_policy(f"{name}+prefillers=3").workers(workers)


@pytest.mark.parametrize("name", ["static_pd", "round_robin_pd", "conductor", "dynamo"])
def test_pools_need_dram_to_hand_off_from_and_to(name: str) -> None:
    roles = (Role.PREFILL, Role.DECODE)
    problem = f"policy '{name}.*hands off what is in DRAM: give every worker some"
    with pytest.raises(SimulationError, match=problem):
        parse_policy(f"{name}+tiers=gpu").workers(fleet(2, roles=roles).workers)
    with pytest.raises(SimulationError, match=problem):
        parse_policy(f"{name}+tiers=gpu+prefillers=1").workers(fleet(2).workers)
    without = fleet(2, roles=roles, capacity=TierBytes(GIB)).workers
    with pytest.raises(SimulationError, match=problem):
        parse_policy(name).workers(without)


def test_what_is_stored_is_known_late_only_where_something_is_stored() -> None:
    policy = parse_policy("ownerserve+tiers=gpu+prefix_lag=1")
    with pytest.raises(SimulationError, match="prefix_lag is of what is in DRAM: give every"):
        policy.workers(fleet(2).workers)


def test_dynamo_needs_no_dram_without_pools() -> None:
    assert len(parse_policy("dynamo+tiers=gpu").workers(fleet(2).workers)) == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nobody", "no scheduling policy 'nobody'; there are ownerserve"),
        ("colocated+eviction=fifo", "eviction is 'fifo'; there are leaf_lru"),
        ("colocated+checkpoints=periodic:0", "periodic:N"),
        ("colocated+checkpoints=some", "checkpoints is 'some'"),
        ("colocated+size=3", "no option 'size'; there are checkpoints"),
        ("ownerserve+copies=0", "copies: '0' is no number above 0"),
        ("ownerserve+copies=0.0", "copies: '0.0' is no number above 0"),
        ("ownerserve+copies=1e300", "copies: '1e300' is no number from 0 and below 1e+12"),
        ("ownerserve+copies=nan", "copies: 'nan' is no number"),
        ("ownerserve+copies=1+copies=3", "copies: given twice: give it once"),
        ("ownerserve+prefix_lag=-1", "prefix_lag: '-1' is no number from 0 and below 1e+12"),
        ("colocated+copies=3", "copies: colocated has no such option, only ownerserve has"),
        ("static_pd+prefillers=0", "prefillers: '0' is no whole number above 0"),
        ("ownerserve+prefillers=2", "prefillers: ownerserve has no pools; static_pd"),
        ("dynamo_kv+prefill_scale=2", "prefill_scale: dynamo_kv has no such option, only dynamo"),
        ("colocated+replay=on", "no option 'replay'; there are checkpoints"),
    ],
)
def test_an_error_names_what_is_wrong(text: str, problem: str) -> None:
    with pytest.raises(SimulationError) as raised:
        parse_policy(text)
    assert problem in str(raised.value)
    assert repr(text) in str(raised.value)


def test_ownerserve_without_its_terms() -> None:
    policy = parse_policy("ownerserve+without=stalls+without=moves").scheduler(random.Random(0))
    assert isinstance(policy, OwnerServe)
    assert (policy.weights.stall, policy.weights.copy) == (0.0, OwnerServe().weights.copy)
    assert not policy.moves
    for term, without in TERMS.items():
        assert without(OwnerServe()) != OwnerServe(), term
    with pytest.raises(SimulationError, match="colocated has no such option, only ownerserve"):
        parse_policy("colocated+without=moves")
    with pytest.raises(SimulationError, match="without is 'luck'; there are stalls"):
        parse_policy("ownerserve+without=luck")
