"""Metrics: vLLM carries them as connector stats and serves them on `/metrics`.

A `metrics.Recorder` collects them in each process.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hetero_connector.metrics import COUNTERS, GAUGES, TIMINGS, Payload, merge, split_key

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BENEFIT_BUCKETS = (-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1, 10, 100)


class Metric(NamedTuple):
    """One metric: its help text, and its labels without vLLM's own."""

    help: str
    labels: tuple[str, ...] = ()


_TIER_AND_TYPE = ("tier", "state_type")
_TYPE = ("state_type",)

_COUNTERS = {
    # Restores
    "heterocache_hits": Metric("Requests that restored at least one token."),
    "heterocache_hit_tokens": Metric(
        "Restored tokens, by the slowest tier that their chunk needed.", ("tier",)
    ),
    "heterocache_restored_tokens": Metric(
        "Restored tokens, counted once for each state type.", _TIER_AND_TYPE
    ),
    "heterocache_restored_bytes": Metric("Restored bytes, without padding.", _TIER_AND_TYPE),
    "heterocache_replayed_tokens": Metric("Tokens computed again to rebuild attention windows."),
    "heterocache_restores_replanned": Metric(
        "Restores that were planned again because an artifact could not be read."
    ),
    "heterocache_decisions": Metric(
        "Planned requests, by the choice: load, load_part, replay or compute.", ("choice",)
    ),
    "heterocache_actions": Metric("Actions of the planner, by kind.", ("action",)),
    "heterocache_unidentified_requests": Metric(
        "Requests that are not cached because an adapter or a media item has no known identity."
    ),
    # Saves and tiers
    "heterocache_saved_bytes": Metric("Bytes sealed in DRAM, without padding.", _TYPE),
    "heterocache_saves_abandoned": Metric(
        "Saves that were ordered but not made, by cause.", ("cause",)
    ),
    "heterocache_ssd_written_bytes": Metric("Bytes written to SSD, without padding.", _TYPE),
    "heterocache_ssd_writes_refused": Metric(
        "Artifacts that were not written to SSD because the write budget is spent.", _TYPE
    ),
    "heterocache_read_bytes": Metric(
        "Bytes read into DRAM from SSD or from a peer, without padding.", _TIER_AND_TYPE
    ),
    "heterocache_evictions": Metric("Artifacts evicted from a tier.", _TIER_AND_TYPE),
    "heterocache_evicted_first_bytes": Metric(
        "Bytes evicted before all others because computing them again costs less.",
        _TIER_AND_TYPE,
    ),
    "heterocache_failures": Metric(
        "Failed transfers and checks; each one is a cache miss.", ("cause", "tier")
    ),
    "heterocache_hook_errors": Metric(
        "Unexpected errors in the connector's hooks; each one is a cache miss.", ("hook",)
    ),
    # Prefetch
    "heterocache_prefetches": Metric(
        "Sessions that were expected back, by the outcome of their prefetch.", ("outcome",)
    ),
    "heterocache_prefetched_bytes": Metric("Bytes staged before a session's next turn.", _TYPE),
    "heterocache_prefetch_used_bytes": Metric("Prefetched bytes that a restore used.", _TYPE),
    "heterocache_prefetch_wasted_bytes": Metric(
        "Prefetched bytes that no restore used in time.", _TYPE
    ),
    # Fleet
    "heterocache_directory_failures": Metric(
        "Failed calls to the directory; each one leaves only the local cache.", ("cause",)
    ),
    "heterocache_directory_claims": Metric("Answered claims, by outcome.", ("outcome",)),
    "heterocache_directory_claims_discarded": Metric(
        "Claims discarded because too many were queued; a later sweep repeats them."
    ),
    "heterocache_directory_lookups": Metric(
        "Chains looked up in the directory, by outcome.", ("outcome",)
    ),
    "heterocache_replicas_expired": Metric(
        "Replicas that were not used for replica_ttl_s, and are evicted first."
    ),
    "heterocache_adopted_bytes": Metric("Bytes adopted from the SSD of a dead worker.", _TYPE),
    "heterocache_peer_process_exits": Metric("Exits of the process that serves peers."),
}

_GAUGES = {
    "heterocache_bytes": Metric("Bytes stored, without padding.", _TIER_AND_TYPE),
    "heterocache_artifacts": Metric("Artifacts stored.", _TIER_AND_TYPE),
    "heterocache_capacity_bytes": Metric("Capacity of the tier.", ("tier",)),
    "heterocache_io_alive": Metric("1 while the store's I/O thread works; 0 if it hangs or ended."),
    "heterocache_ssd_writable": Metric("1 while artifacts are written to SSD, else 0."),
    "heterocache_ssd_readable": Metric("1 while artifacts are read from SSD, else 0."),
    "heterocache_ssd_quarantined_bytes": Metric(
        "DRAM that cannot be used because an SSD read into it has not ended."
    ),
    "heterocache_ssd_written_24h_bytes": Metric(
        "Bytes written to SSD in the last 24 hours, as the write budget counts them."
    ),
    "heterocache_peer_quarantined_bytes": Metric(
        "DRAM that cannot be used because a transfer from a peer into it has not ended."
    ),
    "heterocache_directory_joined": Metric(
        "1 while this engine is registered in the fleet's directory, else 0."
    ),
    "heterocache_replicas": Metric("Artifacts stored here that other workers own."),
    "heterocache_replica_bytes": Metric("Bytes stored here that other workers own."),
}

_HISTOGRAMS = {
    "heterocache_ttft_seconds": Metric(
        "Time from the restore decision to the first token, predicted and observed.", ("kind",)
    ),
    "heterocache_reuse_benefit_seconds": Metric(
        "Time that restoring saves against computing, predicted and observed.", ("kind",)
    ),
    "heterocache_stage_seconds": Metric("Time from the match until everything is in DRAM."),
    "heterocache_load_seconds": Metric("Time of one step's loads from DRAM into pages."),
    "heterocache_save_seconds": Metric("Time of one step's saves from pages into DRAM."),
    "heterocache_ssd_read_seconds": Metric("Time of one batch of reads from SSD."),
    "heterocache_ssd_write_seconds": Metric("Time of one batch of writes to SSD."),
    "heterocache_peer_read_seconds": Metric("Time of one batch of reads from a peer."),
    "heterocache_directory_lookup_seconds": Metric(
        "Time from a chain's lookup to the directory's answer."
    ),
}

METRICS: dict[str, Metric] = _COUNTERS | _GAUGES | _HISTOGRAMS
"""Every metric by name; each of the two packages may record any of them."""


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
        if name in _HISTOGRAMS:
            buckets = _BENEFIT_BUCKETS if "benefit" in name else _BUCKETS
            return self._histogram_cls(name, metric.help, labels, buckets=buckets)
        if name in _GAUGES:
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
