"""The replicas that are ordered, computed by hand."""

from __future__ import annotations

import pytest

from ownership.scheduling import FleetView, WorkerLoad, WorkerPrefix
from ownership.scheduling.replication import HotPrefix, HotSpotReplicas, NoReplicas
from tests.ownership.scheduling.fleets import costs_of, fleet_of, worker

ALL = WorkerPrefix(0, 1_000, 1_000)


def fleet(peer_s: float = 1e-4) -> FleetView:
    costs = costs_of(peer_s=peer_s)
    return fleet_of(
        worker("a", WorkerLoad(outgoing_bytes=5), costs),
        worker("b", WorkerLoad(queued_tokens=9), costs),
        worker("c", WorkerLoad(queued_tokens=3), costs),
        worker("d", WorkerLoad(accepting=False), costs),
    )


def targets(heat: float, held: dict[str, WorkerPrefix], view: FleetView) -> list[str]:
    orders = HotSpotReplicas(32.0, 3).orders([HotPrefix("repo", heat, 1_000, held)], view)
    return [order.target for order in orders]


@pytest.mark.parametrize(
    ("heat", "expected"),
    [(0.0, []), (32.0, []), (33.0, ["c"]), (65.0, ["c", "b"]), (1e6, ["c", "b"])],
)
def test_the_number_of_copies_follows_the_heat(heat: float, expected: list[str]) -> None:
    """33 uses want 2 copies, 65 want 3, which is the most; c has the shorter queue, d drains."""
    assert targets(heat, {"a": ALL}, fleet()) == expected


def test_present_copies_count() -> None:
    assert targets(65.0, {"a": ALL, "c": ALL}, fleet()) == ["b"]
    assert targets(65.0, {"a": ALL, "c": WorkerPrefix(0, 500)}, fleet()) == ["c", "b"]


def test_the_holder_with_the_least_to_send_is_the_source() -> None:
    policy = HotSpotReplicas(1.0, 3)
    (order,) = policy.orders([HotPrefix("repo", 9.0, 1_000, {"a": ALL, "b": ALL})], fleet())
    assert (order.source, order.target, order.ttl_s) == ("b", "c", 600.0)


def test_a_prefix_that_is_faster_computed_is_not_replicated() -> None:
    """1 ms a token computed, 2 ms a byte read."""
    assert targets(1e6, {"a": ALL}, fleet(peer_s=2e-3)) == []


def test_a_prefix_that_no_worker_has_gets_no_replica() -> None:
    assert targets(1e6, {"gone": ALL}, fleet()) == []


def test_the_hottest_comes_first() -> None:
    hot = [HotPrefix(name, heat, 1_000, {"a": ALL}) for name, heat in (("x", 33), ("y", 50))]
    assert [order.prefix for order in HotSpotReplicas().orders(hot, fleet())] == ["y", "x"]


def test_no_replicas_orders_none() -> None:
    assert NoReplicas().orders([HotPrefix("repo", 1e6, 1_000, {"a": ALL})], fleet()) == []


def test_figures_are_above_0() -> None:
    with pytest.raises(ValueError, match="heat_per_copy"):
        HotSpotReplicas(heat_per_copy=0.0)
