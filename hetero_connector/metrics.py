"""Counters, gauges and timings that both engine sides and the store record.

Each process has a `Recorder`. The engine drains it once a step and sends the payload through vLLM's
connector stats to Prometheus. Labels are part of a key, so two payloads can be merged without
knowing the metrics.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from functools import lru_cache
from typing import Any

Payload = dict[str, dict[str, Any]]

COUNTERS, GAUGES, TIMINGS = "counters", "gauges", "timings"
_MAX_SAMPLES = 1024


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
    """Thread-safe counters (`add`), gauges (`set`) and timings in seconds (`observe`)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reset()

    def _reset(self) -> None:
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._gauges: dict[str, float] = {}
        self._timings: defaultdict[str, list[float]] = defaultdict(list)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Add to a counter, which only grows."""
        key = metric_key(name, labels)
        with self._lock:
            self._counters[key] += value

    def set(self, name: str, value: float, **labels: str) -> None:
        key = metric_key(name, labels)
        with self._lock:
            self._gauges[key] = value

    def observe(self, name: str, seconds: float, **labels: str) -> None:
        """Record one duration; at most 1,024 samples per key are kept between two drains."""
        key = metric_key(name, labels)
        with self._lock:
            samples = self._timings[key]
            if len(samples) < _MAX_SAMPLES:
                samples.append(seconds)

    def drain(self) -> Payload | None:
        """Return everything recorded since the last drain; None if there is nothing."""
        with self._lock:
            if not (self._counters or self._gauges or self._timings):
                return None
            payload: Payload = {
                COUNTERS: dict(self._counters),
                GAUGES: dict(self._gauges),
                TIMINGS: dict(self._timings),
            }
            self._reset()
        return payload


def merge(into: Payload, other: Payload) -> Payload:
    """Add `other` to `into` and return it: counters and timings add up, gauges are replaced."""
    counters = into.setdefault(COUNTERS, {})
    for key, value in other.get(COUNTERS, {}).items():
        counters[key] = counters.get(key, 0.0) + value
    into.setdefault(GAUGES, {}).update(other.get(GAUGES, {}))
    timings = into.setdefault(TIMINGS, {})
    for key, samples in other.get(TIMINGS, {}).items():
        timings[key] = [*timings.get(key, []), *samples][:_MAX_SAMPLES]
    return into
