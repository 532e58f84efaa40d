"""Soft roles follow the prefills of the last minute, and are prices only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.planner.compute_model import InterferenceCoefficients
from ownership.scheduling import OwnerServe, PlacementWeights, Step, WorkerLoad
from ownership.scheduling.roles import Leaning, PrefillDemand
from tests.ownership.scheduling.fleets import costs_of, fleet_of, worker


@pytest.mark.parametrize("every_s", [0.1, 1.0, 7.0])
def test_demand_is_the_workers_that_prefills_keep_busy(every_s: float) -> None:
    demand = PrefillDemand()
    now_s = 0.0
    for _ in range(int(300 / every_s)):
        now_s += every_s
        demand.add(1.5 * every_s, now_s)
    assert demand.workers(now_s + every_s / 2) == pytest.approx(1.5, rel=0.1)
    assert demand.workers(now_s + 300) < 0.02


def test_a_burst_at_the_start_is_little_demand() -> None:
    demand = PrefillDemand()
    for _ in range(30):
        demand.add(0.5, 0.0)
    assert demand.workers(0.0) == pytest.approx(0.25)


def test_a_prefill_that_was_not_computed_is_no_demand() -> None:
    demand = PrefillDemand()
    demand.add(30.0, 0.0)
    demand.add(12.0, 50.0)
    demand.take_back(30.0, 0.0, 50.0)
    assert demand.workers(50.0) == pytest.approx(0.2)
    demand.take_back(13.0, 50.0, 70.0)
    assert demand.workers(70.0) == 0.0


def test_demand_survives_a_clock_that_goes_back() -> None:
    demand = PrefillDemand()
    demand.add(1.0, 10.0)
    demand.add(1.0, 9.0)
    assert 0.0 < demand.workers(11.0) <= 2.0
    assert demand.workers(0.0) >= 0.0


@given(st.floats(1, 10), st.integers(2, 9), st.floats(0, 20))
def test_factors_lie_between_1_and_the_strength(strength: float, n: int, demand: float) -> None:
    leaning = Leaning(strength, np.ones(n), demand, np.ones(n))
    for factors in (leaning.decode, leaning.delay):
        assert factors.min() >= 1.0
        assert factors.max() <= strength * 1.000001
    assert leaning.decode * leaning.delay == pytest.approx(strength)
    assert leaning.decode[-1] == 1.0, "one worker is left to decodes"
    assert sorted(leaning.decode, reverse=True) == pytest.approx(list(leaning.decode))


def test_a_worker_leans_by_the_part_that_is_needed_of_it() -> None:
    leaning = Leaning(2.0, np.ones(4), 1.5, np.ones(4))
    assert leaning.decode == pytest.approx([2.0, 2**0.5, 1.0, 1.0])


@pytest.mark.parametrize(
    ("accepting", "expected"),
    [
        ([0.0, 1.0, 0.0, 1.0, 1.0], [1.0, 2.0, 1.0, 2**0.5, 1.0]),
        ([0.0, 1.0, 0.0, 0.0, 1.0], [1.0, 2.0, 1.0, 1.0, 1.0]),
        ([0.0, 0.0, 0.0, 1.0, 0.0], [1.0] * 5),
        ([0.0] * 5, [1.0] * 5),
    ],
)
def test_only_workers_that_accept_requests_lean_to_prefills(
    accepting: list[float], expected: list[float]
) -> None:
    """One of them is left to decodes."""
    leaning = Leaning(2.0, np.ones(5), 1.5, np.array(accepting))
    assert leaning.decode == pytest.approx(expected)


def test_workers_whose_decodes_share_nothing_have_no_roles() -> None:
    leaning = Leaning(3.0, np.array([0.5, 0.0, 1.0, 0.0]), 1.5, np.ones(4))
    assert leaning.decode == pytest.approx([2.0, 1.0, 1.0, 1.0])
    assert leaning.delay == pytest.approx([1.0, 1.0, 3.0, 1.0])


def test_a_decode_shares_the_part_of_a_step_that_further_ones_do_not_lengthen() -> None:
    costs = [
        costs_of(interference=InterferenceCoefficients(step_s, 0.03, 0.0, 0.0, 0.0, 0.0))
        for step_s in (0.01, 0.03)
    ]
    fleet = fleet_of(worker("a", costs=costs[0]), worker("b", costs=costs[1]))
    _, terms = fleet.machines()
    assert terms.shared == pytest.approx([0.25, 0.5])


def test_prefills_gather_at_the_first_workers_and_decodes_elsewhere() -> None:
    """All four are equally busy. Without roles a session is placed where its name comes first."""
    delays = InterferenceCoefficients(0.01, 0.001, 0.0, 0.0, 1e-3, 0.0)
    busy = WorkerLoad(running_requests=4, context_tokens=400)
    costs = costs_of(token_s=1e-3, peer_s=1e-9, interference=delays)
    fleet = fleet_of(*(worker(name, busy, costs) for name in "abcd"))
    step = Step(1_000, output_tokens=400.0)
    alone = OwnerServe(PlacementWeights(copy=0.0, role=1.0)).decide(step, fleet).placement
    assert (alone.prefill_worker, alone.decode_worker) == ("a", "a")
    fleet.prefill_demand = 1.0
    apart = OwnerServe(PlacementWeights(copy=0.0)).decide(step, fleet).placement
    assert (apart.prefill_worker, apart.decode_worker) == ("a", "b")
    fleet.set_load("a", busy._replace(accepting=False))
    without = OwnerServe(PlacementWeights(copy=0.0)).decide(step, fleet).placement
    assert (without.prefill_worker, without.decode_worker) == ("b", "c")


def test_an_unloaded_fleet_has_no_reason_to_move_anything() -> None:
    fleet = fleet_of(*(worker(name) for name in "abcd"))
    fleet.prefill_demand = 0.5
    placement = OwnerServe().decide(Step(1_000, output_tokens=10.0), fleet).placement
    assert placement.prefill_worker == placement.decode_worker


def test_a_strength_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="role is finite and at least 1"):
        PlacementWeights(role=0.5)
