"""Spans of the router, as a collector gets them, and the context that workers get."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.stub_fleet import StubFleet
from hetero_connector.errors import RouterConfigError
from ownership.router.figures import WorkerFigures
from ownership.router.identity import ChainCache, PromptIdentity
from ownership.router.policy_placer import PolicyPlacer
from ownership.router.view import FleetChains, PrefixViews, Trust
from ownership.scheduling.registry import scheduling_policy
from tests.engine.collector import Collector, attributes
from tests.ownership.router.bench import RunningRouter, config_of, seen
from tests.ownership.router.envoy_calls import EnvoyCall, channel, headers_of

CALLER = "11112222333344445555666677778888"
CLIENT = f"00-{CALLER}-aaaabbbbccccdddd-01"
ERROR = 2


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as found:
        yield found


@pytest.fixture(scope="module")
def traced(
    collector: Collector, fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningRouter]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        views = PrefixViews(PromptIdentity(None, ChainCache()), FleetChains(), Trust(), None)
        placer = PolicyPlacer(scheduling_policy("ownerserve", Random(0)), views, WorkerFigures())
        folder = tmp_path_factory.mktemp("traced")
        keys = {"otlp_traces_endpoint": collector.endpoint, "ext_proc_port": 0}
        config = config_of(folder, workers=fleet.urls, **keys)
        with RunningRouter(config, placer=placer) as running:
            yield running
        views.close()


def spans_of(collector: Collector, trace_id: str = CALLER) -> dict[str, Any]:
    """Return a trace's spans by name, once the request's own has come; it is the last."""
    return dict(collector.wait_for(trace_id, lambda found: "POST /v1/completions" in found))


def test_a_trace_goes_from_the_client_through_the_router_to_the_worker(
    traced: RunningRouter, collector: Collector, fleet: StubFleet
) -> None:
    sent = {"traceparent": CLIENT, "tracestate": "vendor=1"}
    answer = traced.complete(prompt=[1, 2, 3], stream=True, headers=sent)
    worker = answer.headers["x-heterocache-worker"]
    found = spans_of(collector)
    request, place, upstream = (
        found[x] for x in ("POST /v1/completions", "heterocache.place", "heterocache.upstream")
    )
    assert request.parent_span_id.hex() == "aaaabbbbccccdddd"
    assert {place.parent_span_id, upstream.parent_span_id} == {request.span_id}
    assert request.start_time_unix_nano <= place.start_time_unix_nano
    assert place.end_time_unix_nano <= upstream.start_time_unix_nano
    assert upstream.end_time_unix_nano <= request.end_time_unix_nano
    assert attributes(request)["http.response.status_code"] == 200
    told = attributes(place)
    assert told["heterocache.certainty"] == "blind"
    assert told["heterocache.action"] == "colocated_prefill"
    assert told["heterocache.predicted_s"] > 0.0
    assert told["heterocache.worker"] == attributes(upstream)["heterocache.worker"] == worker
    got = next(
        headers
        for headers in (seen(url)["last_headers"] for url in fleet.urls)
        if CALLER in headers.get("traceparent", "")
    )
    assert got["traceparent"] == f"00-{CALLER}-{upstream.span_id.hex()}-01"
    assert got["tracestate"] == "vendor=1"


def test_what_a_client_does_not_sample_is_not_recorded(
    traced: RunningRouter, collector: Collector
) -> None:
    trace, later = "99" * 16, "98" * 16
    unsampled = {"traceparent": f"00-{trace}-aaaabbbbccccdddd-00"}
    worker = traced.complete(prompt="x", headers=unsampled).headers["x-heterocache-worker"]
    got = seen(f"http://{worker}")["last_headers"]["traceparent"]
    assert got.startswith(f"00-{trace}-")
    assert got.endswith("-00")
    traced.complete(prompt="x", headers={"traceparent": f"00-{later}-aaaabbbbccccdddd-01"})
    spans_of(collector, later)
    assert not [x for x in collector.spans if x.trace_id.hex() == trace]


def test_without_a_traceparent_of_the_client_the_worker_gets_one(
    traced: RunningRouter, fleet: StubFleet
) -> None:
    worker = traced.complete(prompt="x").headers["x-heterocache-worker"]
    assert len(seen(f"http://{worker}")["last_headers"]["traceparent"]) == len(CLIENT)


def test_a_request_that_envoy_sends_is_in_the_same_trace(
    traced: RunningRouter, collector: Collector
) -> None:
    trace = "77" * 16
    with channel(traced.picker_port) as picker:
        call = EnvoyCall(picker)
        call.send_head(traceparent=f"00-{trace}-aaaabbbbccccdddd-01", tracestate="vendor=1")
        call.send_body(b'{"prompt": "x"}')
        mutation = call.next("request_headers").request_headers.response.header_mutation
        call.echo()
        call.serve()
    found = spans_of(collector, trace)
    upstream = found["heterocache.upstream"]
    given = headers_of(mutation)
    assert given["traceparent"] == f"00-{trace}-{upstream.span_id.hex()}-01"
    assert "tracestate" not in given, "it is as it was"
    assert attributes(upstream)["http.response.status_code"] == 200
    assert attributes(found["POST /v1/completions"])["http.response.status_code"] == 200
    assert attributes(found["heterocache.place"])["heterocache.certainty"] == "blind"


def test_each_sending_has_its_span(traced: RunningRouter, collector: Collector) -> None:
    """The last test of this router: its workers get a pause afterwards."""
    trace = CALLER[::-1]
    headers = {"traceparent": f"00-{trace}-aaaabbbbccccdddd-01"}
    lost = traced.complete(prompt="x", stub={"fault": "lose"}, headers=headers)
    assert lost.status_code == 502
    request = spans_of(collector, trace)["POST /v1/completions"]
    told = attributes(request)
    assert (told["http.response.status_code"], told["heterocache.reason"]) == (502, "worker_lost")
    assert request.status.code == ERROR
    sendings = [
        x for x in collector.spans if x.trace_id.hex() == trace and x.name == "heterocache.upstream"
    ]
    assert len({attributes(x)["heterocache.worker"] for x in sendings}) == 2
    assert {x.status.code for x in sendings} == {ERROR}


def test_without_a_collector_headers_pass_through(router: RunningRouter, fleet: StubFleet) -> None:
    answer = router.complete(prompt="x", headers={"traceparent": CLIENT})
    worker = answer.headers["x-heterocache-worker"]
    assert seen(f"http://{worker}")["last_headers"]["traceparent"] == CLIENT


def test_a_collector_that_is_gone_costs_no_request(fleet: StubFleet, tmp_path: Path) -> None:
    with Collector() as gone:
        config = config_of(tmp_path, workers=fleet.urls, otlp_traces_endpoint=gone.endpoint)
    with RunningRouter(config) as running:
        assert running.complete(prompt="x").status_code == 200


def test_nothing_is_imported_without_a_collector() -> None:
    code = (
        "import sys, ownership.router.app, ownership.router.spans as s; s.RouterSpans('');"
        "sys.exit(any(x.startswith('opentelemetry') for x in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_wrong_endpoint_is_refused(fleet: StubFleet, tmp_path: Path) -> None:
    with pytest.raises(RouterConfigError, match="otlp_traces_endpoint: expected http://host"):
        config_of(tmp_path, workers=fleet.urls, otlp_traces_endpoint="localhost:4317")
