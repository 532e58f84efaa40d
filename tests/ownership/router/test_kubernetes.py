"""Workers found by a Service's EndpointSlices, on a stub of Kubernetes' API server."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import aiohttp
import pytest
import trustme

from benchmarks.stub_fleet import StubFleet
from hetero_connector.errors import RouterConfigError
from ownership.router import kubernetes
from ownership.router.config import WorkerAddress
from ownership.router.config_values import KubernetesService
from ownership.router.kubernetes import EndpointSlices
from tests.ownership.router.bench import RunningRouter, config_of
from tests.waiting import until

TOKEN = "a.service.account"


class ApiServer:
    """Answers one question, over TLS and to one token, compressed if it may be."""

    def __init__(self, folder: Path) -> None:
        self.slices: list[dict[str, Any]] = []
        self.is_allowed = True
        self.asked = self.connections = 0
        self.account = folder / "account"
        self.account.mkdir()
        authority = trustme.CA()
        authority.cert_pem.write_to_path(str(self.account / "ca.crt"))
        (self.account / "token").write_text(TOKEN + "\n")
        (self.account / "namespace").write_text("mine")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"  # it keeps connections

            def setup(self) -> None:
                super().setup()
                outer.connections += 1

            def do_GET(self) -> None:
                status, answer = outer.answer(self.path, self.headers.get("authorization"))
                body = json.dumps(answer).encode()
                self.send_response(status)
                if "gzip" in self.headers.get("accept-encoding", ""):
                    body = gzip.compress(body)
                    self.send_header("content-encoding", "gzip")
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def answer(self, path: str, authorization: str | None) -> tuple[int, Any]:
        self.asked += 1
        if authorization != f"Bearer {TOKEN}":
            return 401, {"kind": "Status"}
        if not self.is_allowed:
            return 403, {"kind": "Status"}
        parts = urlsplit(path)
        labels = parse_qs(parts.query).get("labelSelector")
        assert labels == ["kubernetes.io/service-name=llm"], "any other Service has no slices"
        known = parts.path == "/apis/discovery.k8s.io/v1/namespaces/mine/endpointslices"
        return 200, {"kind": "EndpointSliceList", "items": self.slices if known else []}


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ApiServer]:
    server = ApiServer(tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(server.server.server_port))
    monkeypatch.setattr(kubernetes, "ACCOUNT", server.account)
    yield server
    server.server.shutdown()
    server.server.server_close()


def pod(name: str, host: str, **conditions: bool | None) -> dict[str, Any]:
    about = {"addresses": [host], "conditions": conditions, "nodeName": "n", "zone": "z"}
    return about | {"targetRef": {"kind": "Pod", "name": name, "namespace": "mine"}}


def slice_of(*pods: dict[str, Any], kind: str = "IPv4", port: int = 8000) -> dict[str, Any]:
    ports = [{"name": "grpc", "port": 1}, {"name": "http", "port": port, "protocol": "TCP"}]
    return {"addressType": kind, "endpoints": list(pods), "ports": ports, "metadata": {"name": "x"}}


def found(api: ApiServer, service: KubernetesService) -> list[WorkerAddress]:
    async def ask() -> list[WorkerAddress]:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            return await EndpointSlices(service, session, api.account).workers()

    return asyncio.run(ask())


def test_ready_pods_are_workers_and_those_that_end_drain(api: ApiServer) -> None:
    api.slices = [
        slice_of(pod("six", "fd00::6", ready=True), pod("a", "fd00::1", ready=True), kind="IPv6"),
        slice_of(
            pod("a", "10.0.0.1", ready=True, serving=True, terminating=False),
            pod("starting", "10.0.0.2", ready=False, serving=False, terminating=False),
            pod("ending", "10.0.0.3", ready=False, serving=True, terminating=True),
            pod("ended", "10.0.0.4", ready=False, serving=False, terminating=True),
            pod("unknown", "10.0.0.5", ready=None),
        ),
        {"addressType": "IPv4", "endpoints": None, "ports": None},
    ]
    expected = [
        WorkerAddress("a", "http://10.0.0.1:8000"),
        WorkerAddress("ending", "http://10.0.0.3:8000", is_draining=True),
        WorkerAddress("six", "http://[fd00::6]:8000"),
        WorkerAddress("unknown", "http://10.0.0.5:8000"),
    ]
    for service in [KubernetesService("", "llm", "http"), KubernetesService("mine", "llm", "8000")]:
        assert found(api, service) == expected
    assert found(api, KubernetesService("mine", "llm"))[0].url == "http://10.0.0.1:1"
    assert found(api, KubernetesService("mine", "llm", "none")) == []
    assert found(api, KubernetesService("other", "llm")) == []


def test_a_refusal_says_what_to_change(api: ApiServer) -> None:
    api.is_allowed = False
    with pytest.raises(ValueError, match="403: the pod's service account needs a Role"):
        found(api, KubernetesService("", "llm"))
    (api.account / "token").write_text("old")
    with pytest.raises(ValueError, match="401"):
        found(api, KubernetesService("", "llm"))
    (api.account / "ca.crt").write_bytes(trustme.CA().cert_pem.bytes())
    with pytest.raises(OSError, match="certificate"):
        found(api, KubernetesService("", "llm"))


def test_one_connection_is_kept_until_the_authority_is_replaced(api: ApiServer) -> None:
    async def ask() -> None:
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            slices = EndpointSlices(KubernetesService("", "llm"), session, api.account)
            await slices.workers()
            await slices.workers()
            assert api.connections == 1
            file = api.account / "ca.crt"
            file.write_bytes(trustme.CA().cert_pem.bytes())
            os.utime(file, ns=(1, 1))
            with pytest.raises(OSError, match="certificate"):
                await slices.workers()

    asyncio.run(ask())


def test_wrong_services_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for wrong, told in [("llm", "works in a pod only"), ("a/b/c", "expected"), (5, "expected")]:
        with pytest.raises(RouterConfigError, match=told):
            config_of(tmp_path, workers_kubernetes=wrong)


@contextmanager
def routed(folder: Path) -> Iterator[RunningRouter]:
    with RunningRouter(config_of(folder, workers_kubernetes="llm:http"), num_ready=1) as router:
        yield router


def test_pods_come_drain_and_go_and_an_api_server_that_fails_takes_none_away(
    api: ApiServer, fleet: StubFleet, tmp_path: Path
) -> None:
    one, two = (slice_of(pod(f"pod-{x}", "127.0.0.1", ready=True), port=x) for x in fleet.ports)
    api.slices = [one]
    first, second = (f"pod-{port}" for port in fleet.ports)
    with routed(tmp_path) as router:
        assert router.complete().headers["x-heterocache-worker"] == first
        api.slices = [one, two]
        until(lambda: router.states() == {first: "up", second: "up"})
        one["endpoints"][0]["conditions"] = {"ready": False, "serving": True, "terminating": True}
        until(lambda: {worker(router) for _ in range(6)} == {second})
        assert router.states() == {first: "up", second: "up"}
        api.is_allowed = False
        asked = api.asked
        until(lambda: api.asked > asked + 3)
        assert worker(router) == second
        api.is_allowed, api.slices = True, [two]
        until(lambda: router.states() == {second: "up"})


def worker(router: RunningRouter) -> str:
    answer = router.complete()
    assert answer.status_code == 200
    return str(answer.headers["x-heterocache-worker"])
