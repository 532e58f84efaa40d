"""A decision in words, and a table of every way with its price and why it lost."""

from __future__ import annotations

import re

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.planner.decision import RestoreDecision
from hetero_connector.planner.explain import explain
from hetero_connector.planner.planner import RestorePlanner
from hetero_connector.planner.pricing import EngineLoad
from tests.planner.chains import (
    CHUNK,
    DENSE,
    HYBRID,
    KV,
    SWA,
    chain_of,
    costs_of,
    in_tier,
    layout_of,
    rates,
)

LOAD = {Tier.DRAM: rates(0.0, 1e-9), Tier.SSD: rates(1e-3, 1e-3)}


def decide(in_dram: int, on_ssd: int, mode: str = "cost", **options: float) -> RestoreDecision:
    tiers = [in_tier(Tier.DRAM, KV)] * in_dram + [in_tier(Tier.SSD, KV)] * on_ssd
    chain = chain_of(tiers)
    planner = RestorePlanner(layout_of(DENSE), costs_of(DENSE, load=LOAD), mode, **options)  # type: ignore[arg-type]
    prompt = len(chain) * CHUNK + 1
    return planner.plan(chain, 0, prompt - 1, prompt, EngineLoad())


def rows(text: str) -> list[list[str]]:
    """The lines of the table, cell by cell."""
    table = text.split("\n\n")[2].splitlines()
    lines = [line.strip() for line in table[2:] if "not shown" not in line]
    cells = (re.split(r"  +", line.removeprefix("* ")) for line in lines)
    return [["*" * line.startswith("*"), *row] for line, row in zip(lines, cells, strict=True)]


def test_the_choice_comes_in_words_first() -> None:
    text = explain(decide(2, 2))
    assert text.startswith(
        "Load 128 of 257 tokens from DRAM (7.812 KiB), compute the last 129: 164 ms to\n"
        "the first token.\nComputing all of them would take 300 ms.\n"
    )


def test_ways_are_sorted_by_their_price_and_say_why_they_lost() -> None:
    decision = decide(2, 2)
    shown = rows(explain(decision))
    assert len(shown) == len(decision.candidates()) == 5
    totals = [float((row[-1] if row[0] == "*" else row[-2]).replace(",", "")) for row in shown]
    assert totals == sorted(totals)
    ways = [(row[0] == "*", row[1], row[2]) for row in shown]
    assert ways == [
        (True, "128", "load dram"),
        (False, "64", "load dram"),
        (False, "0", "recompute"),
        (False, "192", "load dram+ssd"),
        (False, "256", "load dram+ssd"),
    ]
    nothing = decision.candidates()[0].terms
    compute, total = (f"{1e3 * x:,.1f}" for x in (nothing.compute_s, nothing.total_s))
    assert shown[2][3:] == ["0.0", compute, total, "computes 128 more"]
    assert [row[-1] for row in shown[3:]] == ["loads longer"] * 2


def test_a_replay_is_named_and_is_computed_again() -> None:
    chain = chain_of([in_tier(Tier.DRAM, KV, SWA)] * 2)
    planner = RestorePlanner(layout_of(HYBRID), costs_of(HYBRID, load=LOAD), replay_tokens=32)
    text = explain(planner.plan(chain, 0, 128, 129, EngineLoad()))
    by_way = {(row[1], row[2]): row[-1] for row in rows(text)}
    assert by_way["128", "load dram, replay 32"] == "computes 32 again"
    assert by_way["64", "load dram"] == "computes 64 more"
    text = explain(planner.plan(chain_of([in_tier(Tier.DRAM, KV)] * 2), 0, 128, 129, EngineLoad()))
    words = " ".join(text.split())
    assert "compute 32 of them again to rebuild windows, compute the last 1" in words


def test_restoring_nothing_can_be_the_choice() -> None:
    text = explain(decide(3, 0, "never_load"))
    assert text.startswith("Compute all 193 tokens: ")
    assert "\nLoading 192 of them would take " in text
    chosen = [row[0] == "*" for row in rows(text)]
    assert chosen == [False, False, False, True]
    assert {row[-1] for row in rows(text)[:3]} == {"is not what `planner` asks for"}
    assert "Nothing is stored" in explain(decide(0, 0))


def test_stored_tokens_after_which_nothing_can_resume_are_named() -> None:
    planner = RestorePlanner(layout_of(HYBRID), costs_of(HYBRID, load=LOAD))
    text = explain(planner.plan(chain_of([in_tier(Tier.DRAM, KV)] * 2), 0, 128, 129, EngineLoad()))
    words = " ".join(text.split())
    assert "128 tokens of it are stored, but there is no boundary at which it can resume." in words
    assert "Nothing is stored" not in words


def test_what_the_engine_has_itself_is_not_loaded() -> None:
    planner = RestorePlanner(layout_of(DENSE), costs_of(DENSE, load=LOAD))
    chain = chain_of([in_tier(Tier.DRAM, KV)] * 3)
    text = explain(planner.plan(chain, CHUNK, 192, 193, EngineLoad()))
    assert text.startswith("The engine itself has 64 tokens.\nLoad 128 of 193 tokens from DRAM")


def test_a_way_that_misses_the_deadline_says_so() -> None:
    shown = rows(explain(decide(1, 2, deadline_s=1e-6)))
    late = {row[1] for row in shown if row[-1] == "is staged too late"}
    assert late == {"128", "192"}


def test_a_long_table_has_the_cheapest_the_choice_and_computing_everything() -> None:
    decision = decide(100, 100)
    text = explain(decision, max_rows=30)
    shown = rows(text)
    assert shown[0][0] == "*"
    assert shown[-1][2] == "recompute"
    assert len(shown) == 31
    assert "170 more are not shown" in text
    assert len(rows(explain(decision, max_rows=500))) == 201
    nothing = rows(explain(decide(50, 0, "never_load"), max_rows=3))
    assert [row[0] for row in nothing] == ["", "", "", "*"]


def test_lines_fit_a_terminal() -> None:
    chain = chain_of([in_tier(Tier.SSD, KV)] * 256, chunk_tokens=512)
    costs = costs_of(HYBRID, compute=(0.01, 1e-4, 1e-10))
    planner = RestorePlanner(ArtifactLayout(HYBRID, 512), costs, replay_tokens=4096)
    text = explain(planner.plan(chain, 0, 131_071, 131_072, EngineLoad()))
    assert "load ssd, replay 4,096" in text
    assert max(map(len, text.splitlines())) <= 80
