"""Answers that count under overload, on a stub fleet behind a real router."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks import router_overload
from benchmarks.router_overload import Outcomes


def test_only_answers_that_end_in_the_window_count() -> None:
    outcomes = Outcomes(ended_s=[1.9, 2.0, 3.0, 5.9, 6.0, 7.5])
    assert outcomes.served_per_s(2.0, 6.0) == 0.75


@pytest.mark.long
def test_a_router_under_overload_serves_some_and_refuses_the_others_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(router_overload, "IN_FLIGHT", 2)
    monkeypatch.setattr(router_overload, "SERVICE_S", 0.5)
    monkeypatch.setattr(router_overload, "CAPACITY_PER_S", 8.0)
    figures = asyncio.run(router_overload.measure(3.0))
    assert figures["goodput_of_capacity"] > 0.0
    assert figures["refused_share_10x"] > 0.0
    assert figures["silent"] == figures["hung"] == 0
    assert router_overload.GOALS.keys() <= figures.keys()
