"""Seeded rounds of faults: each request ends whole or with an error, none is silent, none hangs.

`python -m tests.ownership.router.fault_rounds --rounds 300` plays them and prints how the requests
ended. In a round twelve requests of all kinds are sent while a worker is killed or stopped, Redis
is replaced by an empty one (with `--sentinel` by its replica, which a Sentinel promotes), or the
second of two routers is killed. Clients leave, send what is no JSON or 10 MB, or never read.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from benchmarks.stub_fleet import StubFleet
from examples.embedded_redis import EmbeddedRedis
from tests.ownership.directory.redis.sentinel_fleet import SentinelFleet
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.ownership.router.test_guide import free_ports
from tests.waiting import until

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
FAULTS = (None, None, None, "refuse", "lose", "cut")
REFUSED = frozenset({429, 502, 503})
AT_ONCE = 12
KEYS = {
    "probe_timeout_s": 0.3,
    "max_in_flight": 4,
    "max_queued": 4,
    "queue_s": 3.0,
    "max_body_mib": 12.0,
    "client_s": 6.0,  # longer than a client of a busy machine is kept from sending
}
_UNREAD = {"events": 1_000, "padding": 100_000}


class LoneRedis(EmbeddedRedis):
    """One server."""

    def lose(self, pause_s: float) -> None:
        """Kill it, and start it empty after a pause."""
        self.kill()
        time.sleep(pause_s)
        self.start()


class SecondRouter:
    """A router in a process of its own, to be killed."""

    def __init__(self, folder: Path, workers: list[str], directory: str) -> None:
        (port,) = free_ports(1)
        keys = {"host": "127.0.0.1", "port": int(port), "workers": workers, "directory": directory}
        self._config = folder / "second.yaml"
        self._config.write_text(json.dumps(keys | KEYS))
        self.url = f"http://127.0.0.1:{port}"
        self.kills = 0
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "hetero_connector.tools.cli", "router", "--config"]
        self._process = subprocess.Popen([*command, str(self._config)], stderr=subprocess.DEVNULL)

    def kill(self) -> None:
        self.kills += 1
        self._process.kill()
        self._process.wait()

    def is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=PATIENCE_S).status_code == 200
        except httpx.TransportError:
            return False


class Client:
    """Sends requests of all kinds and checks how each ends."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session, self._url = session, url
        self.ends: Counter[str] = Counter()
        self._unread: list[socket.socket] = []

    async def send(self, rng: random.Random, second: SecondRouter) -> None:
        kinds = (self.stream, self.stream, self.plain, self.leave, self.misfit, self.big)
        kind = rng.choice(kinds if rng.random() < 0.95 else (self.never_read,))
        path, fault = rng.choice(PATHS), rng.choice(FAULTS)
        gap_s = rng.choice((0.0, 0.01, 0.05))
        stub = {"events": rng.choice((1, 8, 40)), "gap_s": gap_s, "fault": fault}
        stub["first_s"] = rng.choice((0.0, 0.2))
        if rng.random() < 0.2:
            end = await asyncio.wait_for(self._to_second(second, path, stub), PATIENCE_S)
        else:
            end = await asyncio.wait_for(kind(path, stub), PATIENCE_S)
        self.ends[end] += 1

    def close(self) -> None:
        for connection in self._unread:
            connection.close()

    async def _to_second(self, second: SecondRouter, path: str, stub: dict[str, Any]) -> str:
        """A router that is killed ends its connections, and no others do."""
        kills, client = second.kills, Client(self._session, second.url)
        try:
            return await client.stream(path, stub)
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            assert kills or second.kills, "a connection ended"
            return "router killed"

    async def never_read(self, path: str, stub: dict[str, Any]) -> str:
        """The router ends such a request; the connection stays open here."""
        body = json.dumps({"stream": True, "stub": _UNREAD}).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        url = httpx.URL(self._url)
        connection = socket.create_connection((url.host, url.port or 80))
        connection.sendall(head.encode() + body)
        self._unread.append(connection)
        return "never read"

    @asynccontextmanager
    async def post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(self._url + path, data=BytesIO(data)) as answer:
            yield answer

    async def stream(self, path: str, stub: dict[str, Any]) -> str:
        async with self.post(path, {"stream": True, "stub": stub}) as answer:
            content = await answer.read()
            if answer.status != 200:
                return self.refused(answer, content)
        events = content.decode().rstrip("\n").split("\n\n")
        if events[-1] == "data: [DONE]":
            assert len(events) == stub["events"] + 1
            return "whole"
        error = json.loads(events[-1].rpartition("data: ")[2])
        assert "error" in {*error, error.get("type")}
        assert all("choices" in json.loads(x.removeprefix("data: ")) for x in events[:-1])
        return "cut, and told"

    async def plain(self, path: str, stub: dict[str, Any]) -> str:
        async with self.post(path, {"stub": stub}) as answer:
            content = await answer.read()
            if answer.status != 200:
                return self.refused(answer, content)
        text = json.loads(content)["choices"][0]["text"]
        assert len(text.split()) == stub["events"]
        return "whole"

    async def leave(self, path: str, stub: dict[str, Any]) -> str:
        async with self.post(path, {"stream": True, "stub": stub | {"gap_s": 0.5}}) as answer:
            await answer.content.readany()
            answer.close()
        return "left"

    async def misfit(self, path: str, stub: dict[str, Any]) -> str:
        async with self.post(path, b'{"stub": [' * stub["events"]) as answer:
            assert answer.status == 400
            assert "error" in await answer.json()
        return "malformed"

    async def big(self, path: str, stub: dict[str, Any]) -> str:
        """10 MB are sent, 13 are too many."""
        size = 10_000_000 if stub["events"] == 8 else 13_000_000
        try:
            async with self.post(path, {"prompt": "x" * size, "stub": stub}) as answer:
                content = await answer.read()
                assert (answer.status == 413) == (size > 12 * 2**20)
                return "too large" if answer.status == 413 else self.refused(answer, content)
        except aiohttp.ClientConnectionError:  # closed while it was sending
            assert size > 12 * 2**20
            return "too large"

    def refused(self, answer: aiohttp.ClientResponse, content: bytes) -> str:
        if answer.status == 200:
            return "whole"
        assert answer.status in REFUSED, content
        assert json.loads(content)["error"]["message"]
        if answer.status == 429:
            assert int(answer.headers["retry-after"]) >= 1
        return answer.headers.get("x-heterocache-reason", "the worker's own")


