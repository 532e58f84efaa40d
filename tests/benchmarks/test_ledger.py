"""The benchmark of the ledger compares every view with the exact one."""

from __future__ import annotations

from benchmarks import ledger
from tests.ownership.simulator.small_fleets import agents


def test_every_case_is_compared_with_the_exact_view() -> None:
    trace = agents(4, rate=1.0)
    ratios = ledger.measure({"agents": trace}, (0,), 0.03)
    views = [*ledger.ONE_ROUTER, *ledger.MORE_ROUTERS]
    views += [f"ledger, sessions expected for {seconds:g} s" for seconds in ledger.GUESSES_S]
    assert list(ratios) == [("agents, 2 workers", view) for view in views]
    assert all(0.5 < ratio < 2.0 for values in ratios.values() for ratio in values)
    assert "agents, 2 workers: ledger" in ledger.figures_of(ratios)
    assert all(view in ledger.report(ratios, 1.0, 1) for view in views)


def test_the_ledger_is_timed() -> None:
    decision_us, request_us = ledger.ledger_us(2, 10)
    assert 0.0 < decision_us < request_us
