"""Recorded metrics arrive on vLLM's /metrics."""

from __future__ import annotations

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from hetero_connector.engine.prometheus import (
    _LOGGED,
    HeteroPromMetrics,
    HeteroStats,
)
from hetero_connector.metrics import (
    GAUGES,
    HISTOGRAMS,
    METRICS,
    METRICS_BY_KIND,
    NATIVE_NAMES,
    Recorder,
)

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
    one.add("heterocache_lost_restores")
    other.add("heterocache_lost_restores", 2)
    other.observe("heterocache_load_seconds", 0.1)
    stats = HeteroStats(data=one.drain() or {})
    assert stats.is_empty() is False
    total = stats.aggregate(HeteroStats(data=other.drain() or {}))
    assert total.reduce() == {"lost restores": 3}
    assert total.data["histograms"] == {"heterocache_load_seconds{}": [0.1]}


def test_the_log_line_is_made_for_people() -> None:
    recorder = Recorder()
    recorder.set("heterocache_bytes", 3_000_000, tier="dram", state_type="dense_kv")
    recorder.set("heterocache_bytes", 250_000, tier="dram", state_type="window_swa")
    recorder.set("heterocache_io_alive", 1)
    recorder.add("heterocache_saved_bytes", 42_319_872.0, state_type="dense_kv")
    recorder.add("heterocache_replayed_tokens", 12)
    recorder.add("heterocache_decisions", 4, choice="load")
    recorder.add("heterocache_hit_tokens", 17_952.0, tier="dram")
    recorder.add("heterocache_hit_tokens", 48.0, tier="ssd")
    line = HeteroStats(data=recorder.drain() or {}).reduce()
    assert ", ".join(f"{name}={value}" for name, value in line.items()) == (
        "hit tokens dram=17952, hit tokens ssd=48, decided to load=4, saved MiB=40.4, "
        "stored MiB dram=3.1"
    )
    assert all(name in METRICS for name in _LOGGED)


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
    for name in METRICS_BY_KIND[HISTOGRAMS]:
        bounds = METRICS[name].bounds
        assert all(bound > 0 for bound in bounds)
        assert sorted(set(bounds)) == list(bounds)


def test_several_api_servers_show_one_series_of_a_gauge() -> None:
    metrics = prom(CollectorRegistry())
    modes = {metrics._series[name]._multiprocess_mode for name in METRICS_BY_KIND[GAUGES]}
    assert modes == {"mostrecent"}


def moved() -> Recorder:
    """Return a recorder of one step's saves and loads."""
    recorder = Recorder()
    recorder.add("heterocache_saved_bytes", 30, state_type="dense_kv")
    recorder.add("heterocache_restored_bytes", 10, tier="ssd", state_type="dense_kv")
    recorder.add("heterocache_restored_bytes", 5, tier="dram", state_type="window_swa")
    for seconds in (0.25, 0.5):
        recorder.observe("heterocache_load_seconds", seconds)
    recorder.observe("heterocache_save_seconds", 2.0)
    return recorder


def test_panels_of_native_offloading_show_what_was_moved() -> None:
    registry = CollectorRegistry()
    prom(registry).observe(moved().drain() or {})
    labels = {"model_name": "m", "engine": "0"}
    load, store = ({"transfer_type": x, **labels} for x in ("CPU_to_GPU", "GPU_to_CPU"))
    found = {
        (name, kind): registry.get_sample_value(f"vllm:kv_offload_{name}_total", of)
        for name, kind, of in (
            ("load_bytes", "", labels),
            ("load_time", "", labels),
            ("store_bytes", "", labels),
            ("total_bytes", "load", load),
            ("total_time", "load", load),
            ("total_bytes", "store", store),
        )
    }
    assert list(found.values()) == [15, 0.75, 30, 15, 0.75, 30]


def test_the_time_that_a_save_takes_of_a_thread_is_not_called_a_transfers_time() -> None:
    registry = CollectorRegistry()
    prom(registry).observe(moved().drain() or {})
    labels = {"model_name": "m", "engine": "0"}
    found = registry.get_sample_value
    assert found("heterocache_save_seconds_sum", labels) == 2
    assert found("vllm:kv_offload_store_time_total", labels) is None
    store = {"transfer_type": "GPU_to_CPU", **labels}
    assert found("vllm:kv_offload_total_time_total", store) is None


def test_the_names_of_native_offloading_are_those_of_vllm() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading import metrics as native

    theirs = native.get_connector_metric_definitions().keys()
    theirs |= native._DEPRECATED_CONNECTOR_METRIC_DEFINITIONS.keys()
    assert set(NATIVE_NAMES) <= theirs


def test_beside_native_offloading_its_names_stay_its_own() -> None:
    """Inside a MultiConnector, whichever of the two is made first."""
    registry = CollectorRegistry()
    metrics = prom(registry)
    theirs = [
        Counter(x, "native", ["model_name", "engine"], registry=registry) for x in NATIVE_NAMES
    ]
    for _ in range(2):
        metrics.observe(moved().drain() or {})
    labels = {"model_name": "m", "engine": "0"}
    assert (
        registry.get_sample_value(
            "heterocache_saved_bytes_total", labels | {"state_type": "dense_kv"}
        )
        == 60
    )
    assert not [sample for x in theirs for sample in x.collect()[0].samples]
