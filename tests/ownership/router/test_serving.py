"""Several processes on one port: all serve, one that ends is started again, all end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from benchmarks.stub_fleet import StubFleet
from ownership.router import serving
from tests.ownership.router.bench import PATIENCE_S, config_of
from tests.ownership.router.test_guide import CLI, free_ports
from tests.waiting import until

pytestmark = pytest.mark.long


def _is_listening(process: psutil.Process) -> bool:
    try:
        return any(c.status == psutil.CONN_LISTEN for c in process.net_connections())
    except psutil.NoSuchProcess:
        return False  # it has just ended


def test_less_than_a_second_to_end_is_time_to_end(tmp_path: Path) -> None:
    config = config_of(tmp_path, workers=["http://127.0.0.1:9"], drain_s=0.9)
    assert serving.make_server(config).config.timeout_graceful_shutdown == 1


class Child:
    """A process that has started."""

    def __init__(self) -> None:
        self.sentinel, self._open = os.pipe()
        self.terminated = False

    def is_alive(self) -> bool:
        return True

    def terminate(self) -> None:
        self.terminated = True

    def join(self, timeout: float) -> None:
        assert self.terminated

    def kill(self) -> None:
        for file in (self.sentinel, self._open):
            os.close(file)


def test_a_signal_while_processes_start_ends_those_that_have_and_starts_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", "")  # it is set for the children
    monkeypatch.setattr(signal, "signal", lambda number, act: None)
    config = config_of(tmp_path, workers=["http://127.0.0.1:9"])
    started = list[Child]()
    with socket.socket() as listener:
        parent = serving._Processes(config, 0, 3, listener)

        class Starting(Child):
            def start(self) -> None:
                started.append(self)
                parent._end(signal.SIGTERM, None)

        monkeypatch.setattr(parent._context, "Process", lambda **given: Starting())
        parent.run()
    assert [child.terminated for child in started] == [True]


class Processes:
    """`heterocache router --processes 2`."""

    def __init__(self, folder: Path, workers: list[str]) -> None:
        (port,) = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        self.config = config = folder / "fleet.yaml"
        keys = {"workers": workers, "host": "127.0.0.1", "port": int(port), "probe_s": 0.1}
        config.write_text(json.dumps(keys))
        command = [sys.executable, "-m", CLI, "router", "--config", str(config)]
        self.parent = subprocess.Popen([*command, "--processes", "2"])

    def serving(self) -> list[psutil.Process]:
        """Return the processes that have the port open."""
        return [x for x in psutil.Process(self.parent.pid).children() if _is_listening(x)]

    def complete(self) -> int:
        """Send a request over a connection of its own."""
        return httpx.post(f"{self.url}/v1/completions", json={}, timeout=PATIENCE_S).status_code

    def fleet(self) -> Any:
        """Return what one of the processes shows of the fleet."""
        return httpx.get(f"{self.url}/v1/heterocache/fleet", timeout=PATIENCE_S).json()

    def counted(self) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        name = 'heterocache_router_requests_total{path="completions",status="200"} '
        return sum(float(x.removeprefix(name)) for x in lines if x.startswith(name))


@contextmanager
def running(folder: Path, workers: list[str]) -> Iterator[Processes]:
    router = Processes(folder, workers)
    try:
        until(lambda: len(router.serving()) == 2)
        until(lambda: Counter(router.complete() for _ in range(8))[200] == 8)
        yield router
    finally:
        router.parent.kill()
        router.parent.wait()


@pytest.fixture(scope="module")
def router(fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with running(tmp_path_factory.mktemp("router"), fleet.urls) as processes:
        yield processes


def test_all_processes_serve_and_are_counted_together(router: Processes) -> None:
    before = router.counted()
    used = {x.pid: x.num_ctx_switches().voluntary for x in router.serving()}
    for _ in range(40):
        assert router.complete() == 200
    assert router.counted() == before + 40
    assert all(x.num_ctx_switches().voluntary > used[x.pid] for x in router.serving())


def test_each_process_shows_its_own_requests_and_says_so(router: Processes) -> None:
    shown = dict[int, Any]()

    def are_both_shown() -> bool:
        fleet = router.fleet()
        assert fleet["router"]["processes"] == 2
        rows = [x for x in fleet["counts"]["requests"] if x["path"] == "completions"]
        answered = sum(x["count"] for x in rows if x["status"] == "200")
        shown[fleet["router"]["process"]] = answered
        return len(shown) == 2 and sum(shown.values()) == router.counted()

    until(are_both_shown)
    assert shown.keys() == {x.pid for x in router.serving()}


def test_a_process_that_ends_is_started_again(router: Processes) -> None:
    router.config.write_text("a change that is not complete: [")
    one, other = (x.pid for x in router.serving())
    os.kill(one, signal.SIGKILL)
    until(lambda: {x.pid for x in router.serving()} - {one, other})
    until(lambda: Counter(router.complete() for _ in range(8))[200] == 8)


def assert_none_is_left(router: Processes, number: signal.Signals) -> None:
    children = router.serving()
    router.parent.send_signal(number)
    router.parent.wait(PATIENCE_S)
    _, left = psutil.wait_procs(children, PATIENCE_S)
    assert not left


def test_no_process_is_left_after_sigterm(router: Processes) -> None:
    """The last test of this router."""
    assert_none_is_left(router, signal.SIGTERM)


def test_no_process_is_left_when_the_parent_is_killed(fleet: StubFleet, tmp_path: Path) -> None:
    with running(tmp_path, fleet.urls) as router:
        assert_none_is_left(router, signal.SIGKILL)


def test_clients_beyond_the_open_files_take_none_from_requests(
    fleet: StubFleet, tmp_path: Path
) -> None:
    """Else a router reaches its workers no more, and takes them to be down."""
    (port,) = free_ports(1)
    config = tmp_path / "fleet.yaml"
    keys = {"workers": fleet.urls, "host": "127.0.0.1", "port": int(port), "probe_s": 0.1}
    config.write_text(json.dumps(keys))
    limited = 'ulimit -n 400; exec "$@"'
    command = [sys.executable, "-m", CLI, "router", "--config", str(config)]
    router = subprocess.Popen(["/bin/sh", "-c", limited, "router", *command])
    url = f"http://127.0.0.1:{port}"

    def is_ready() -> bool:
        try:
            return httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False

    def complete(client: httpx.Client) -> int:
        return client.post("/v1/completions", json={"stub": {"first_s": 0.5}}).status_code

    try:
        until(is_ready)
        with ExitStack() as stack:
            limits = httpx.Limits(keepalive_expiry=None)
            clients = [
                httpx.Client(base_url=url, timeout=PATIENCE_S, limits=limits) for _ in "1234"
            ]
            for client in clients:
                stack.enter_context(client).get("/health")
            for _ in range(500):
                stack.enter_context(socket.create_connection(("127.0.0.1", int(port)), PATIENCE_S))
            threads = stack.enter_context(ThreadPoolExecutor(len(clients)))
            assert list(threads.map(complete, clients)) == [200] * len(clients)
            assert set(clients[0].get("/ready").json()["workers"].values()) == {"up"}
    finally:
        router.kill()
        router.wait()
