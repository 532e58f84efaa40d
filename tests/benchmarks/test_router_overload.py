"""Answers that count under overload, on a stub fleet behind a real router."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from benchmarks import router_overload
from benchmarks.goals import GOALS
from benchmarks.router_overload import Outcomes, loads


def test_only_answers_that_end_in_the_window_count() -> None:
    outcomes = Outcomes(ended_s=[1.9, 2.0, 3.0, 5.9, 6.0, 7.5])
    assert outcomes.served_per_s(2.0, 6.0) == 0.75


def test_only_answers_that_say_so_are_refusals() -> None:
    outcomes = Outcomes(counts=Counter(served=1, refused=6, silent=2, hung=1))
    assert outcomes.refused_share == 0.6


def test_a_load_does_not_wait_for_the_answers_to_the_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No answer comes before the first request of the last load."""
    sent: list[Outcomes] = []

    async def measured() -> list[Outcomes]:
        may_end = asyncio.Event()

        async def send(session: Any, url: str, outcomes: Outcomes) -> None:
            sent.append(outcomes)
            if len(sent) == 2 + 4 + 1:
                may_end.set()
            await may_end.wait()
            outcomes.counts["served"] += 1

        monkeypatch.setattr(router_overload, "send", send)
        session: Any = None
        async with asyncio.timeout(60):
            return await loads(session, "", (20.0, 40.0, 20.0), 0.1)

    found = asyncio.run(measured())
    assert [x.counts["served"] for x in found] == [2, 4, 2]
    assert found[0].begun_s < found[1].begun_s < found[2].begun_s


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
    assert GOALS["router_overload"].keys() <= figures.keys()
