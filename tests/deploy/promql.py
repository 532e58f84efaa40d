"""Read PromQL, and hold it against the metrics that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import promql_parser as promql
import vllm

from hetero_connector.metrics import GAUGES, HISTOGRAMS, METRICS, METRICS_BY_KIND, NATIVE_NAMES
from ownership.router.metrics import RouterMetrics

OF_VLLM = {"model_name", "engine"}
OF_PROMETHEUS = {"instance", "job"}
THEIR_LABELS = {
    "vllm:prompt_tokens_by_source": {"source"},
    "vllm:prompt_tokens_cached_by_source": {"source"},
    "vllm:prompt_tokens": set(),
    "vllm:time_to_first_token_seconds": set(),
}
"""The metrics of vLLM that queries use, with their labels besides those of all."""
OF_ROUTER = RouterMetrics().labels()
"""The labels of the router's metrics, by their names in Prometheus."""
_VARIABLES = {"$__rate_interval": "5m", "$__range": "1h"}
_SUFFIX = re.compile(r"_(total|bucket|sum|count)$")


class Use(NamedTuple):
    """One metric in a query, with the labels that it must have."""

    name: str
    labels: frozenset[str]

    @property
    def metric(self) -> str:
        """The name as it is declared: without the suffix that Prometheus adds."""
        return self.name if self.name in METRICS else _SUFFIX.sub("", self.name)


def parsed(query: str) -> Any:
    """Return the syntax tree. Raises ValueError for what is no PromQL."""
    for variable, value in _VARIABLES.items():
        query = query.replace(variable, value)
    return promql.parse(query)


def uses(query: str) -> list[Use]:
    """Return the metrics of a query."""
    return [Use(name, frozenset(labels)) for name, labels in _walk(parsed(query), set())]


def _walk(node: Any, grouped: set[str]) -> Iterator[tuple[str, set[str]]]:
    """Yield each selector with the labels that it is matched by, and grouped by further up."""
    if isinstance(node, promql.VectorSelector):
        matched = {m.name for m in node.matchers.matchers}
        yield node.name, matched | grouped
    elif isinstance(node, promql.MatrixSelector):
        yield from _walk(node.vector_selector, grouped)
    elif isinstance(node, promql.AggregateExpr):
        modifier = node.modifier
        by = set(modifier.labels) if modifier is not None else set()
        yield from _walk(node.expr, by or grouped)
    elif isinstance(node, promql.BinaryExpr):
        for side in (node.lhs, node.rhs):
            yield from _walk(side, grouped)
    elif isinstance(node, promql.Call):
        for argument in node.args:
            yield from _walk(argument, grouped)
    elif isinstance(node, (promql.ParenExpr, promql.UnaryExpr, promql.SubqueryExpr)):
        yield from _walk(node.expr, grouped)
    else:
        assert isinstance(node, (promql.NumberLiteral, promql.StringLiteral)), type(node)


@cache
def _names_of_vllm() -> str:
    return (Path(vllm.__file__).parent / "v1/metrics/loggers.py").read_text()


def check(query: str) -> None:
    """Raise AssertionError unless each metric of the query exists and has the labels used."""
    for use in uses(query):
        known = OF_VLLM | OF_PROMETHEUS
        if use.metric in METRICS:
            assert use.name in names_in_prometheus(use.metric), f"{use.name}: a wrong suffix"
            known |= set(METRICS[use.metric].labels)
        elif use.metric.startswith("heterocache_router_"):
            assert use.name in OF_ROUTER, f"the router has no metric {use.name}"
            known |= set(OF_ROUTER[use.name])
        elif use.metric in NATIVE_NAMES:
            known |= {"transfer_type"}
        else:
            assert use.metric in THEIR_LABELS, f"there is no metric {use.name}"
            assert f'"{use.metric}"' in _names_of_vllm(), f"vLLM has no metric {use.metric}"
            known |= THEIR_LABELS[use.metric]
        if use.name.endswith("_bucket"):
            known |= {"le"}
        assert use.labels <= known, f"{use.name} has no labels {set(use.labels - known)}"


def names_in_prometheus(metric: str) -> set[str]:
    """Return the names under which Prometheus has a metric of ours."""
    if metric in METRICS_BY_KIND[GAUGES]:
        return {metric}
    if metric in METRICS_BY_KIND[HISTOGRAMS]:
        return {f"{metric}_{part}" for part in ("bucket", "sum", "count")}
    return {f"{metric}_total"}
