"""Costs of workers that are alike."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.compute_model import ComputeCoefficients, InterferenceCoefficients
from hetero_connector.planner.load_model import TierRates
from hetero_connector.planner.profile import CostProfile, FitError, ProfileSubject
from hetero_connector.spec import StateType
from ownership.router.alike import pooled
from ownership.scheduling import FleetView, OwnerServe, Step, WorkerPrefix, WorkerView
from ownership.scheduling.footprint import StateFootprint
from tests.planner.chains import DENSE

SUBJECT = ProfileSubject("A", "c", "float32", "", "auto", 1, "cpu")
DEFAULT = CostProfile("m", SUBJECT, ComputeCoefficients(0.005, 1e-4, 1e-9))
"""The costs that an engine tells before its first step."""


def measured(step_s: float, samples: int) -> CostProfile:
    fit = FitError(samples, 0.1, 0.2)
    delays = InterferenceCoefficients(step_s, 1e-4, 1e-9, 1e-4, 1e-4, 1e-9)
    compute = ComputeCoefficients(step_s, 1e-4, 1e-9)
    return CostProfile("m", SUBJECT, compute, fit, interference=delays, interference_error=fit)


def test_a_worker_that_has_measured_nothing_costs_what_others_have_measured() -> None:
    found = pooled({"busy": measured(0.010, 6), "new": DEFAULT})
    assert found["busy"].compute == pytest.approx((0.010, 1e-4, 1e-9))
    assert found["new"].compute == pytest.approx(found["busy"].compute)
    assert found["new"].interference == pytest.approx(found["busy"].interference)


def test_many_samples_outweigh_few_and_are_kept() -> None:
    found = pooled({"a": measured(0.010, 6_400), "b": measured(0.020, 64), "c": DEFAULT})
    mean = (0.010 * 6_400 + 0.020 * 64) / 6_464
    assert found["a"].compute.step_s == pytest.approx(0.010, rel=1e-2)
    assert found["b"].compute.step_s == pytest.approx((0.020 + mean) / 2)
    assert found["c"].compute.step_s == pytest.approx(mean)


def test_workers_of_another_kind_are_left_alone() -> None:
    other = replace(DEFAULT, subject=replace(SUBJECT, machine="gpu"))
    found = pooled({"a": measured(0.010, 1_000), "b": other})
    assert found["b"] == other


def test_what_nobody_has_measured_stays() -> None:
    assert pooled({"a": DEFAULT, "b": DEFAULT}) == {"a": DEFAULT, "b": DEFAULT}


def test_each_tier_is_a_part_of_its_own() -> None:
    rates = TierRates(0.002, {StateType.DENSE_KV: 1e-9}, 1e-10, 0.001)
    reader = replace(
        DEFAULT, load={Tier.PEER: rates}, load_errors={Tier.PEER: FitError(10, 0.1, 0.2)}
    )
    found = pooled({"reader": reader, "busy": measured(0.010, 6)})
    assert found["busy"].load.keys() == {Tier.PEER}
    assert found["busy"].load[Tier.PEER].latency_s == pytest.approx(0.002)
    per_byte = found["busy"].load[Tier.PEER].seconds_per_byte
    assert per_byte == pytest.approx({StateType.DENSE_KV: 1e-9})
    assert found["reader"].compute.step_s == pytest.approx(0.010)


def test_a_conversation_stays_with_the_only_worker_that_has_computed() -> None:
    """Measured while the machine was busy, its steps look twice as long as another's defaults."""
    footprint = StateFootprint({StateType.DENSE_KV: 1e3}, {}, 1e3, 4)
    told = {"a": DEFAULT, "b": measured(0.020, 6)}
    step = Step(3_000, {"b": WorkerPrefix(0, 2_816, 2_816)}, "s", None, 0, 256.0)

    def placed(profiles: dict[str, CostProfile]) -> str:
        views = [
            WorkerView(name, costs.cost_model(DENSE.state_types), 1 << 40)
            for name, costs in profiles.items()
        ]
        return OwnerServe().decide(step, FleetView(footprint, views)).placement.decode_worker

    assert placed(told) == "a"
    assert placed(pooled(told)) == "b"
