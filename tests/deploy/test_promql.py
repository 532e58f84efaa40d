"""The dashboard, the alerts and the queries of the documents name metrics that exist."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import yaml

from hetero_connector.metrics import METRICS
from ownership.router.metrics import RouterMetrics
from scripts.make_dashboard import DASHBOARDS, Dashboard
from tests.deploy.promql import check, uses

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
RULES: list[dict[str, Any]] = [rule for group in ALERTS["groups"] for rule in group["rules"]]


def documented() -> list[str]:
    """Return every query of the documents."""
    blocks = (
        re.findall(r"^ *```promql\n(.*?)^ *```$", page.read_text(), re.DOTALL | re.MULTILINE)
        for page in sorted(DOCS.rglob("*.md"))
    )
    lines = (line for found in blocks for block in found for line in block.splitlines())
    return [line.strip() for line in lines if line.partition("#")[0].strip()]


QUERIES = {board.name: board.queries() for board in DASHBOARDS}


@pytest.mark.parametrize("query", [*chain(*QUERIES.values())])
def test_each_query_of_the_dashboards_names_what_exists(query: str) -> None:
    check(query)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_each_alert_names_what_exists(rule: dict[str, Any]) -> None:
    check(rule["expr"])


@pytest.mark.parametrize("query", documented())
def test_each_query_of_the_documents_names_what_exists(query: str) -> None:
    check(query)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("rate(heterocache_hits[5m])", "wrong suffix"),
        ("heterocache_bytes_total", "wrong suffix"),
        ("heterocache_hit_total", "no metric"),
        ('heterocache_bytes{tiers="dram"}', "no labels"),
        ("sum by (choice) (rate(heterocache_failures_total[5m]))", "no labels"),
        ("histogram_quantile(0.5, sum by (le) (heterocache_load_seconds_sum))", "no labels"),
        ("rate(vllm:no_such_thing_total[5m])", "no metric"),
    ],
)
def test_the_check_finds_each_kind_of_mistake(query: str, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check(query)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_a_dashboards_file_is_what_the_script_writes(board: Dashboard) -> None:
    written = json.loads(board.path.read_text())
    assert written == board.as_json(), "run: .venv/bin/python -m scripts.make_dashboard"


def test_every_metric_is_on_a_dashboard() -> None:
    shown = {
        name: {use.metric for query in queries for use in uses(query)}
        for name, queries in QUERIES.items()
    }
    assert METRICS.keys() - shown["heterocache"] == set()
    of_router = {metric.name for metric in RouterMetrics().registry.collect()}
    assert of_router == shown["heterocache-router"]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_what_is_counted_per_second_says_so(board: Dashboard) -> None:
    is_rate = re.compile(r"sum( by \([^()]*\))? \(rate\([^()]*\)\)").fullmatch
    for panel in board.as_json()["panels"]:
        if panel["type"] != "row":
            rates = [is_rate(target["expr"]) is not None for target in panel["targets"]]
            unit = panel["fieldConfig"]["defaults"]["unit"]
            assert (unit in ("cps", "Bps")) == all(rates), panel["title"]


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_panels_do_not_overlap_and_have_a_description(board: Dashboard) -> None:
    taken = set[tuple[int, int]]()
    for panel in board.as_json()["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
        assert panel["type"] == "row" or panel["description"]


def test_each_alert_has_an_entry_in_the_runbook_and_a_unit_test() -> None:
    titles = re.findall(r"^## (\w+)$", (DOCS / "guides/runbook.md").read_text(), re.MULTILINE)
    assert titles == [rule["alert"] for rule in RULES]
    for rule in RULES:
        annotations = rule["annotations"]
        assert annotations.keys() == {"summary", "description", "runbook"}
        assert annotations["runbook"] == f"docs/guides/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
    tests = yaml.safe_load((Path(__file__).parent / "alerts.test.yaml").read_text())["tests"]
    tested = {x["alertname"] for test in tests for x in test["alert_rule_test"] if x["exp_alerts"]}
    assert tested == set(titles)
