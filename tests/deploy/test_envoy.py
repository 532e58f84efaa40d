"""A real Envoy between clients and stub workers, with `deploy/envoy/envoy.yaml`, ports apart.

Run it with `make test-envoy`. `XDS_PROTOS` is the folder of Envoy's own generated messages.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from benchmarks.stub_fleet import StubFleet
from ownership.router.ext_proc.messages import SCHEMA
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of, error_of, seen
from tests.ownership.router.known_fleet import PROMPT, running
from tests.ownership.router.test_handoffs import ROLES, last_body
from tests.waiting import until

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "deploy/envoy/envoy.yaml"
PATH = "/v1/completions"
Change = Callable[[dict[str, Any]], None]
"""Changes the parts of the configuration by name: `workers`, `router`, `filters`, `ext_proc`."""


def parts_of(config: dict[str, Any]) -> dict[str, Any]:
    clusters = {x["name"]: x for x in config["static_resources"]["clusters"]}
    [listener] = config["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    filters = manager["http_filters"]
    [ext_proc] = [x["typed_config"] for x in filters if x["name"].endswith("ext_proc")]
    addresses = {"listener": listener["address"]["socket_address"]}
    return {**clusters, **addresses, "filters": filters, "ext_proc": ext_proc}


def addresses(cluster: dict[str, Any]) -> list[dict[str, Any]]:
    [group] = cluster["load_assignment"]["endpoints"]
    return [x["endpoint"]["address"]["socket_address"] for x in group["lb_endpoints"]]


@contextmanager
def envoy(
    fleet: StubFleet, picker_port: int, folder: Path, change: Change | None = None
) -> Iterator[httpx.Client]:
    """Run Envoy, and yield a client of it."""
    config = yaml.safe_load(CONFIG.read_text())
    parts = parts_of(config)
    parts["listener"] |= {"address": "127.0.0.1", "port_value": 0}
    for address, port in zip(addresses(parts["workers"]), fleet.ports, strict=True):
        address |= {"address": "127.0.0.1", "port_value": port}
    [address] = addresses(parts["router"])
    address["port_value"] = picker_port
    if change is not None:
        change(parts)
    admin = folder / "admin"
    config["admin"] = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": 0}}}
    (folder / "envoy.yaml").write_text(yaml.safe_dump(config))
    command = ["envoy", "-c", str(folder / "envoy.yaml"), "--admin-address-path", str(admin)]
    command += ["--use-dynamic-base-id", "--concurrency", "1", "-l", "error"]
    process = subprocess.Popen(command)
    try:
        until(lambda: admin.exists() and admin.read_text() and process.poll() is None)
        url = f"http://{admin.read_text()}/listeners?format=json"
        until(lambda: httpx.get(url, trust_env=False).json().get("listener_statuses"))
        [listener] = httpx.get(url, trust_env=False).json()["listener_statuses"]
        port = listener["local_address"]["socket_address"]["port_value"]
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=PATIENCE_S
        ) as client:
            yield client
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def fleet() -> Iterator[StubFleet]:
    with StubFleet(2) as found:
        yield found


@pytest.fixture
def start(
    fleet: StubFleet, tmp_path: Path, stack: ExitStack
) -> Callable[..., tuple[RunningRouter, httpx.Client]]:
    """Start a router with these keys, and an Envoy with this change."""

    def begin(
        change: Change | None = None, workers: StubFleet = fleet, **keys: Any
    ) -> tuple[RunningRouter, httpx.Client]:
        config = config_of(tmp_path, workers=workers.urls, ext_proc_port=0, **keys)
        router = stack.enter_context(RunningRouter(config))
        return router, stack.enter_context(envoy(workers, router.picker_port, tmp_path, change))

    return begin


Start = Callable[..., tuple[RunningRouter, httpx.Client]]


def names(fleet: StubFleet) -> list[str]:
    return [url.removeprefix("http://") for url in fleet.urls]


def under_way(router: RunningRouter, fleet: StubFleet) -> float:
    return sum(router.metric("in_flight", worker=x) for x in names(fleet))


def body_modes(request: str, response: str) -> Change:
    def change(parts: dict[str, Any]) -> None:
        mode = parts["ext_proc"]["processing_mode"]
        mode |= {"request_body_mode": request, "response_body_mode": response}

    return change


def original_destination(parts: dict[str, Any]) -> None:
    """Send to the address in the header, whatever it is, as many gateways do."""
    workers = parts["workers"]
    del workers["load_assignment"], workers["load_balancing_policy"]
    header = {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"}
    workers |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
    workers["original_dst_lb_config"] = header


CHANGES = {
    "as_it_is": None,
    "original_dst": original_destination,
    "buffered": body_modes("BUFFERED", "STREAMED"),
    "all_buffered": body_modes("BUFFERED", "BUFFERED"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_answers_are_the_workers_own_byte_for_byte(
    start: Start, fleet: StubFleet, change: Change | None
) -> None:
    router, client = start(change)
    for stream in (True, False):
        for padding in (0, 50_000):
            body = {"prompt": "x" * 300_000, "stream": stream, "stub": {"padding": padding}}
            through = client.post(PATH, json=body)
            worker = through.headers["x-heterocache-worker"]
            assert through.content == httpx.post(f"http://{worker}{PATH}", json=body).content
            assert json.loads(seen(f"http://{worker}")["last_body"]) == body
    models = client.get("/v1/models")
    assert models.json()["data"][0]["id"] == "stub-model"
    until(lambda: under_way(router, fleet) == 0)
    assert router.metric("requests_total", path="completions", status="200") == 4


def test_requests_go_where_the_router_says(start: Start, fleet: StubFleet) -> None:
    _, client = start()
    for _ in range(20):
        answer = client.post(PATH, json={"prompt": "x"})
        worker = answer.headers["x-heterocache-worker"]
        assert answer.json()["served_by"] == f"stub-{names(fleet).index(worker)}"


def test_only_workers_of_the_subset_are_chosen(start: Start, fleet: StubFleet) -> None:
    def change(parts: dict[str, Any]) -> None:
        hint = {"x-gateway-destination-endpoint-subset": ["10.9.9.9:1", names(fleet)[1]]}
        entry = {"metadata_namespace": "envoy.lb.subset_hint", "value": hint}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        config = {"@type": kind, "metadata": [entry]}
        parts["filters"].insert(0, {"name": "set_metadata", "typed_config": config})

    _, client = start(change)
    found = {client.post(PATH, json={"prompt": "x"}).json()["served_by"] for _ in range(6)}
    assert found == {"stub-1"}


def test_refusals_reach_the_client(start: Start) -> None:
    _, client = start(max_in_flight=1, max_queued=0, max_body_mib=1)
    slow = {"prompt": "x", "stream": True, "stub": {"events": 1000, "gap_s": 0.05}}
    with client.stream("POST", PATH, json=slow), client.stream("POST", PATH, json=slow):
        answer = client.post(PATH, json={"prompt": "x"})
        assert answer.status_code == 429
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.headers["x-heterocache-reason"] == "queue_full"
        assert error_of(answer)["type"] == "RateLimitError"
    until(lambda: client.post(PATH, json={"prompt": "x"}).status_code == 200)
    for status, content in ((400, b"{nope"), (413, b" " * 3_000_000), (404, b'{"model": "y"}')):
        answer = client.post(PATH, content=content, headers={"content-type": "application/json"})
        assert answer.status_code == status
    assert client.post(PATH, json={"prompt": "x"}).status_code == 200


def test_a_request_may_wait_for_longer_than_envoys_own_patience(start: Start) -> None:
    _, client = start(max_in_flight=1, max_queued=2)
    slow = {"prompt": "x", "stream": True, "stub": {"events": 20, "gap_s": 0.05}}
    with client.stream("POST", PATH, json=slow) as one, client.stream("POST", PATH, json=slow):
        done = threading.Thread(target=one.read)
        done.start()
        assert client.post(PATH, json={"prompt": "x"}).status_code == 200
        done.join()


def test_a_client_that_leaves_frees_the_ledger(start: Start, fleet: StubFleet) -> None:
    router, client = start()
    slow = {"prompt": "x", "stream": True, "stub": {"events": 10_000, "gap_s": 0.05}}
    aborted = sum(seen(url)["seen"].get("aborted", 0) for url in fleet.urls)
    for _ in range(3):
        with client.stream("POST", PATH, json=slow) as answer:
            parts = answer.iter_raw()  # closing it would close the answer
            next(parts)
            assert under_way(router, fleet) == 1
        until(lambda: under_way(router, fleet) == 0)
    assert router.metric("clients_left_total") == 3
    until(lambda: sum(seen(x)["seen"].get("aborted", 0) for x in fleet.urls) == aborted + 3)


def test_without_the_answers_bodies_requests_count_to_their_ends(
    start: Start, fleet: StubFleet
) -> None:
    router, client = start(body_modes("FULL_DUPLEX_STREAMED", "NONE"))
    slow = {"prompt": "x", "stream": True, "stub": {"events": 10, "gap_s": 0.05}}
    with client.stream("POST", PATH, json=slow) as answer:
        parts = answer.iter_raw()
        next(parts)
        assert under_way(router, fleet) == 1
        assert b"[DONE]" in b"".join(parts)
    until(lambda: under_way(router, fleet) == 0)
    with client.stream("POST", PATH, json=slow | {"stub": {"events": 9_999, "gap_s": 0.05}}):
        assert under_way(router, fleet) == 1
    until(lambda: under_way(router, fleet) == 0)


def test_a_worker_that_is_lost_gets_nothing_for_a_pause(start: Start) -> None:
    with StubFleet(2) as fleet:
        router, client = start(workers=fleet, probe_s=30)
        fleet.processes[0].kill()
        fleet.processes[0].wait()
        found = [client.post(PATH, json={"prompt": "x"}).status_code for _ in range(40)]
        assert 1 <= found.count(503) < 15, "one client found it, and one after each pause"
        assert found.count(200) + found.count(503) == 40
        assert under_way(router, fleet) == 0


def test_another_worker_computes_the_prompt(
    fleet: StubFleet, tmp_path: Path, stack: ExitStack
) -> None:
    known = stack.enter_context(running(fleet, tmp_path, "static_pd", ROLES, ext_proc_port=0))
    for number, change in enumerate((None, body_modes("BUFFERED", "STREAMED"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        with envoy(fleet, known.router.picker_port, folder, change) as client:
            answer = client.post(PATH, json={"prompt": PROMPT, "stream": True})
        assert answer.headers["x-heterocache-worker"] == known.names[1]
        assert f"prefill={known.names[0]}" in answer.headers["x-heterocache-placement"]
        assert last_body(fleet, 0)["max_tokens"] == 1
        assert last_body(fleet, 1)["kv_transfer_params"]["do_remote_prefill"]


@pytest.mark.parametrize("is_open", [False, True])
def test_without_the_router_envoy_does_as_its_failure_mode_says(
    fleet: StubFleet, tmp_path: Path, stack: ExitStack, is_open: bool
) -> None:
    def change(parts: dict[str, Any]) -> None:
        if is_open:  # bodies that Envoy has sent away cannot be sent again
            body_modes("BUFFERED", "STREAMED")(parts)
            parts["ext_proc"]["failure_mode_allow"] = True

    reserved = stack.enter_context(socket.socket())
    for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
        reserved.setsockopt(socket.SOL_SOCKET, option, 1)
    reserved.bind(("127.0.0.1", 0))  # it never listens: the port is kept for the router
    port = reserved.getsockname()[1]
    keys = {"host": "127.0.0.1", "port": 0, "workers": fleet.urls, "ext_proc_port": port}
    (tmp_path / "fleet.yaml").write_text(yaml.safe_dump(keys))
    command = [sys.executable, "-m", "hetero_connector.tools.cli", "router", "--config"]
    router = subprocess.Popen([*command, str(tmp_path / "fleet.yaml")], cwd=ROOT)
    stack.callback(router.wait)
    stack.callback(router.kill)
    with envoy(fleet, port, tmp_path, change) as client:
        until(lambda: "x-heterocache-worker" in client.post(PATH, json={"prompt": "x"}).headers)
        slow = {"prompt": "x", "stream": True, "stub": {"events": 10, "gap_s": 0.05}}
        with client.stream("POST", PATH, json=slow) as answer:
            parts = answer.iter_raw()
            next(parts)
            router.kill()
            router.wait()
            if is_open:
                assert b"[DONE]" in b"".join(parts)
            else:
                with pytest.raises(httpx.RemoteProtocolError):
                    list(parts)
        after = client.post(PATH, json={"prompt": "x"})
        assert "x-heterocache-worker" not in after.headers
        assert after.status_code == (200 if is_open else 500)


def test_the_messages_have_envoys_own_numbers_and_types() -> None:
    script = Path(__file__).with_name("envoy_messages.py")
    environment = {"PYTHONPATH": os.environ["XDS_PROTOS"]}
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, check=True
    )
    theirs = json.loads(done.stdout)
    checked = 0
    for name, fields in SCHEMA.items():
        if name.startswith("HealthCheck"):
            continue
        for line in filter(None, ", ".join(fields).split(", ")):
            *label, kind, field, _, number = line.split()
            assert theirs[name][field] == [int(number), bool(label), kind], (name, field)
            checked += 1
    assert checked > 40
