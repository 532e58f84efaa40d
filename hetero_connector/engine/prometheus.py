"""Metrics: vLLM carries them as connector stats and serves them on `/metrics`.

A `metrics.Recorder` collects them in each process.
"""

from __future__ import annotations

from collections import defaultdict
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
    HISTOGRAMS,
    METRICS,
    METRICS_BY_KIND,
    NATIVE,
    NATIVE_NAMES,
    Payload,
    merge,
    split_key,
)
from hetero_connector.units import MIB

_LOGGED = {
    "heterocache_hit_tokens": ("hit tokens", "tier"),
    "heterocache_decisions": ("decided to", "choice"),
    "heterocache_lost_restores": ("lost restores", ""),
    "heterocache_restored_bytes": ("restored MiB", ""),
    "heterocache_saved_bytes": ("saved MiB", ""),
    "heterocache_ssd_written_bytes": ("written to SSD MiB", ""),
    "heterocache_ssd_writes_refused": ("SSD writes refused", ""),
    "heterocache_prefetches": ("prefetches", "outcome"),
    "heterocache_evictions": ("evictions", "tier"),
    "heterocache_failures": ("failures", "cause"),
    "heterocache_hook_errors": ("hook errors", "hook"),
    "heterocache_bytes": ("stored MiB", "tier"),
}
"""The title and the label of each metric in vLLM's periodic log line, in the line's order."""


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
        """Return the figures of vLLM's periodic log line, added up over all other labels."""
        sums: defaultdict[str, float] = defaultdict(float)
        for kind in (COUNTERS, GAUGES):
            for key, value in self.data.get(kind, {}).items():
                name, labels = split_key(key)
                if name in _LOGGED:
                    title, label = _LOGGED[name]
                    sums[f"{title} {labels[label]}" if label else title] += value
        order = [title for title, _ in _LOGGED.values()]
        return {
            name: round(value / MIB, 1) if " MiB" in name else round(value)
            for name, value in sorted(sums.items(), key=lambda x: _place(order, x[0]))
        }

    def is_empty(self) -> bool:
        return not self.data


class HeteroPromMetrics(KVConnectorPromMetrics):
    """Registers `METRICS` on vLLM's `/metrics` and updates them from payloads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _unregister_earlier()
        self._series = {name: self._create(name) for name in METRICS}
        self._native: dict[str, Any] | None = None
        """Series by `NATIVE_NAMES`; None before the first value, empty if they are another's."""

    def observe(self, transfer_stats_data: Payload, engine_idx: int = 0) -> None:
        """Add one payload to the metrics."""
        for key, value in transfer_stats_data.get(COUNTERS, {}).items():
            self._child(key, engine_idx).inc(value)
            self._count_native(key, value, engine_idx)
        for key, value in transfer_stats_data.get(GAUGES, {}).items():
            self._child(key, engine_idx).set(value)
        for key, samples in transfer_stats_data.get(HISTOGRAMS, {}).items():
            child = self._child(key, engine_idx)
            for value in samples:
                child.observe(value)
            self._count_native(key, sum(samples), engine_idx)

    def _create(self, name: str) -> Any:
        metric = METRICS[name]
        labels = [*self._labelnames, *metric.labels]
        if name in METRICS_BY_KIND[HISTOGRAMS]:
            histogram: Any = self._histogram_cls
            return histogram(name, metric.help, labels, buckets=metric.bounds)
        if name in METRICS_BY_KIND[GAUGES]:
            # Several API servers would show one series each, with a label `pid`.
            gauge: Any = self._gauge_cls
            return gauge(name, metric.help, labels, multiprocess_mode="mostrecent")
        return self._counter_cls(name, metric.help, labels)

    def _count_native(self, key: str, value: float, engine_idx: int) -> None:
        """Add to the names of vLLM's native offloading, if this metric has some."""
        native = NATIVE.get(key.partition("{")[0])
        if native is None:
            return
        if self._native is None:
            self._native = self._create_native()
        if self._native:
            labels = self.per_engine_labelvalues[engine_idx]
            self._native[native.name].labels(*labels).inc(value)
            self._native[native.older_name].labels(*labels, native.transfer_type).inc(value)

    def _create_native(self) -> dict[str, Any]:
        """Register the names of vLLM's native offloading.

        Inside a MultiConnector vLLM's own connector may have them. It is not known which connectors
        there are, but all of them have been made when the first value comes.
        """
        try:
            return {
                name: self._counter_cls(
                    name,
                    "The same as HeteroCache counts under a name of its own.",
                    [*self._labelnames, *(["transfer_type"] if "_total_" in name else [])],
                )
                for name in NATIVE_NAMES
            }
        except ValueError:  # the registry's answer to a name that it has
            return {}

    def _child(self, key: str, engine_idx: int) -> Any:
        name, labels = split_key(key)
        values = [labels[label] for label in METRICS[name].labels]
        return self._series[name].labels(*self.per_engine_labelvalues[engine_idx], *values)


def _place(order: list[str], name: str) -> int:
    return next(place for place, title in enumerate(order) if name.startswith(title))


def _unregister_earlier() -> None:
    """Remove the metrics that an earlier engine of this process registered.

    vLLM does the same for its own metrics (`unregister_vllm_metrics`), by their prefix.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in METRICS:
            REGISTRY.unregister(collector)
