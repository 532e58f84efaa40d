"""The recorder's payload as vLLM connector stats and Prometheus metrics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from prometheus_client import REGISTRY
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from hetero_connector.metrics import COUNTERS, GAUGES, TIMINGS, Payload, merge, split_key

_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_BENEFIT_BUCKETS = (-1, -0.1, -0.01, -0.001, 0, 0.001, 0.01, 0.1, 1, 10, 100)

METRICS: dict[str, tuple[str, tuple[str, ...]]] = {
    "heterocache_hits": ("Requests that restored anything.", ()),
    "heterocache_hit_tokens": ("Tokens restored, by the slowest tier needed.", ("tier",)),
    "heterocache_replayed_tokens": ("Tokens computed once more to rebuild windows.", ()),
    "heterocache_restored_tokens": ("Tokens restored, by state.", ("tier", "state_type")),
    "heterocache_restored_bytes": ("Useful bytes restored.", ("tier", "state_type")),
    "heterocache_decisions": ("Matched requests by what was chosen for them.", ("choice",)),
    "heterocache_actions": ("What the planner did for matched requests.", ("action",)),
    "heterocache_ttft_seconds": ("Decision to first token of matched requests.", ("kind",)),
    "heterocache_reuse_benefit_seconds": ("What restoring saved them of it.", ("kind",)),
    "heterocache_unidentified_requests": ("Not cached: adapter or media not identified.", ()),
    "heterocache_restores_shortened": ("Restores replanned after a failed artifact.", ()),
    "heterocache_saved_bytes": ("Useful bytes sealed in DRAM.", ("state_type",)),
    "heterocache_saves_dropped": ("Saves given up, by cause.", ("cause",)),
    "heterocache_hook_errors": ("Unexpected errors in hooks; each is a miss.", ("hook",)),
    "heterocache_spilled_bytes": ("Useful bytes written to SSD.", ("state_type",)),
    "heterocache_spills_refused": ("Not written to SSD for the write budget.", ("state_type",)),
    "heterocache_read_bytes": ("Useful bytes read into DRAM.", ("tier", "state_type")),
    "heterocache_evictions": ("Artifacts evicted.", ("tier", "state_type")),
    "heterocache_dropped_bytes": ("Evicted first, being of little use.", ("tier", "state_type")),
    "heterocache_prefetches": ("Sessions that were due back, by what came of it.", ("outcome",)),
    "heterocache_prefetched_bytes": ("Staged ahead of a session's return.", ("state_type",)),
    "heterocache_prefetch_used_bytes": ("Of these, what a restore used.", ("state_type",)),
    "heterocache_prefetch_wasted_bytes": ("Of these, what none did in time.", ("state_type",)),
    "heterocache_failures": ("Failed transfers and checks; each is a miss.", ("cause", "tier")),
    "heterocache_bytes": ("Useful bytes stored.", ("tier", "state_type")),
    "heterocache_artifacts": ("Artifacts stored.", ("tier", "state_type")),
    "heterocache_capacity_bytes": ("Capacity of the tier.", ("tier",)),
    "heterocache_ssd_writable": ("1 while artifacts are written to SSD, 0 while not.", ()),
    "heterocache_ssd_readable": ("1 while artifacts are read from SSD, 0 while not.", ()),
    "heterocache_ssd_quarantined_bytes": ("DRAM kept back for SSD reads that hang.", ()),
    "heterocache_io_alive": ("0 once the store's I/O thread has ended, or while it hangs.", ()),
    "heterocache_ssd_written_today_bytes": ("Of the write budget, in the last 24 hours.", ()),
    "heterocache_directory_joined": ("1 while registered in the fleet's directory, else 0.", ()),
    "heterocache_directory_failures": ("Failed directory calls; local cache only.", ("cause",)),
    "heterocache_directory_claims": ("Claims answered.", ("outcome",)),
    "heterocache_directory_lookups": ("Chains asked for, by what came of it.", ("outcome",)),
    "heterocache_directory_lookup_seconds": ("From asking for a chain to its answer.", ()),
    "heterocache_replicas": ("Artifacts here that other workers own.", ()),
    "heterocache_replica_bytes": ("Their useful bytes.", ()),
    "heterocache_replicas_expired": ("Not used for replica_ttl_s: first to leave.", ()),
    "heterocache_adopted_bytes": ("Taken over from a dead engine's SSD.", ("state_type",)),
    "heterocache_directory_claims_dropped": ("Sealed artifacts the fleet was not told of.", ()),
    "heterocache_stage_seconds": ("From the match to everything in DRAM.", ()),
    "heterocache_load_seconds": ("Pages written by a step's loads.", ()),
    "heterocache_save_seconds": ("Pages read by a step's saves.", ()),
    "heterocache_peer_read_seconds": ("One batch read from a peer.", ()),
    "heterocache_peer_process_ends": ("Ends of the process that peers reach.", ()),
    "heterocache_peer_quarantined_bytes": ("Kept back for peers that never answered.", ()),
    "heterocache_ssd_read_seconds": ("One batch read from SSD.", ()),
    "heterocache_ssd_write_seconds": ("One batch written to SSD.", ()),
}
"""Every metric: its help text and its labels (besides vLLM's own)."""

_GAUGES = frozenset(
    {
        "heterocache_bytes",
        "heterocache_artifacts",
        "heterocache_capacity_bytes",
        "heterocache_peer_quarantined_bytes",
        "heterocache_ssd_writable",
        "heterocache_ssd_readable",
        "heterocache_ssd_quarantined_bytes",
        "heterocache_io_alive",
        "heterocache_ssd_written_today_bytes",
        "heterocache_directory_joined",
        "heterocache_replicas",
        "heterocache_replica_bytes",
    }
)


@dataclass
class HeteroStats(KVConnectorStats):
    """A `metrics.Payload` in vLLM's envelope."""

    data: dict[str, Any] = field(default_factory=dict)

    def reset(self) -> None:
        """Forget everything."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add another rank's or step's payload."""
        merge(self.data, other.data)
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log."""
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
        """Whether there is nothing to report."""
        return not self.data


class HeteroPromMetrics(KVConnectorPromMetrics):
    """Registers `METRICS` on vLLM's `/metrics` and feeds them from the payloads."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        _unregister_earlier()
        self._series = {name: self._create(name) for name in METRICS}

    def observe(self, transfer_stats_data: Payload, engine_idx: int = 0) -> None:
        """Record one payload."""
        for key, value in transfer_stats_data.get(COUNTERS, {}).items():
            self._child(key, engine_idx).inc(value)
        for key, value in transfer_stats_data.get(GAUGES, {}).items():
            self._child(key, engine_idx).set(value)
        for key, samples in transfer_stats_data.get(TIMINGS, {}).items():
            child = self._child(key, engine_idx)
            for seconds in samples:
                child.observe(seconds)

    def _create(self, name: str) -> Any:
        help_text, labels = METRICS[name]
        names = [*self._labelnames, *labels]
        if name.endswith("_seconds"):
            buckets = _BENEFIT_BUCKETS if "benefit" in name else _BUCKETS
            return self._histogram_cls(name, help_text, names, buckets=buckets)
        if name in _GAUGES:
            return self._gauge_cls(name, help_text, names)
        return self._counter_cls(name, help_text, names)

    def _child(self, key: str, engine_idx: int) -> Any:
        name, labels = split_key(key)
        values = [labels[label] for label in METRICS[name][1]]
        return self._series[name].labels(*self.per_engine_labelvalues[engine_idx], *values)


def _unregister_earlier() -> None:
    """Take back the names an engine before this one registered in the same process.

    vLLM does the same for its own metrics (`unregister_vllm_metrics`), by their prefix.
    """
    for collector in list(REGISTRY._collector_to_names):
        if getattr(collector, "_name", None) in METRICS:
            REGISTRY.unregister(collector)