async def harm(
    rng: random.Random, fleet: StubFleet, redis: LoneRedis | SentinelFleet, second: SecondRouter
) -> str:
    """Do one of the deeds, or nothing; return which."""
    number = rng.randrange(len(fleet.ports))
    deed = rng.choice(("kill a worker", "stop a worker", "lose Redis", "kill a router", "nothing"))
    await asyncio.sleep(rng.random() * 0.3)
    if deed == "kill a worker":
        fleet.processes[number].kill()
        fleet.processes[number].wait()
        await asyncio.to_thread(fleet.restart, number)
    elif deed == "stop a worker":
        os.kill(fleet.processes[number].pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(fleet.processes[number].pid, signal.SIGCONT)
    elif deed == "lose Redis":
        await asyncio.to_thread(redis.lose, rng.random())
    elif deed == "kill a router":
        await asyncio.to_thread(second.kill)
        second.start()
        await asyncio.to_thread(until, second.is_ready)
    return deed


async def play(
    rng: random.Random,
    rounds: int,
    client: Client,
    fleet: StubFleet,
    redis: LoneRedis | SentinelFleet,
    second: SecondRouter,
) -> Counter[str]:
    """Play the rounds; return the deeds."""
    deeds = Counter[str]()
    for _ in range(rounds):
        requests = (client.send(rng, second) for _ in range(AT_ONCE))
        deed, *_ = await asyncio.gather(harm(rng, fleet, redis, second), *requests)
        deeds[deed] += 1
    return deeds


def run(
    seed: int, rounds: int, folder: Path, *, with_sentinel: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Return how the requests ended, and what was done meanwhile.

    Raises AssertionError if one ends silently or something is left over, TimeoutError if one hangs.
    """

    async def story() -> tuple[Client, Counter[str]]:
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=unlimited) as session:
            client = Client(session, router.url)
            return client, await play(random.Random(seed), rounds, client, fleet, redis, second)

    with SentinelFleet() if with_sentinel else LoneRedis() as redis, StubFleet(3) as fleet:
        keys = {"workers": fleet.urls, "directory": redis.url, **KEYS}
        with RunningRouter(config_of(folder, **keys)) as router:
            second = SecondRouter(folder, fleet.urls, redis.url)
            try:
                until(second.is_ready)
                client, deeds = asyncio.run(story())
                until(lambda: set(router.states().values()) == {"up"})
                for name in router.states():
                    until(lambda name=name: router.metric("in_flight", worker=name) == 0)
                assert router.metric("queued") == 0
                until(lambda: router.complete().status_code == 200)
                until(second.is_ready)
                until(lambda: router.metric("peers") == 1)
                client.close()
            finally:
                second.kill()
    return client.ends, deeds


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.ownership.router.fault_rounds")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--sentinel", action="store_true", help="Redis fails over to a replica")
    given = parser.parse_args()
    begun_s = time.monotonic()
    silent, hung, ends, deeds = 0, 0, Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        try:
            ends, deeds = run(given.seed, given.rounds, Path(folder), with_sentinel=given.sentinel)
        except TimeoutError:
            hung = 1
        except AssertionError as error:
            silent = 1
            print(f"not as it must be: {error}")
    found = {"rounds": given.rounds, "seed": given.seed, "silent": silent, "hung": hung}
    found |= {"seconds": round(time.monotonic() - begun_s), "ends": ends, "deeds": deeds}
    print(json.dumps(found))
    sys.exit(silent or hung)


if __name__ == "__main__":
    main()
