"""Recorded metrics arrive on vLLM's /metrics."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hetero_connector.engine.prometheus import BUCKETS, HeteroPromMetrics, HeteroStats
from hetero_connector.metrics import METRICS, Recorder

ROOT = Path(__file__).parents[2]
SOURCES = [*(ROOT / "hetero_connector").rglob("*.py"), *(ROOT / "ownership").rglob("*.py")]


def prom(registry: CollectorRegistry) -> HeteroPromMetrics:
    def bound(cls: type) -> object:
        return lambda *args, **kwargs: cls(*args, **kwargs, registry=registry)

    return HeteroPromMetrics(
        SimpleNamespace(kv_transfer_config=None),
        {Gauge: bound(Gauge), Counter: bound(Counter), Histogram: bound(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )


def test_counters_gauges_and_timings_arrive_with_their_labels() -> None:
    recorder = Recorder()
    recorder.add("heterocache_restored_bytes", 10, tier="dram", state_type="dense_kv")
    recorder.add("heterocache_restored_bytes", 5, tier="dram", state_type="dense_kv")
    recorder.set("heterocache_bytes", 7, tier="ssd", state_type="dense_kv")
    recorder.observe("heterocache_ssd_read_seconds", 0.02)
    payload = recorder.drain()
    assert payload is not None
    registry = CollectorRegistry()
    prom(registry).observe(payload)
    labels = {"model_name": "m", "engine": "0", "state_type": "dense_kv"}
    sample = registry.get_sample_value
    assert sample("heterocache_restored_bytes_total", labels | {"tier": "dram"}) == 15
    assert sample("heterocache_bytes", labels | {"tier": "ssd"}) == 7
    assert sample("heterocache_ssd_read_seconds_count", {"model_name": "m", "engine": "0"}) == 1


def test_stats_of_two_ranks_add_up() -> None:
    one, other = Recorder(), Recorder()
    one.add("heterocache_hits")
    other.add("heterocache_hits", 2)
    other.observe("heterocache_load_seconds", 0.1)
    stats = HeteroStats(data=one.drain() or {})
    assert stats.is_empty() is False
    total = stats.aggregate(HeteroStats(data=other.drain() or {}))
    assert total.reduce() == {"hits": 3}
    assert total.data["timings"] == {"heterocache_load_seconds{}": [0.1]}


def recorded() -> set[tuple[str, tuple[str, ...]]]:
    """Return every (metric, labels) that the packages record, read from their source."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in ("add", "set", "observe")
                and node.args
                and isinstance(node.args[0], ast.Constant)
                and str(node.args[0].value).startswith("heterocache_")
            ):
                labels = tuple(sorted(k.arg for k in node.keywords if k.arg))
                starred = any(k.arg is None for k in node.keywords)
                found.add((node.args[0].value, ("*",) if starred else labels))
    return found


@pytest.mark.parametrize(("name", "labels"), sorted(recorded()))
def test_every_recorded_metric_is_exported_with_its_labels(
    name: str, labels: tuple[str, ...]
) -> None:
    assert name in METRICS
    if labels != ("*",):
        assert tuple(sorted(METRICS[name].labels)) == labels


def test_every_exported_metric_is_recorded() -> None:
    assert {name for name, _ in recorded()} == set(METRICS)


def test_ray_takes_the_bounds_of_every_histogram() -> None:
    """Its metrics refuse a bound that is not positive, and with them the start of a server."""
    assert all(bound > 0 for bound in BUCKETS)
    assert sorted(set(BUCKETS)) == list(BUCKETS)
