"""Metrics: vLLM carries them as connector stats and serves them on `/metrics`.

A `metrics.Recorder` collects them in each process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hetero_connector.metrics import (
    COUNTERS,
    GAUGES,
    METRICS,
    METRICS_BY_KIND,
    TIMINGS,
    Payload,
    merge,
    split_key,
)

BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 100)
"""Bounds of all histograms, in seconds. Ray refuses bounds that are not positive."""


@dataclass
class HeteroStats(KVConnectorStats):
    """A `metrics.Payload` as vLLM passes it between processes."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or step's payload."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counters for vLLM's periodic log line."""
        counters = self.data.get(COUNTERS, {})
        line: dict[str, int | float] = {}
        for key, value in counters.items():
            name, labels = split_key(key)
            short = name.removeprefix("heterocache_")
            if "tier" in labels:
                short += f" {labels['tier']}"
            line[short] = line.get(short, 0) + value
        return line

    def is_empty(self) -> bool:
        return not self.data


class HeteroPromMetrics(KVConnectorPromMetrics):
    """Registers `METRICS` on vLLM's `/metrics` and updates them from payloads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _unregister_earlier()
        self._series = {name: self._create(name) for name in METRICS}

    def observe(self, transfer_stats_data: Payload, engine_idx: int = 0) -> None:
        """Add one payload to the metrics."""
        for key, value in transfer_stats_data.get(COUNTERS, {}).items():
            self._child(key, engine_idx).inc(value)
        for key, value in transfer_stats_data.get(GAUGES, {}).items():
            self._child(key, engine_idx).set(value)
        for key, samples in transfer_stats_data.get(TIMINGS, {}).items():
            child = self._child(key, engine_idx)
            for seconds in samples:
                child.observe(seconds)

    def _create(self, name: str) -> Any:
        metric = METRICS[name]
        labels = [*self._labelnames, *metric.labels]
        if name in METRICS_BY_KIND[TIMINGS]:
            histogram: Any = self._histogram_cls
            return histogram(name, metric.help, labels, buckets=BUCKETS)
        if name in METRICS_BY_KIND[GAUGES]:
            return self._gauge_cls(name, metric.help, labels)
        return self._counter_cls(name, metric.help, labels)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, labels = split_key(key)
        values = [labels[label] for label in METRICS[name].labels]
        return self._series[name].labels(*self.per_engine_labelvalues[engine_idx], *values)


def _unregister_earlier() -> None:
    """Remove the metrics that an earlier engine of this process registered.

    vLLM does the same for its own metrics (`unregister_vllm_metrics`), by their prefix.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in METRICS:
            REGISTRY.unregister(collector)
