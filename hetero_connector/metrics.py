"""Counters, gauges and histograms: their declarations, and a recorder of them.

Each process has a `Recorder`. The engine drains it once a step and sends the payload through vLLM's
connector stats to Prometheus. Labels are part of a key, so two payloads can be merged without
knowing the metrics.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

Payload = dict[str, dict[str, Any]]

COUNTERS, GAUGES, HISTOGRAMS = "counters", "gauges", "histograms"
_MAX_SAMPLES = 1024

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 100)
RATIOS = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1, 1.1, 1.25, 1.5, 2, 4, 10)
"""Bounds of histograms. Ray refuses bounds that are not positive."""


class Metric(NamedTuple):
    """One metric: its help text, its labels without vLLM's own, and a histogram's bounds."""

    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = SECONDS


_TIER_AND_TYPE = ("tier", "state_type")
_TYPE = ("state_type",)

_COUNTERS = {
    # Restores
    "heterocache_hits": Metric("Requests that restored at least one token."),
    "heterocache_hit_tokens": Metric(
        "Restored tokens, by the farthest tier that their chunk needed.", ("tier",)
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
    "heterocache_unidentified_requests": Metric(
        "Requests that are not cached because their adapter, items or embeddings have no known "
        "identity."
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
        "Bytes that restores and prefetches took from a tier, without padding.", _TIER_AND_TYPE
    ),
    "heterocache_lost_restores": Metric(
        "Restores that were predicted to be faster than computing, and were slower."
    ),
    "heterocache_evictions": Metric("Artifacts evicted from a tier.", _TIER_AND_TYPE),
    "heterocache_evicted_first_bytes": Metric(
        "Bytes evicted before all others: cheaper to compute, of low priority or an ended session.",
        _TIER_AND_TYPE,
    ),
    "heterocache_eviction_regret_tokens": Metric(
        "Tokens that were computed and saved again within 10 minutes of their eviction, by the "
        "tier that their last copy left: with a larger tier they would have been restored.",
        _TIER_AND_TYPE,
    ),
    "heterocache_failures": Metric(
        "Failed transfers and checks; each one is a cache miss.", ("cause", "tier")
    ),
    "heterocache_hook_errors": Metric(
        "Unexpected errors in the connector's hooks; each one is a cache miss.", ("hook",)
    ),
    "heterocache_reports_dropped": Metric(
        "Reports of requests that were not logged or traced, because too many waited."
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
    "heterocache_info": Metric(
        "1, with the versions, the model's fingerprint and the layout of what is stored.",
        ("version", "vllm", "fingerprint", "format", "layout", "chunk_tokens", "tp_size"),
    ),
    "heterocache_bytes": Metric("Bytes stored, without padding.", _TIER_AND_TYPE),
    "heterocache_artifacts": Metric("Artifacts stored.", _TIER_AND_TYPE),
    "heterocache_capacity_bytes": Metric("Capacity of the tier.", ("tier",)),
    "heterocache_cache_alive": Metric(
        "1 while this engine restores and saves; 0 from a failed load of a worker until the engine "
        "is started again."
    ),
    "heterocache_io_alive": Metric("1 while the store's I/O thread works; 0 if it hangs or ended."),
    "heterocache_ssd_writable": Metric("1 while artifacts are written to SSD, else 0."),
    "heterocache_ssd_readable": Metric("1 while artifacts are read from SSD, else 0."),
    "heterocache_ssd_quarantined_bytes": Metric(
        "DRAM that cannot be used because an SSD read into it has not ended."
    ),
    "heterocache_ssd_written_24h_bytes": Metric(
        "Bytes written to SSD in the last 24 hours, as the write budget counts them."
    ),
    "heterocache_ssd_write_budget_bytes": Metric(
        "Bytes that may be written to SSD in 24 hours; absent without a write budget."
    ),
    "heterocache_peer_quarantined_bytes": Metric(
        "DRAM that cannot be used because a transfer from a peer into it has not ended."
    ),
    "heterocache_directory_joined": Metric(
        "1 while this engine is registered in the fleet's directory, else 0."
    ),
    "heterocache_shared": Metric(
        "1 while the engines of the fleet find what this one stores; 0 after a reset of it alone, "
        "or new weights without a version, until the fleet is reset."
    ),
    "heterocache_replicas": Metric("Artifacts stored here that other workers own."),
    "heterocache_replica_bytes": Metric("Bytes stored here that other workers own."),
}

_HISTOGRAMS = {
    "heterocache_prediction_ratio": Metric(
        "Observed over predicted time to first token, by the choice; 1 is exact.",
        ("choice",),
        RATIOS,
    ),
    "heterocache_ttft_seconds": Metric(
        "Time from the restore decision to the first token, predicted and observed.", ("kind",)
    ),
    "heterocache_reuse_benefit_seconds": Metric(
        "Time that restores save against computing: predicted, observed, and lost where they took "
        "longer.",
        ("kind",),
    ),
    "heterocache_stage_seconds": Metric("Time from the match until everything is in DRAM."),
    "heterocache_load_seconds": Metric(
        "Time of one step's copies from DRAM into pages, hidden by the forward or not: the sum "
        "of copies that may overlap."
    ),
    "heterocache_save_seconds": Metric(
        "Time for which one step's saves kept the worker's thread busy, which copies on a CPU and "
        "only issues copies on CUDA."
    ),
    "heterocache_ssd_read_seconds": Metric("Time of one batch of reads from SSD."),
    "heterocache_ssd_write_seconds": Metric("Time of one batch of writes to SSD."),
    "heterocache_peer_read_seconds": Metric("Time of one batch of reads from a peer."),
    "heterocache_directory_lookup_seconds": Metric(
        "Time from a chain's lookup to the directory's answer."
    ),
}

METRICS_BY_KIND: Mapping[str, Mapping[str, Metric]] = {
    COUNTERS: _COUNTERS,
    GAUGES: _GAUGES,
    HISTOGRAMS: _HISTOGRAMS,
}
METRICS: Mapping[str, Metric] = _COUNTERS | _GAUGES | _HISTOGRAMS
"""Every metric by name; each of the two packages may record any of them."""


_LOAD, _STORE = "CPU_to_GPU", "GPU_to_CPU"


class Native(NamedTuple):
    """Two names of vLLM's native offloading for one of ours, the newer one first.

    The older one has a label `transfer_type`.
    """

    name: str
    older_name: str
    transfer_type: str


NATIVE = {
    "heterocache_restored_bytes": Native(
        "vllm:kv_offload_load_bytes", "vllm:kv_offload_total_bytes", _LOAD
    ),
    "heterocache_saved_bytes": Native(
        "vllm:kv_offload_store_bytes", "vllm:kv_offload_total_bytes", _STORE
    ),
    "heterocache_load_seconds": Native(
        "vllm:kv_offload_load_time", "vllm:kv_offload_total_time", _LOAD
    ),
}
"""Metrics that mean the same as one of vLLM's native offloading, so that its panels show them."""
NATIVE_NAMES = tuple(dict.fromkeys(name for x in NATIVE.values() for name in x[:2]))


