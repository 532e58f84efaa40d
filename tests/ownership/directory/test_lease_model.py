"""Explores the lease protocol completely, and shows that the search finds broken rules."""

import dataclasses

import pytest

from tests.ownership.directory.lease_explorer import explore
from tests.ownership.directory.lease_model import Bounds, Model, Rules, ViolationError

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    ("bounds", "states"),
    [
        pytest.param(Bounds(epochs=2), 5_000, id="two workers that register again"),
        pytest.param(Bounds(lease_ticks=2), 10_000, id="leases out of phase"),
        pytest.param(Bounds(reader=True, renews=False), 1_000, id="a reader"),
    ],
)
def test_no_state_has_two_owners(bounds: Bounds, states: int) -> None:
    assert explore(Model(bounds, Rules()), max_states=400_000) > states


@pytest.mark.slow
@pytest.mark.timeout(1_200)
@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param(Bounds(reader=True), id="a reader"),
        pytest.param(Bounds(late=1, renews=False), id="late messages"),
        pytest.param(Bounds(artifacts=2, renews=False), id="two artifacts"),
        pytest.param(Bounds(workers=3, renews=False), id="three workers"),
    ],
)
def test_no_state_of_a_larger_fleet_has_two_owners(bounds: Bounds) -> None:
    assert explore(Model(bounds, Rules()), max_states=400_000) > 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "bounds", "found"),
    [
        ("ended_stays_ended", Bounds(), "two workers act"),
        ("retired_keeps_its_lease", Bounds(epochs=2, late=1, renews=False), "two workers act"),
        ("release_names_the_token", Bounds(late=1, renews=False), "two workers act"),
        ("stale_claims_are_refused", Bounds(late=1), "a stale epoch changed something"),
        ("tokens_outlive_records", Bounds(reader=True, renews=False), "refused the present owner"),
        ("counts_from_asking", Bounds(), "two workers act"),
        ("waits_for_release", Bounds(late=1, renews=False), "two workers act"),
        ("reader_has_fence", Bounds(reader=True, renews=False), "successor it had seen"),
        ("steady_clock", Bounds(), "two workers act"),
    ],
)
def test_each_rule_is_needed(rule: str, bounds: Bounds, found: str) -> None:
    broken = dataclasses.replace(Rules(), **{rule: False})
    with pytest.raises(ViolationError, match=found):
        explore(Model(bounds, broken), max_states=400_000)


def test_every_rule_is_tried() -> None:
    [tried] = [m for m in test_each_rule_is_needed.pytestmark if m.name == "parametrize"]
    assert {case[0] for case in tried.args[1]} == {f.name for f in dataclasses.fields(Rules)}
