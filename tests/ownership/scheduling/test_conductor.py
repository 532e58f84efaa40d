"""Mooncake's Algorithm 1, computed by hand: 1 ms per computed token, 0.1 ms per moved byte."""

from __future__ import annotations

import pytest

from ownership.scheduling import FleetView, PlacementDecision, Role, Step, WorkerLoad, WorkerPrefix
from ownership.scheduling.conductor import Conductor
from tests.ownership.scheduling.fleets import costs_of, fleet_of, worker

DECODERS = (
    worker("d1", WorkerLoad(running_requests=3), role=Role.DECODE),
    worker("d2", WorkerLoad(running_requests=2), role=Role.DECODE),
)


def held(p1: int, p2: int) -> dict[str, WorkerPrefix]:
    return {"p1": WorkerPrefix(0, p1, p1), "p2": WorkerPrefix(0, p2, p2)}


def fleet(queued: int, peer_s: float = 1e-4) -> FleetView:
    return fleet_of(
        worker("p1", WorkerLoad(queued_tokens=queued), costs_of(peer_s=peer_s), Role.PREFILL),
        worker("p2", costs=costs_of(peer_s=peer_s), role=Role.PREFILL),
        *DECODERS,
    )


def decide(step: Step, view: FleetView, **options: float) -> PlacementDecision:
    return Conductor(**options).decide(step, view)


def test_the_longest_prefix_wins_while_its_queue_is_short() -> None:
    """p1: 0.05 queued + 0.1 computed = 0.15; p2 fetches: 0.09 + 0.1 = 0.19. Decoder: d2."""
    placement = decide(Step(1_000, held(900, 0)), fleet(queued=50)).placement
    assert (placement.prefill_worker, placement.source_worker) == ("p1", None)
    assert placement.decode_worker == "d2"


def test_beyond_the_threshold_the_prefix_is_fetched() -> None:
    """p1: 0.5 + 0.1 = 0.6; p2 has 400, 900 > 2 x 400: 0.05 + 0.1 = 0.15, computing 0.6."""
    placement = decide(Step(1_000, held(900, 400)), fleet(queued=500)).placement
    assert (placement.prefill_worker, placement.source_worker) == ("p2", "p1")


def test_within_the_threshold_the_difference_is_computed() -> None:
    """900 <= 2 x 450: p2 computes 550 tokens, 0.55 < 0.6, though fetching were 0.145."""
    placement = decide(Step(1_000, held(900, 450)), fleet(queued=500)).placement
    assert (placement.prefill_worker, placement.source_worker) == ("p2", None)
    tighter = decide(Step(1_000, held(900, 450)), fleet(queued=500), threshold=1.5).placement
    assert tighter.source_worker == "p1"


def test_a_transfer_slower_than_the_prefill_it_saves_is_not_made() -> None:
    """0.01 s a byte: 900 bytes take 9 s; p2 computes 1,000 tokens in 1 s; p1 is done in 2.1 s."""
    placement = decide(Step(1_000, held(900, 0)), fleet(queued=2_000, peer_s=1e-2)).placement
    assert (placement.prefill_worker, placement.source_worker) == ("p2", None)


def test_a_threshold_is_a_ratio() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Conductor(threshold=0.5)
