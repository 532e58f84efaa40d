"""The table shows every candidate with its terms, and the choice."""

from __future__ import annotations

from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.explain import explain
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from tests.planner.chains import CHUNK, DENSE, KV, chain_of, costs_of, in_tier, layout_of, rates

LOAD = {Tier.DRAM: rates(0.0, 1e-9), Tier.SSD: rates(1e-3, 1e-3)}


def decide(in_dram: int, on_ssd: int, mode: str = "cost", **options: float) -> RestoreDecision:
    tiers = [in_tier(Tier.DRAM, KV)] * in_dram + [in_tier(Tier.SSD, KV)] * on_ssd
    chain = chain_of(tiers)
    planner = RestorePlanner(layout_of(DENSE), costs_of(DENSE, load=LOAD), mode, **options)  # type: ignore[arg-type]
    prompt = len(chain) * CHUNK + 1
    return planner.plan(chain, 0, prompt - 1, prompt, EngineLoad())


def rows(text: str) -> list[list[str]]:
    """The candidates' lines, cell by cell."""
    lines = text.split("\n\n")[0].splitlines()
    return [line.split() for line in lines[2:] if "not shown" not in line]


def test_every_candidate_has_a_line_and_the_choice_a_mark() -> None:
    decision = decide(2, 2)
    text = explain(decision)
    shown = rows(text)
    assert len(shown) == len(decision.candidates()) == 5
    assert [row[0] == "*" for row in shown] == [False, False, True, False, False]
    assert shown[2][1:5] == ["128", "128", "0.0", "dram"]
    assert shown[3][:7] == ["192", "192", "0.0", "dram", "+", "0.0", "ssd"]
    terms = decision.candidates()[0].terms
    assert shown[0] == ["nothing", "0", "-", "0.0", "0.0", f"{terms.compute_s * 1e3:.1f}", "0.0",
                        "0.0", f"{terms.total_s * 1e3:.1f}"]  # fmt: skip
    assert "choice: restore 2 chunks up to token 128" in text
    assert "actions: LOAD_COMPRESSED_KV, RECOMPUTE_TAIL, DROP_LOW_UTILITY_ARTIFACT" in text


def test_restoring_nothing_can_be_the_choice() -> None:
    text = explain(decide(3, 0, "never_load"))
    assert [row[0] for row in rows(text)] == ["*", "64", "128", "192"]
    assert "choice: restore nothing" in text
    assert "reuse benefit: 0.0 ms" in text


def test_a_candidate_that_misses_the_deadline_is_marked() -> None:
    shown = rows(explain(decide(1, 2, deadline_s=1e-6)))
    assert [row[-2:] == ["too", "slow"] for row in shown] == [False, False, True, True]


def test_a_long_table_is_shortened_around_the_choice() -> None:
    decision = decide(100, 100)
    assert decision.plan is not None
    text = explain(decision, max_rows=30)
    boundaries = [row[1] if row[0] == "*" else row[0] for row in rows(text)]
    for index in range(-3, 4):
        assert str(decision.plan.boundary + index * CHUNK) in boundaries
    assert boundaries[0] == "nothing"
    assert boundaries[-1] == str(200 * CHUNK)
    assert 20 <= len(boundaries) <= 32
    assert f"{201 - len(boundaries)} more candidates are not shown" in text
    assert len(rows(explain(decision, max_rows=500))) == 201
