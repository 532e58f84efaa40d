"""The router's metrics. Labels are bounded: no model, key or path that a client could invent."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_SEVERAL = "PROMETHEUS_MULTIPROC_DIR"
"""An environment variable: the folder of metrics if the router has several processes."""
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics:
    """All metrics, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace="heterocache_router", registry=self.registry)
        gauge = partial(Gauge, namespace="heterocache_router", registry=self.registry)
        histogram = partial(
            Histogram, namespace="heterocache_router", registry=self.registry, buckets=_SECONDS
        )
        self.requests = counter("requests", "Answers, by path and status", ["path", "status"])
        self.refused = counter("refused", "Answers of the router itself, by reason", ["reason"])
        self.connections_refused = counter(
            "connections_refused", "Connections beyond `max_connections`: answered 503, or closed"
        )
        self.retried = counter(
            "retried",
            "Requests sent again before their first byte, by the worker that lost or refused them",
            ["worker"],
        )
        self.cut = counter(
            "cut", "Answers that ended with an error after their first byte, by worker", ["worker"]
        )
        self.left = counter("clients_left", "Requests whose client left before their end")
        self.placements = counter(
            "placements",
            "Requests placed by a policy, by certainty (exact, degraded, blind) and action",
            ["certainty", "action"],
        )
        self.doubts = counter(
            "doubts", "Requests placed without being certain, by each reason", ["reason"]
        )
        self.prompt_tokens = counter(
            "prompt_tokens", "Tokens of the prompts that a policy has placed, where they are known"
        )
        self.tokenized = counter(
            "tokenized",
            "Tokens made for these prompts; the others were known from earlier requests",
        )
        self.prefills = counter(
            "prefills",
            "Prompts computed for another worker, by worker and result (done, failed)",
            ["worker", "result"],
        )
        self.decisions_lost = counter(
            "decisions_lost", "Lines that are not in the file `decisions`: the disk is full or slow"
        )
        self.wait = histogram("wait_seconds", "Time from a request's body to its dispatch")
        self.first_byte = histogram(
            "first_byte_seconds",
            "Time from a request's body to its answer's first byte, but for errors",
            ["path"],
        )
        self.in_flight = gauge(
            "in_flight", "Requests under way, by worker", ["worker"], multiprocess_mode="livesum"
        )
        self.queued = gauge("queued", "Requests that wait for room", multiprocess_mode="livesum")
        self.peers = gauge(
            "peers", "Other routers that share their load", multiprocess_mode="livemax"
        )
        self.peer_requests = gauge(
            "peer_requests", "Their requests under way", multiprocess_mode="livemax"
        )
        self._up = gauge(
            "worker_up", "1 if the worker serves", ["worker"], multiprocess_mode="livemin"
        )
        self._workers = set[str]()

    def show_workers(self, is_up: Mapping[str, bool]) -> None:
        """Show these workers, and no other any more.

        The series of one that has left are removed with the first change of workers after its last
        request has ended. Those of several processes cannot be removed: there only `worker_up` ends
        with the worker, and the others stay until the router ends.
        """
        for name in self._workers - is_up.keys():
            self._up.labels(name).set(math.nan)
            if not (os.environ.get(_SEVERAL) or self.in_flight.labels(name)._value.get()):
                self._remove(name)
        for name, value in is_up.items():
            self._up.labels(name).set(value)
        self._workers |= is_up.keys()

    def _remove(self, name: str) -> None:
        """Remove all series of a worker."""
        self._workers.discard(name)
        for metric in (self._up, self.in_flight, self.retried, self.cut):
            with suppress(KeyError):  # it has none
                metric.remove(name)
        for result in ("done", "failed"):
            with suppress(KeyError):
                self.prefills.remove(name, result)

    def labels(self) -> dict[str, tuple[str, ...]]:
        """Return the labels of each metric, by all its names in Prometheus."""
        known = self.registry._collector_to_names.items()
        return {name: collector._labelnames for collector, names in known for name in names}  # type: ignore[attr-defined]

    def text(self) -> bytes:
        """Return the values of all processes of this router, as Prometheus reads them."""
        if not os.environ.get(_SEVERAL):
            return _text_of(self.registry)
        registry = CollectorRegistry()
        MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
        return _text_of(registry)


class _Shown(Collector):
    """The samples of a registry but for those that are no number."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            metric.samples = [x for x in metric.samples if not math.isnan(x.value)]
            yield metric


def _text_of(registry: CollectorRegistry) -> bytes:
    shown = CollectorRegistry()
    shown.register(_Shown(registry))
    return generate_latest(shown)
