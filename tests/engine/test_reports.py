"""Reports are written to a log and as spans without a cost for the scheduler or for requests."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from hetero_connector.engine.api.server_spans import ServerSpans
from hetero_connector.engine.scheduler.background_thread import _MAX_JOBS
from hetero_connector.engine.scheduler.request_report import RequestReport, untracked
from hetero_connector.engine.scheduler.spans import SPAN, SpanWriter
from tests.engine.fakes import DENSE, FakeRequest
from tests.engine.stepped import Engine, tokens
from tests.engine.test_restorer import on_ssd
from tests.waiting import until

LOGGER = "vllm.heterocache.requests"
CALLER = "00-11112222333344445555666677778888-00f067aa0ba902b7-01"


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = Engine(DENSE)
    engine.run(FakeRequest("a", tokens(200)))
    engine.recorder.drain()
    yield engine
    engine.side.close()


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def report_of(**fields: Any) -> RequestReport:
    """Return the report of a request that was restored from SSD, then computed and decoded."""
    known = {
        "queued_s": 0.5, "prompt_tokens": 200, "local_tokens": 0, "computed_tokens": 8,
        "restored_tokens": {"ssd": 192}, "boundary": 192, "choice": "load", "reason": None,
        "decided_s": 0.1, "staging_s": 0.3, "read_s": {"ssd": (0.11, 0.35)}, "admitted_s": 0.7,
        "loaded_s": 0.9, "first_token_s": 1.0, "finished_s": 2.0, "output_tokens": 9,
    }  # fmt: skip
    return untracked(FakeRequest("b", tokens(200)))._replace(**known | fields)  # type: ignore[arg-type]


def test_the_phases_follow_each_other() -> None:
    assert [tuple(x) for x in report_of().phases()] == [
        ("queue", -0.5, 0.0, None),
        ("look up", 0.0, 0.1, None),
        ("stage", 0.1, 0.4, None),
        ("read ssd", 0.11, 0.35, "stage"),
        ("wait for pages", 0.4, 0.7, None),
        ("load", 0.7, 0.9, None),
        ("prefill", 0.7, 1.0, None),
        ("decode", 1.0, 2.0, None),
    ]
    parked = {x.name: x.begin_s for x in report_of(is_parked=True).phases()}
    assert parked["prefill"] == 0.9


def test_a_request_that_ended_early_has_the_phases_that_it_had() -> None:
    waiting = report_of(admitted_s=None, loaded_s=None, first_token_s=None)
    assert [x.name for x in waiting.phases()][-1] == "read ssd"
    at_once = report_of(queued_s=0.0, decided_s=None, read_s={}, admitted_s=0.0, loaded_s=None)
    assert [x.name for x in at_once.phases()] == ["prefill", "decode"]


def test_reads_from_ssd_are_timed(tmp_path: Path) -> None:
    engine = on_ssd(tmp_path)
    request = FakeRequest("b", tokens(400))
    engine.requests["b"] = request
    restored = engine.answered(request)
    engine.grow_table(request)
    engine.side.on_allocated(request, restored)
    request.num_computed_tokens = restored
    engine.step(b=16)
    request.all_token_ids.append(7)
    engine.step(b=1)
    (report,) = engine.side.predictions.recent()
    assert report.restored_tokens == {"ssd": 384}
    ((tier, (began_s, ended_s)),) = report.read_s.items()
    assert tier == "ssd"
    assert report.decided_s is not None
    assert report.decided_s <= began_s < ended_s <= report.decided_s + report.staging_s
    engine.finish(request)
    engine.side.close()


def test_spans_are_below_the_caller_s(
    provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    report = report_of()
    SpanWriter(provider.get_tracer("t")).write(report, {"traceparent": CALLER})
    spans = {x.name: x for x in exporter.get_finished_spans()}
    own = spans[SPAN]
    assert format(own.context.trace_id, "032x") in CALLER
    assert own.parent is not None
    assert format(own.parent.span_id, "016x") in CALLER
    read, stage = spans["heterocache.read_ssd"], spans["heterocache.stage"]
    assert read.parent == stage.context
    assert stage.parent == own.context
    assert (own.start_time, own.end_time) == (ns(report.time - 0.5), ns(report.time + 2))
    assert (read.start_time, read.end_time) == (ns(report.time + 0.11), ns(report.time + 0.35))
    assert own.attributes is not None
    assert own.attributes["heterocache.restored_tokens.ssd"] == 192
    assert "heterocache.reason" not in own.attributes


def ns(seconds: float) -> int:
    return int(seconds * 1e9)


def test_where_vllm_exports_nothing_in_this_process_it_is_made_to(
    monkeypatch: pytest.MonkeyPatch, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    """vLLM starts the engines of several API servers before it knows the endpoint."""
    made = list[str]()
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)

    def init_tracer(module: str, endpoint: str) -> None:
        made.append(endpoint)
        monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)

    monkeypatch.setattr("vllm.tracing.init_tracer", init_tracer)
    for _ in range(2):
        SpanWriter.open("http://collector").write(report_of(), None)
    assert made == ["http://collector"]
    assert len([x for x in exporter.get_finished_spans() if x.name == SPAN]) == 2


@pytest.mark.parametrize(
    ("headers", "spans"),
    [
        (None, 8),
        ({"traceparent": "no such thing"}, 8),
        ({"traceparent": CALLER, "tracestate": "\x00" * 9}, 8),
        ({"traceparent": f"{CALLER[:-2]}00"}, 0),  # the client wants it not to be sampled
    ],
)
def test_headers_of_clients_are_not_trusted(
    provider: TracerProvider, exporter: InMemorySpanExporter, headers: Any, spans: int
) -> None:
    SpanWriter(provider.get_tracer("t")).write(report_of(read_s={}), headers)
    assert len(exporter.get_finished_spans()) == spans


def test_each_request_is_one_line_of_json_whatever_its_id(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER):
        engine.run(FakeRequest('x"\n{}', tokens(200)))
        until(lambda: bool(caplog.messages))
    (line,) = caplog.messages
    assert "\n" not in line
    report = json.loads(line)
    assert report["request_id"] == 'x"\n{}'
    assert report["restored_tokens"] == {"dram": 192}


def test_nothing_is_made_of_a_request_that_no_one_asks_about(engine: Engine) -> None:
    with patch.object(engine.side.predictions, "finish") as finish:
        engine.run(FakeRequest("b", tokens(200)))
    assert not finish.called
    assert engine.side.reports._thread._thread is None


class SlowSpans:
    """Spans whose exporter hangs."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.written = 0

    def write(self, *_: Any) -> None:
        assert self.go_on.wait(60)
        self.written += 1


