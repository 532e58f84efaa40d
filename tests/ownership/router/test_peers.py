"""Routers that share their load through a real Redis, which fails, and one that is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from examples.embedded_redis import EmbeddedRedis
from ownership.directory.redis import RedisMessageLog
from ownership.directory.redis.message_log import BEGIN
from tests.ownership.redis_bench import new_fleet, shared_server
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.ownership.router.test_guide import CLI, free_ports
from tests.waiting import until

LONG = {"stream": True, "stub": {"events": 10_000, "gap_s": 0.05}}


class TestMessageLog:
    @pytest.fixture
    def url(self) -> str:
        return f"{shared_server().url}?fleet={new_fleet()}"

    def test_messages_are_read_once_and_in_order(self, url: str) -> None:
        one, other = RedisMessageLog(url, 30.0), RedisMessageLog(url, 30.0)
        first = one.exchange(b"a\xff", BEGIN)
        assert [x.content for x in first.messages] == [b"a\xff"]
        assert one.exchange(b"", first.cursor) == ([], first.cursor, False)
        one.exchange(b"b", first.cursor)
        found = other.exchange(b"c", BEGIN)
        assert [x.content for x in found.messages] == [b"a\xff", b"b", b"c"]
        assert [x.age_s for x in found.messages][-1] == 0.0
        assert not found.has_more

    def test_a_server_that_has_lost_messages_is_read_from_its_first(self) -> None:
        with EmbeddedRedis() as server:
            log = RedisMessageLog(server.url, 30.0)
            after = log.exchange(b"a", BEGIN).cursor
            ahead = f"{int(after.split('-')[0]) + 60_000}-0"
            found = log.exchange(b"b", ahead)
            assert found == ([], BEGIN, False)
            assert [x.content for x in log.exchange(b"", found.cursor).messages] == [b"a", b"b"]
            log.close()


@contextmanager
def two_routers(
    fleet: StubFleet, folder: Path, directory: str
) -> Iterator[tuple[RunningRouter, RunningRouter]]:
    with ExitStack() as stack:
        found = []
        for name in "xy":
            (folder / name).mkdir()
            config = config_of(
                folder / name, workers=fleet.urls, directory=directory, directory_s=5.0
            )
            found.append(stack.enter_context(RunningRouter(config)))
        until(lambda: all(x.metric("peers") == 1 for x in found))
        yield found[0], found[1]


@contextmanager
def long_stream(router: RunningRouter) -> Iterator[str]:
    """Keep a request under way; yield its worker."""
    with router.client.stream("POST", "/v1/completions", json=LONG) as answer:
        parts = answer.iter_raw()  # the connection ends with it
        next(parts)
        yield answer.headers["x-heterocache-worker"]


def placed(router: RunningRouter) -> tuple[str, str]:
    """Return the worker of a short request, and the placement's header."""
    answer = router.complete(prompt="x")
    assert answer.status_code == 200, answer.text
    headers = answer.headers
    return headers["x-heterocache-worker"], headers["x-heterocache-placement"]


def test_two_routers_place_by_the_load_of_both(fleet: StubFleet, tmp_path: Path) -> None:
    url = f"{shared_server().url}?fleet={new_fleet()}"
    with two_routers(fleet, tmp_path, url) as (one, other), ExitStack() as stack:
        busy = stack.enter_context(long_stream(one))
        until(lambda: other.metric("peer_requests") == 1)
        assert {placed(other)[0] for _ in range(4)} == {x[7:] for x in fleet.urls} - {busy}
        assert "peer" not in placed(other)[1]


def test_without_redis_each_router_goes_on_and_says_so_and_heals(
    fleet: StubFleet, tmp_path: Path
) -> None:
    with EmbeddedRedis() as server, two_routers(fleet, tmp_path, server.url) as routers:
        server.kill()
        for router in routers:
            until(lambda router=router: "peers_lost" in placed(router)[1])
            until(lambda router=router: router.metric("peers") == 0)
        with long_stream(routers[0]):
            server.start()
            until(lambda: routers[1].metric("peer_requests") == 1)
            for router in routers:
                until(lambda router=router: "peer" not in placed(router)[1])


def start(folder: Path, **keys: Any) -> tuple[subprocess.Popen[bytes], str]:
    """Start a router in a process of its own; return it and its URL."""
    (port,) = free_ports(1)
    folder.mkdir()
    config = folder / "fleet.yaml"
    config.write_text(json.dumps({"host": "127.0.0.1", "port": int(port), "probe_s": 0.1} | keys))
    command = [sys.executable, "-m", CLI, "router", "--config", str(config)]
    return subprocess.Popen(command), f"http://127.0.0.1:{port}"


def peer_requests(url: str) -> float:
    name = "heterocache_router_peer_requests "
    lines = httpx.get(f"{url}/metrics", timeout=PATIENCE_S).text.splitlines()
    return float(next(x.removeprefix(name) for x in lines if x.startswith(name)))


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=PATIENCE_S).status_code == 200
    except httpx.TransportError:
        return False


def test_when_a_router_is_killed_its_peer_goes_on_without_its_load(
    fleet: StubFleet, tmp_path: Path
) -> None:
    url = f"{shared_server().url}?fleet={new_fleet()}"
    keys = {"workers": fleet.urls, "directory": url}
    (killed, one), (left, other) = (start(tmp_path / x, **keys) for x in "xy")
    try:
        until(lambda: is_ready(one) and is_ready(other))
        ended = threading.Event()

        def ask() -> None:
            with (
                pytest.raises(httpx.TransportError),
                httpx.stream("POST", f"{one}/v1/completions", json=LONG, timeout=60) as answer,
            ):
                answer.read()
            ended.set()

        threading.Thread(target=ask).start()
        until(lambda: peer_requests(other) == 1)
        os.kill(killed.pid, signal.SIGKILL)
        assert ended.wait(PATIENCE_S)
        until(lambda: peer_requests(other) == 0)
        for _ in range(8):
            answer = httpx.post(f"{other}/v1/completions", json={"prompt": "x"}, timeout=60)
            assert answer.status_code == 200
            assert "peer" not in answer.headers["x-heterocache-placement"]
    finally:
        for process in (killed, left):
            process.terminate()
            process.wait()
