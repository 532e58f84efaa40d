"""Alerts and queries on a real Prometheus, which scrapes metrics as an engine exports them.

Run it with `make test-prometheus`.
"""

from __future__ import annotations

import json
import re
import subprocess
import threading
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import chain, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.prometheus import HeteroPromMetrics
from hetero_connector.metrics import GAUGES, HISTOGRAMS, METRICS, METRICS_BY_KIND, Recorder
from ownership.router.metrics import RouterMetrics
from scripts.make_dashboard import DASHBOARDS
from tests.deploy.promql import THEIR_LABELS
from tests.deploy.test_promql import ROOT, documented
from tests.ownership.router.test_guide import free_ports
from tests.waiting import until

ALERTS = ROOT / "deploy/prometheus/alerts.yaml"
VALUES = {
    "tier": tuple(Tier),
    "state_type": ("dense_kv", "window_swa"),
    "kind": ("predicted", "observed", "lost"),
    "source": ("local_compute", "device", "host", "disk"),
}
"""Values of labels; others have one value."""
LABELS = {"model_name": "m", "engine": "0"}


def record_everything(recorder: Recorder) -> None:
    """Record a value of every metric, for each combination of labels."""
    for name, metric in METRICS.items():
        for values in product(*(VALUES.get(label, ("x",)) for label in metric.labels)):
            labels = dict(zip(metric.labels, map(str, values), strict=True))
            if name in METRICS_BY_KIND[GAUGES]:
                recorder.set(name, 1.0, **labels)
            elif name in METRICS_BY_KIND[HISTOGRAMS]:
                recorder.observe(name, 0.03, **labels)
            else:
                recorder.add(name, 5.0, **labels)


def count_everything(router: RouterMetrics) -> None:
    """Record a value of every metric of a router."""
    labels = router.labels()
    for metric in vars(router).values():
        if not isinstance(metric, Counter | Gauge | Histogram):
            continue
        names = labels[metric.describe()[0].name]
        child: Any = metric.labels(*("x" for _ in names)) if names else metric
        child.observe(0.03) if isinstance(metric, Histogram) else child.inc()


@pytest.fixture(scope="module")
def exporter() -> Iterator[int]:
    """A server as an engine's and a router's: every metric of ours, and those of vLLM that queries
    use."""
    registry = CollectorRegistry()

    def registered(kind: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: kind(*args, **kwargs, registry=registry)

    kinds: Any = {kind: registered(kind) for kind in (Gauge, Counter, Histogram)}
    config: Any = SimpleNamespace(kv_transfer_config=None)
    ours = HeteroPromMetrics(config, kinds, list(LABELS), {0: list(LABELS.values())})
    theirs = {
        name: (Histogram if name.endswith("_seconds") else Counter)(
            name, "vLLM's", [*LABELS, *sorted(labels)], registry=registry
        )
        for name, labels in THEIR_LABELS.items()
    }
    router, stopped = RouterMetrics(), threading.Event()

    def work() -> None:
        recorder = Recorder()
        while not stopped.wait(0.2):
            record_everything(recorder)
            ours.observe(recorder.drain() or {})
            count_everything(router)
            for name, labels in THEIR_LABELS.items():
                for values in product(*(VALUES[label] for label in sorted(labels))):
                    child = theirs[name].labels(*LABELS.values(), *values)
                    child.observe(0.1) if isinstance(child, Histogram) else child.inc(100)

    thread = threading.Thread(target=work)
    thread.start()

    class Metrics(BaseHTTPRequestHandler):
        """Answers in the text format: in OpenMetrics Prometheus 2 would get `vllm_` names."""

        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(generate_latest(registry) + router.text())

        def log_message(self, *args: object) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Metrics)
    serving = threading.Thread(target=server.serve_forever)
    serving.start()
    yield server.server_port
    stopped.set()
    thread.join()
    server.shutdown()
    server.server_close()
    serving.join()


@pytest.fixture(scope="module")
def ask(exporter: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Any]]:
    """Start Prometheus with our alerts; yield a function that asks its API."""
    folder, (port,) = tmp_path_factory.mktemp("prometheus"), free_ports(1)
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ALERTS)],
        "scrape_configs": [
            {"job_name": "vllm", "static_configs": [{"targets": [f"127.0.0.1:{exporter}"]}]}
        ],
    }
    (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
    command = ["prometheus", f"--config.file={folder}/prometheus.yaml"]
    command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"]
    log = (folder / "log").open("w")
    server = subprocess.Popen(command, stdout=log, stderr=log)

    def get(path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/{path}", timeout=10) as reply:
            return json.load(reply)["data"]

    def has_scraped() -> bool:
        assert server.poll() is None, (folder / "log").read_text()
        try:
            return len(query_values(get, "heterocache_info[1m]")) >= 4
        except OSError:
            return False

    try:
        until(has_scraped, (folder / "log").read_text, pause_s=0.2)
        yield get
    finally:
        server.terminate()
        server.wait()
        log.close()


def query_values(get: Callable[[str], Any], query: str) -> list[Any]:
    """Return the series of a query's answer, or the samples of a single one over time."""
    data = get(f"query?query={urllib.parse.quote(query)}")
    is_range = data["resultType"] == "matrix"
    return data["result"][0]["values"] if is_range and data["result"] else data["result"]


def as_grafana(query: str) -> str:
    chosen = query.replace('"$model"', '".*"').replace('"$instance"', '".*"')
    return chosen.replace("$__rate_interval", "30s")


@pytest.mark.parametrize("query", [*chain(*(board.queries() for board in DASHBOARDS))])
def test_each_query_of_the_dashboards_has_an_answer(ask: Callable[[str], Any], query: str) -> None:
    found = query_values(ask, as_grafana(query))
    assert found
    assert all(float(x["value"][1]) == float(x["value"][1]) for x in found), "not a number"


@pytest.mark.parametrize("query", documented())
def test_each_query_of_the_documents_has_an_answer(ask: Callable[[str], Any], query: str) -> None:
    """A comparison may be true of no series: then what is compared has an answer."""
    query_values(ask, query)
    parts = re.split(r" (?:==|>) \d+(?: or )?", query.partition("#")[0].strip())
    for part in filter(None, parts):
        assert query_values(ask, part), part


def test_prometheus_has_loaded_every_alert_and_none_fails(ask: Callable[[str], Any]) -> None:
    rules = [rule for group in ask("rules")["groups"] for rule in group["rules"]]
    expected = yaml.safe_load(ALERTS.read_text())["groups"]
    assert sorted(x["name"] for x in rules) == sorted(
        x["alert"] for group in expected for x in group["rules"]
    )
    assert {x["lastError"] for x in rules if "lastError" in x} <= {""}


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", str(ALERTS)),
        ("test", "rules", str(Path(__file__).parent / "alerts.test.yaml")),
        ("check", "config", "--syntax-only", str(ROOT / "deploy/prometheus/prometheus.yaml")),
    ],
    ids=lambda x: " ".join(x[:2]),
)
def test_promtool_accepts(arguments: tuple[str, ...]) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
