"""The choices of the simple policies, computed by hand."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.errors import NoWorkerError
from ownership.scheduling import (
    POLICIES,
    FleetView,
    PlacementAction,
    Role,
    Step,
    WorkerLoad,
    WorkerPrefix,
    WorkerView,
    scheduling_policy,
)
from ownership.scheduling.baselines import Colocated, PrefixAware, RoundRobinPd, StaticPd
from ownership.scheduling.policy import SchedulingPolicy
from tests.ownership.scheduling.fleets import BYTE_A_TOKEN, fleet_of, steps, worker, workers

MAKERS = list(POLICIES.values())


def where(policy: SchedulingPolicy, step: Step, fleet: FleetView) -> tuple[str, str]:
    placement = policy.decide(step, fleet).placement
    return placement.prefill_worker, placement.decode_worker


@pytest.mark.parametrize("maker", MAKERS, ids=list(POLICIES))
@given(found=workers(), step=steps())
def test_every_policy_names_one_decode_worker_that_accepts(
    maker: Callable[[random.Random], SchedulingPolicy], found: list[WorkerView], step: Step
) -> None:
    decision = maker(random.Random(1)).decide(step, FleetView(BYTE_A_TOKEN, found))
    accepting = {x.name for x in found if x.load.accepting}
    assert {decision.placement.decode_worker, decision.placement.prefill_worker} <= accepting


@pytest.mark.parametrize("maker", MAKERS, ids=list(POLICIES))
@given(found=workers(), asked=st.lists(steps(), max_size=4), rng=st.randoms(use_true_random=False))
def test_every_policy_answers_the_same_again_and_for_any_order(
    maker: Callable[[random.Random], SchedulingPolicy],
    found: list[WorkerView],
    asked: list[Step],
    rng: random.Random,
) -> None:
    one, other = maker(random.Random(7)), maker(random.Random(7))
    shuffled = list(found)
    rng.shuffle(shuffled)
    fleets = FleetView(BYTE_A_TOKEN, found), FleetView(BYTE_A_TOKEN, shuffled)
    for step in asked:
        assert one.decide(step, fleets[0]).placement == other.decide(step, fleets[1]).placement


@pytest.mark.parametrize("maker", MAKERS, ids=list(POLICIES))
def test_every_policy_raises_when_no_worker_accepts(
    maker: Callable[[random.Random], SchedulingPolicy],
) -> None:
    fleet = fleet_of(*(worker(x, WorkerLoad(accepting=False)) for x in "ab"))
    with pytest.raises(NoWorkerError):
        maker(random.Random(1)).decide(Step(10), fleet)


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_made_by_name(name: str) -> None:
    assert scheduling_policy(name, random.Random(1)).name == name


def test_an_unknown_name_raises_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no scheduling policy 'fifo'; there are ownerserve"):
        scheduling_policy("fifo", random.Random(1))


def test_colocated_takes_the_sessions_worker_or_the_least_loaded() -> None:
    """4 waiting + running: a 4 x 1 + 3 = 7, b 4 x 0 + 6 = 6."""
    fleet = fleet_of(
        worker("a", WorkerLoad(waiting_requests=1, running_requests=3)),
        worker("b", WorkerLoad(running_requests=6)),
    )
    assert where(Colocated(), Step(10), fleet) == ("b", "b")
    assert where(Colocated(), Step(10, owner="a"), fleet) == ("a", "a")


def pools() -> FleetView:
    return fleet_of(
        worker("p1", WorkerLoad(queued_tokens=500), role=Role.PREFILL),
        worker("p2", WorkerLoad(queued_tokens=400), role=Role.PREFILL),
        worker("d1", WorkerLoad(running_requests=5), role=Role.DECODE),
        worker("d2", WorkerLoad(running_requests=4), role=Role.DECODE),
        worker("both"),
    )


def test_static_pd_takes_the_least_loaded_of_each_pool() -> None:
    """p2 has fewer tokens queued, d2 fewer decodes; a session's decoder is kept."""
    fleet = pools()
    decision = StaticPd().decide(Step(10), fleet)
    assert decision.placement.action is PlacementAction.REMOTE_PREFILL
    assert where(StaticPd(), Step(10), fleet) == ("p2", "d2")
    assert where(StaticPd(), Step(10, owner="d1"), fleet) == ("p2", "d1")
    assert where(StaticPd(), Step(10, owner="p1"), fleet) == ("p2", "d2")


def test_round_robin_pd_takes_the_workers_of_each_pool_in_turn() -> None:
    """Each pool in turn, by name, whatever the load."""
    policy, fleet = RoundRobinPd(), pools()
    taken = [where(policy, Step(10), fleet) for _ in range(3)]
    assert taken == [("p1", "d1"), ("p2", "d2"), ("p1", "d1")]


@given(found=workers(), asked=st.lists(steps(), min_size=1, max_size=9))
def test_round_robin_pd_prefills_at_another_worker_than_it_decodes(
    found: list[WorkerView], asked: list[Step]
) -> None:
    """It decodes where it prefills if, and only if, the prefill pool has no other that accepts."""
    policy, fleet = RoundRobinPd(), FleetView(BYTE_A_TOKEN, found)
    names = [fleet.names[i] for i in fleet.prefill_pool]
    accepting = {x.name for x in found if x.load.accepting}
    for step in asked:
        prefill, decode = where(policy, step, fleet)
        assert (prefill == decode) == (accepting & set(names) <= {decode})


@pytest.mark.parametrize("policy", [StaticPd(), RoundRobinPd()], ids=lambda policy: policy.name)
def test_a_decoder_computes_prompts_while_no_prefill_worker_accepts(
    policy: SchedulingPolicy,
) -> None:
    """The idle decoder d2 computes no prompt for d1, which has the session."""
    fleet = fleet_of(
        worker("p", WorkerLoad(accepting=False), role=Role.PREFILL),
        worker("d1", WorkerLoad(queued_tokens=500), role=Role.DECODE),
        worker("d2", role=Role.DECODE),
    )
    for _ in range(2):
        prefill, decode = where(policy, Step(10, owner="d1"), fleet)
        assert prefill == decode


def test_prefix_aware_takes_a_long_prefix_while_loads_are_balanced() -> None:
    """400 of 1,000 tokens match at b, over 0.3: b, though a is idle. 300 do not decide."""
    fleet = fleet_of(worker("a"), worker("b", WorkerLoad(running_requests=64)))
    policy = PrefixAware()
    assert where(policy, Step(1_000, {"b": WorkerPrefix(400)}), fleet) == ("b", "b")
    assert where(policy, Step(1_000, {"b": WorkerPrefix(300)}), fleet) == ("a", "a")


def test_prefix_aware_takes_the_least_loaded_when_loads_differ() -> None:
    """65 - 0 > 64 and 65 > 1.5 x 0: unbalanced, so the least loaded."""
    fleet = fleet_of(worker("a"), worker("b", WorkerLoad(running_requests=65)))
    assert where(PrefixAware(), Step(1_000, {"b": WorkerPrefix(900)}), fleet) == ("a", "a")


def test_prefix_aware_takes_the_least_loaded_of_several_owners() -> None:
    fleet = fleet_of(worker("a", WorkerLoad(running_requests=2)), worker("b"), worker("c"))
    held = {"a": WorkerPrefix(900), "b": WorkerPrefix(0, 900)}
    assert where(PrefixAware(), Step(1_000, held), fleet) == ("b", "b")
