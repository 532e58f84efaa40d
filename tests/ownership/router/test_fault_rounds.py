"""Seeded rounds of faults: each request ends whole or with an error, none is silent, none hangs."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from benchmarks.stub_fleet import StubFleet
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of, wait_until

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
}


class Client:
    """Sends requests of all kinds and checks how each ends."""

    def __init__(self, session: aiohttp.ClientSession, router: RunningRouter) -> None:
        self._session, self._router = session, router
        self.ends: Counter[str] = Counter()

    async def send(self, rng: random.Random) -> None:
        kind = rng.choice((self.stream, self.stream, self.plain, self.leave, self.misfit, self.big))
        path, fault = rng.choice(PATHS), rng.choice(FAULTS)
        stub = {"events": rng.choice((1, 8, 40)), "gap_s": rng.choice((0.0, 0.01)), "fault": fault}
        stub["first_s"] = rng.choice((0.0, 0.2))
        self.ends[await asyncio.wait_for(kind(path, stub), PATIENCE_S)] += 1

    @asynccontextmanager
    async def post(self, path: str, body: Any) -> AsyncIterator[aiohttp.ClientResponse]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self._session.post(self._router.url + path, data=BytesIO(data)) as answer:
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


async def harm(rng: random.Random, fleet: StubFleet) -> None:
    """Kill a worker and start it again, or stop it for a while, or nothing."""
    number = rng.randrange(len(fleet.ports))
    deed = rng.choice(("kill", "stop", "nothing"))
    await asyncio.sleep(rng.random() * 0.3)
    if deed == "kill":
        fleet.processes[number].kill()
        fleet.processes[number].wait()
        await asyncio.to_thread(fleet.restart, number)
    elif deed == "stop":
        os.kill(fleet.processes[number].pid, signal.SIGSTOP)
        await asyncio.sleep(1.5)
        os.kill(fleet.processes[number].pid, signal.SIGCONT)


async def play(rng: random.Random, fleet: StubFleet, client: Client, rounds: int) -> None:
    for _ in range(rounds):
        await asyncio.gather(harm(rng, fleet), *(client.send(rng) for _ in range(AT_ONCE)))


def run(seed: int, rounds: int, folder: Path) -> Counter[str]:
    async def story() -> Counter[str]:
        unlimited = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=unlimited) as session:
            client = Client(session, router)
            await play(random.Random(seed), fleet, client, rounds)
            return client.ends

    with (
        StubFleet(3) as fleet,
        RunningRouter(config_of(folder, workers=fleet.urls, **KEYS)) as router,
    ):
        ends = asyncio.run(story())
        wait_until(lambda: set(router.states().values()) == {"up"})
        for name in router.states():
            wait_until(lambda name=name: router.metric("in_flight", worker=name) == 0)
        assert router.metric("queued") == 0
        wait_until(lambda: router.complete().status_code == 200)
    return ends


def test_no_request_is_silent_and_none_hangs(tmp_path: Path) -> None:
    ends = run(seed=20, rounds=12, folder=tmp_path)
    assert sum(ends.values()) == 12 * AT_ONCE
    assert {"whole", "cut, and told", "worker_lost", "left", "malformed", "too large"} <= set(ends)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_silent_and_none_hangs_in_300_rounds(seed: int, tmp_path: Path) -> None:
    ends = run(seed, rounds=100, folder=tmp_path)
    assert sum(ends.values()) == 100 * AT_ONCE