def test_an_exporter_that_hangs_delays_nothing_and_what_waits_is_bounded(engine: Engine) -> None:
    slow = SlowSpans()
    engine.side.reports.spans = slow  # type: ignore[assignment]
    for number in range(_MAX_JOBS + 100):
        engine.side.on_finished(FakeRequest(f"r{number}", [1]), ([], []))
    dropped = engine.counters()["heterocache_reports_dropped{}"]
    assert dropped >= 99
    assert slow.written == 0
    slow.go_on.set()
    until(lambda: slow.written == _MAX_JOBS + 100 - dropped)


def test_spans_that_fail_are_counted_and_the_next_ones_made(engine: Engine) -> None:
    written = list[RequestReport]()

    class Failing:
        def write(self, report: RequestReport, headers: Any) -> None:
            written.append(report)
            raise RuntimeError("a defect")

    engine.side.reports.spans = Failing()  # type: ignore[assignment]
    for name in "bc":
        engine.side.on_finished(FakeRequest(name, [1]), ([], []))
    until(lambda: len(written) == 2)
    until(lambda: engine.recorder.has_news())
    assert engine.counters()["heterocache_hook_errors{hook=report}"] >= 1


# --- The server's span ----------------------------------------------------------------------------


@pytest.fixture
def server(provider: TracerProvider, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A server that answers with the headers that vLLM would read."""
    monkeypatch.setattr(trace, "get_tracer", provider.get_tracer)
    app = FastAPI()
    app.add_middleware(ServerSpans)

    @app.post("/v1/responses/{name}")
    async def respond(name: str, request: Request, fails: bool = False) -> Any:
        if fails:
            raise RuntimeError("a defect")
        return request.headers.getlist("traceparent")

    return TestClient(app, raise_server_exceptions=False)


def span_of(exporter: InMemorySpanExporter) -> ReadableSpan:
    (span,) = exporter.get_finished_spans()
    return span


def test_a_call_is_a_span_below_the_client_s(
    server: TestClient, exporter: InMemorySpanExporter
) -> None:
    (header,) = server.post("/v1/responses/7", headers={"traceparent": CALLER}).json()
    span = span_of(exporter)
    assert span.name == "POST /v1/responses/{name}"
    _, trace_id, span_id, _ = header.split("-")
    assert trace_id in CALLER
    assert span_id == format(span.context.span_id, "016x")
    assert span.attributes is not None
    assert span.attributes["http.response.status_code"] == 200


def test_an_unknown_path_makes_no_name_and_an_error_ends_the_span(
    server: TestClient, exporter: InMemorySpanExporter
) -> None:
    assert server.post("/v1/chosen/by/the/client").status_code == 404
    assert span_of(exporter).name == "POST"
    exporter.clear()
    assert server.post("/v1/responses/7?fails=true").status_code == 500
    assert not span_of(exporter).status.is_ok


@pytest.mark.parametrize("traceparent", ["", "x" * 5000, "00-0-0-01", "\xff"])
def test_a_malformed_header_begins_a_trace(
    server: TestClient, exporter: InMemorySpanExporter, traceparent: str
) -> None:
    headers = {"traceparent": traceparent.encode("latin-1")}
    assert server.post("/v1/responses/7", headers=headers).status_code == 200  # type: ignore[arg-type]
    assert span_of(exporter).parent is None


def test_our_own_routes_and_scrapes_are_no_spans(
    server: TestClient, exporter: InMemorySpanExporter
) -> None:
    server.get("/metrics")
    server.post("/v1/heterocache/clear")
    assert exporter.get_finished_spans() == ()
