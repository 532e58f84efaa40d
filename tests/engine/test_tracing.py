"""A request's report on the real server: in the answer, by id, as a log line and as spans."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from hetero_connector.tools.cli import main
from tests.chrome_trace import read_trace
from tests.engine.collector import Collector, attributes
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ROOT = Path(__file__).parents[2]
MODEL = "dense"
PROMPT = prompt_tokens(700, seed=19)
WANTED = {"kv_transfer_params": {"heterocache": {"report": True}}}
CALLER = "11112222333344445555666677778888"
"""The trace of a client."""
TIERS = {"dram_gib": 0.1, "checkpoints": "full", "planner": "always_load"}


class Traced(NamedTuple):
    server: Server
    collector: Collector
    log: Path

    def send(self, headers: dict[str, str] | None = None, **request: Any) -> Any:
        body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0.0, **request}
        sent = urllib.request.Request(
            f"{self.server.url}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", **(headers or {})},
        )
        with urllib.request.urlopen(sent, timeout=60) as response:
            return response.read().decode()

    def restored(self, headers: dict[str, str] | None = None, **request: Any) -> Any:
        """Complete the prompt from what is stored."""
        self.server.reset_prefix_cache()
        return self.send(headers, **request)

    def get(self, path: str) -> dict[str, Any]:
        with urllib.request.urlopen(self.server.url + path, timeout=60) as response:
            return dict(json.load(response))

    def by_id(self, request_id: str) -> dict[str, Any]:
        (report,) = self.get(f"/v1/heterocache/requests/{request_id}")["reports"]
        return dict(report)


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("traced")
    log, config = folder / "requests.jsonl", folder / "logging.json"
    config.write_text(json.dumps(documented_logging(log)))
    with Collector() as collector:
        server = Server(
            write_checkpoint(MODEL, CHECKPOINTS),
            folder / "server.log",
            kv_transfer_config(TIERS),
            {"otlp_traces_endpoint": collector.endpoint},
            {
                "VLLM_PLUGINS": "heterocache",
                "VLLM_LOGGING_CONFIG_PATH": str(config),
                "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            },
        )
        with server:
            found = Traced(server, collector, log)
            found.send()
            yield found


def documented_logging(log: Path) -> dict[str, Any]:
    """Return the logging configuration of the guide, with another file."""
    guide = (ROOT / "docs/guides/tracing.md").read_text()
    (text,) = re.findall(r"```json\n(\{\s*\"version\".*?)```", guide, re.DOTALL)
    config: dict[str, Any] = json.loads(text)
    config["handlers"]["requests"]["filename"] = str(log)
    return config


def test_the_answer_says_what_was_restored(traced: Traced) -> None:
    answer = json.loads(traced.restored(**WANTED))
    report = answer["kv_transfer_params"]["heterocache"]["report"]
    assert report["restored_tokens"] == {"dram": 672}
    assert (report["boundary"], report["choice"], report["finish"]) == (672, "load", "length")
    assert 0 < report["loaded_s"] <= report["first_token_s"] <= report["finished_s"]
    assert report["predicted_s"] > 0
    assert traced.by_id(answer["id"]) == report
    again = json.loads(traced.send(**WANTED))["kv_transfer_params"]["heterocache"]["report"]
    assert again["reason"] == "in_engine"


def test_only_who_asks_is_told(traced: Traced) -> None:
    assert json.loads(traced.restored())["kv_transfer_params"] is None


def test_the_report_of_a_stream_is_found_by_id(traced: Traced) -> None:
    text = traced.restored({"X-Request-Id": "turn/7"}, stream=True)
    (answer_id,) = set(re.findall(r'"id":"([^"]+)"', text))
    assert answer_id == "cmpl-turn/7"
    report = traced.by_id(answer_id)
    assert report["restored_tokens"] == {"dram": 672}


def test_one_trace_has_the_server_vllm_and_what_was_restored(traced: Traced) -> None:
    traced.restored({"traceparent": f"00-{CALLER}-00f067aa0ba902b7-01"})
    spans = traced.collector.wait_for(
        CALLER, {"POST /v1/completions", "llm_request", "heterocache.request"}.issubset
    )
    server, own = spans["POST /v1/completions"], spans["heterocache.request"]
    assert server.parent_span_id.hex() == "00f067aa0ba902b7"
    assert attributes(server)["http.response.status_code"] == 200
    assert spans["llm_request"].parent_span_id == own.parent_span_id == server.span_id
    said = attributes(own)
    assert said["gen_ai.request.id"].startswith(
        attributes(spans["llm_request"])["gen_ai.request.id"]
    )
    assert said["gen_ai.usage.cache_read.input_tokens"] == 672
    assert said["heterocache.restored_tokens.dram"] == said["heterocache.boundary"] == 672
    below = [x for x in spans.values() if x.parent_span_id == own.span_id]
    assert {x.name for x in below} >= {
        *("heterocache.stage", "heterocache.load", "heterocache.prefill", "heterocache.decode"),
    }
    for span in below:
        assert own.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= own.end_time_unix_nano
    assert server.start_time_unix_nano <= own.start_time_unix_nano
    assert own.end_time_unix_nano <= server.end_time_unix_nano


def test_a_client_without_a_trace_gets_one_for_all_spans(traced: Traced) -> None:
    request_id = json.loads(traced.restored())["id"]

    def of_request() -> Any:
        return [
            x
            for x in list(traced.collector.spans)
            if x.name in ("llm_request", "heterocache.request")
            and attributes(x)["gen_ai.request.id"].startswith(request_id)
        ]

    (first,) = until(lambda: of_request()[:1], pause_s=0.05)
    spans = traced.collector.wait_for(
        first.trace_id.hex(),
        {"POST /v1/completions", "llm_request", "heterocache.request"}.issubset,
    )
    assert not spans["POST /v1/completions"].parent_span_id


def test_each_request_is_a_line_of_json_in_the_log(traced: Traced) -> None:
    request_id = json.loads(traced.restored())["id"]
    lines = until(lambda: [x for x in traced.log.read_text().splitlines() if request_id in x])
    (report,) = map(json.loads, lines)
    assert report == traced.by_id(request_id)


def test_a_timeline_shows_what_the_server_s_engine_did(traced: Traced, tmp_path: Path) -> None:
    (engine,) = traced.get("/v1/heterocache/status")["engines"]
    out = tmp_path / "timeline.json"
    arguments = ["timeline", "--seconds", "3", "--out", str(out)]
    arguments += ["--engine", str(engine["engine"]["pid"])]
    with ThreadPoolExecutor() as pool:
        command = pool.submit(main, arguments)
        while not command.done():
            traced.restored(max_tokens=8)
        assert command.result() == 0
    slices = read_trace(out)
    (process,) = {x.process for x in slices}
    assert str(engine["engine"]["pid"]) in process
    requests = [x for x in slices if x.track == "requests" and x.args]
    steps = [x for x in slices if x.track == "engine"]
    loads = [x for x in slices if x.track == "loads from DRAM"]
    whole = [x for x in requests if x.begin_us > 0 and x.args["finish"] == "length"]
    assert len(whole) > 2
    for request in whole[1:-1]:
        inside = [x for x in steps if request.begin_us <= x.begin_us <= request.end_us]
        assert sum(x.args["tokens"] for x in inside) == 28 + 7, "the rest of the prompt, decodes"
        (load,) = (x for x in loads if x.args["request"] == request.name)
        assert load.args["to_token"] == 672


def test_requests_do_not_wait_for_a_collector_that_is_gone(traced: Traced) -> None:
    traced.collector.close()
    for _ in range(20):
        report = json.loads(traced.restored(**WANTED))["kv_transfer_params"]["heterocache"]
        assert report["report"]["finished_s"] < 5
    assert "heterocache_hook_errors_total" not in {
        name for name, value in traced.server.metrics().items() if value
    }
