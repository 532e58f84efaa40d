from __future__ import annotations

import random
from dataclasses import replace

import pytest

from hetero_connector.errors import SimulationError
from ownership.scheduling.admission import GatedPolicy
from ownership.scheduling.ownerserve import OwnerServe
from ownership.simulator.machine.worker import CachePolicy
from ownership.simulator.policies import parse_policy
from ownership.simulator.state.memory import TierBytes
from tests.ownership.simulator.small_fleets import fleet


def test_a_name_is_a_policy_with_its_defaults() -> None:
    spec = parse_policy("ownerserve")
    assert isinstance(spec.scheduler(random.Random(0)), OwnerServe)
    assert (spec.cache, spec.tiers, spec.state) == (CachePolicy(), "all", "typed")


def test_options_follow_the_name() -> None:
    text = "colocated+checkpoints=periodic:4+eviction=session+restores=never_load+replay=on"
    spec = parse_policy(f"{text}+tiers=dram+state=paged+ttft=1.5")
    assert spec.cache == CachePolicy("periodic:4", "session", "never_load", True)
    assert (spec.tiers, spec.state, spec.ttft_objective_s) == ("dram", "paged", 1.5)
    assert parse_policy("colocated+answers=kept").answers == "kept"
    assert parse_policy("colocated+replicas=hot").replicas == "hot"
    assert parse_policy("colocated+peers=any").peers == "any"
    assert parse_policy("colocated+ssd_writes=1.5").cache.ssd_bytes_per_day == 3 << 29
    assert parse_policy("colocated+prefetch=on").cache.prefetch
    assert parse_policy("colocated+ssd_writes=all").cache.ssd_bytes_per_day is None
    assert isinstance(spec.scheduler(random.Random(0)), GatedPolicy)
    cheaper = parse_policy("ownerserve+copies=1").scheduler(random.Random(0))
    assert isinstance(cheaper, OwnerServe)
    assert cheaper.weights == replace(OwnerServe().weights, copy=1.0)


def test_tiers_are_left_out() -> None:
    workers = fleet(2).workers
    (dram, _), (gpu, _) = (
        parse_policy(f"colocated+tiers={x}").limited(workers) for x in ("dram", "gpu")
    )
    assert (dram.capacity.dram, dram.capacity.ssd) == (workers[0].capacity.dram, 0)
    assert (gpu.capacity.dram, gpu.capacity.ssd) == (0, 0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nobody", "no scheduling policy 'nobody'; there are ownerserve"),
        ("colocated+eviction=fifo", "eviction is 'fifo'; there are leaf_lru"),
        ("colocated+checkpoints=periodic:0", "periodic:N"),
        ("colocated+checkpoints=some", "checkpoints is 'some'"),
        ("colocated+size=3", "no option 'size'; there are checkpoints"),
        ("ownerserve+copies=0", "copies: '0' is no number above 0"),
        ("colocated+copies=3", "copies: colocated has no price of copies"),
        ("colocated+ttft=-1", "ttft: '-1' is no number"),
        ("colocated+prefetch=auto", "prefetch is 'auto'; there are on, off"),
        ("colocated+ssd_writes=0", "ssd_writes: '0' is no number above 0"),
        ("colocated+ssd_writes=1e300", "ssd_writes: '1e300' is no number above 0 and below"),
        ("colocated+replay", "replay is ''"),
        ("colocated+peers=all", "peers is 'all'; there are named, any"),
        ("colocated+replicas=cold", "replicas is 'cold'; there are none, hot"),
    ],
)
def test_what_is_wrong_is_named(text: str, problem: str) -> None:
    with pytest.raises(SimulationError) as raised:
        parse_policy(text)
    assert problem in str(raised.value)
    assert repr(text) in str(raised.value)


def test_limited_writes_need_dram_before_the_ssd() -> None:
    workers = [replace(w, capacity=TierBytes(1 << 30, 0, 1 << 30)) for w in fleet(1).workers]
    problem = "ssd_writes: worker 'w0' has an SSD and no DRAM"
    with pytest.raises(SimulationError, match=problem):
        parse_policy("colocated+ssd_writes=8").limited(workers)
    assert parse_policy("colocated").limited(workers) == workers
    parse_policy("colocated+ssd_writes=8+tiers=dram").limited(workers)
