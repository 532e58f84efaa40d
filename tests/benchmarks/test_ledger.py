"""The benchmark of the ledger compares every view with the exact one."""

from __future__ import annotations

from benchmarks import ledger
from tests.ownership.simulator.small_fleets import agents

VIEWS = [
    *ledger.ONE_ROUTER,
    *ledger.MORE_ROUTERS,
    *ledger.PREFIXES,
    *(f"ledger, sessions expected for {seconds:g} s" for seconds in ledger.GUESSES_S),
]


def test_every_view_is_compared_with_the_exact_one() -> None:
    (case,) = (case for case in ledger.CASES if case.name == "agents, 2 workers")
    found = dict(ledger.simulated(case, agents(4, rate=1.0), 0, 0.08))
    assert list(found) == VIEWS
    assert all(0.5 < ratio < 2.0 for ratio in found.values())


def test_the_report_has_every_view() -> None:
    ratios = {("chat", view): [1.0, 1.2, 1.1] for view in VIEWS}
    assert ledger.figures_of(ratios)["chat: ledger"] == 1.1
    text = ledger.report(ratios, 3)
    assert all(view in text for view in VIEWS)
    assert "1.100 (1.000 to 1.200)" in text