def metric_key(name: str, labels: dict[str, str]) -> str:
    """Return the key of a time series: `name{a=1,b=2}`, labels sorted."""
    return _metric_key(name, tuple(labels.items()))


@lru_cache(maxsize=4096)
def _metric_key(name: str, labels: tuple[tuple[str, str], ...]) -> str:
    inner = ",".join(f"{k}={v}" for k, v in sorted(labels))
    return f"{name}{{{inner}}}"


def split_key(key: str) -> tuple[str, dict[str, str]]:
    """Return the name and labels of a key made by `metric_key`."""
    name, _, inner = key[:-1].partition("{")
    return name, dict(part.split("=", 1) for part in inner.split(",") if part)


class Recorder:
    """Thread-safe counters (`add`), gauges (`set`) and samples of histograms (`observe`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._drained_gauges: dict[str, float] = {}
        self._sums: dict[str, float] = {}
        """Drained counters since the start."""
        self._reset()

    def _reset(self) -> None:
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._samples: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter, which only grows."""
        key = metric_key(name, labels)
        with self._lock:
            self._counters[key] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        key = metric_key(name, labels)
        with self._lock:
            self._gauges[key] = value

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Record one sample; at most 1,024 samples per key are kept between two drains."""
        key = metric_key(name, labels)
        with self._lock:
            samples = self._samples[key]
            if len(samples) < _MAX_SAMPLES:
                samples.append(value)

    def add_reported(self, counters: Mapping[str, float]) -> None:
        """Add to the sums what another process has counted, and reports by itself."""
        with self._lock:
            _add_all(self._sums, counters)

    def sums(self, names: Collection[str]) -> dict[str, float]:
        """Return each counter of these names by key, since the start."""
        with self._lock:
            sums = _add_all(dict(self._sums), self._counters)
        return {key: value for key, value in sums.items() if key.partition("{")[0] in names}

    def gauge(self, name: str) -> float | None:
        """Return the newest value of a gauge without labels; None if it was never set."""
        key = metric_key(name, {})
        with self._lock:
            return self._gauges.get(key, self._drained_gauges.get(key))

    def has_news(self) -> bool:
        """Return True if a drain would return more than gauges that have not changed."""
        with self._lock:
            is_counted = bool(self._counters or self._samples)
            return is_counted or not self._gauges.items() <= self._drained_gauges.items()

    def drain(self) -> Payload | None:
        """Return everything recorded since the last drain; None if there is nothing."""
        with self._lock:
            if not (self._counters or self._gauges or self._samples):
                return None
            payload: Payload = {
                COUNTERS: dict(self._counters),
                GAUGES: dict(self._gauges),
                HISTOGRAMS: dict(self._samples),
            }
            self._drained_gauges |= self._gauges
            _add_all(self._sums, self._counters)
            self._reset()
        return payload


def merge(into: Payload, other: Payload) -> Payload:
    """Add `other` to `into` and return it: counters and samples add up, gauges are replaced."""
    _add_all(into.setdefault(COUNTERS, {}), other.get(COUNTERS, {}))
    into.setdefault(GAUGES, {}).update(other.get(GAUGES, {}))
    known = into.setdefault(HISTOGRAMS, {})
    for key, samples in other.get(HISTOGRAMS, {}).items():
        known[key] = [*known.get(key, []), *samples][:_MAX_SAMPLES]
    return into


def _add_all(sums: dict[str, float], counters: Mapping[str, float]) -> dict[str, float]:
    for key, value in counters.items():
        sums[key] = sums.get(key, 0.0) + value
    return sums
