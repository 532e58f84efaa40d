"""`python -m benchmarks.http_clients [--json]`: CPU time of a stream by HTTP client.

Each client streams answers of 16 events, 20 ms apart, from a stub worker, 32 at a time, by
turns. The figures are CPU seconds of this process, not of the clock, so a busy machine disturbs
them little. `*_us`: microseconds for a stream, the median of the turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import statistics
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import cast

import aiohttp
import h11
import httptools
import httpx
import uvloop

from benchmarks.measure import machine_line, publish, rounded, table
from benchmarks.stub_fleet import StubFleet

_GAP_S = 0.02
"""Between two events, so that each comes by itself, as from an engine."""
_BODY = json.dumps({"stream": True, "prompt": "x" * 2000, "stub": {"gap_s": _GAP_S}}).encode()
_PATH = "/v1/completions"
_HEADERS = {"content-type": "application/json"}
_AT_ONCE = 32

Stream = Callable[[], Awaitable[int]]
"""Streams one answer; returns its bytes."""


class _Raw(asyncio.Protocol):
    """One connection without pool, limit, timeout or back-pressure: httptools' lower limit."""

    def __init__(self) -> None:
        self._arrived = asyncio.Event()
        self._parts: list[bytes] = []
        self._is_complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)
        self._arrived.set()

    def on_body(self, body: bytes) -> None:
        self._parts.append(body)

    def on_message_complete(self) -> None:
        self._is_complete = True

    async def stream(self, request: bytes) -> int:
        self._parser, self._is_complete = httptools.HttpResponseParser(self), False
        self._transport.write(request)
        size = 0
        while not self._is_complete:
            self._arrived.clear()
            await self._arrived.wait()
            size += sum(map(len, self._parts))
            self._parts.clear()
        return size


def with_httptools(port: int) -> Stream:
    idle: list[_Raw] = []
    head = f"POST {_PATH} HTTP/1.1\r\nhost: stub\r\ncontent-type: application/json\r\n"
    request = f"{head}content-length: {len(_BODY)}\r\n\r\n".encode() + _BODY

    async def stream() -> int:
        if idle:
            connection = idle.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(_Raw, "127.0.0.1", port)
        size = await connection.stream(request)
        idle.append(connection)
        return size

    return stream


async def with_aiohttp(port: int, stack: AsyncExitStack) -> Stream:
    connector = aiohttp.TCPConnector(limit=0)
    session = await stack.enter_async_context(
        aiohttp.ClientSession(connector=connector, auto_decompress=False)
    )
    url = f"http://127.0.0.1:{port}{_PATH}"

    async def stream() -> int:
        async with session.post(url, data=_BODY, headers=_HEADERS) as response:
            return sum([len(body) async for body in response.content.iter_any()])

    return stream


async def with_httpx(port: int, stack: AsyncExitStack) -> Stream:
    client = await stack.enter_async_context(httpx.AsyncClient(timeout=60.0))
    url = f"http://127.0.0.1:{port}{_PATH}"

    async def stream() -> int:
        async with client.stream("POST", url, content=_BODY, headers=_HEADERS) as response:
            return sum([len(body) async for body in response.aiter_raw()])

    return stream


def with_h11(port: int) -> Stream:
    """Use asyncio's own streams, without a limit or a timeout: h11's lower limit."""
    idle: list[tuple[asyncio.StreamReader, asyncio.StreamWriter, h11.Connection]] = []
    headers = [("host", "stub"), ("content-length", str(len(_BODY))), *_HEADERS.items()]
    request = h11.Request(method="POST", target=_PATH, headers=headers)

    async def stream() -> int:
        if idle:
            reader, writer, state = idle.pop()
        else:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            state = h11.Connection(h11.CLIENT)
        for part in (request, h11.Data(_BODY), h11.EndOfMessage()):
            writer.write(state.send(part) or b"")
        size = 0
        while True:
            event = state.next_event()
            if event is h11.NEED_DATA:
                state.receive_data(await reader.read(65536))
            elif isinstance(event, h11.Data):
                size += len(event.data)
            elif isinstance(event, h11.EndOfMessage):
                state.start_next_cycle()
                idle.append((reader, writer, state))
                return size

    return stream


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def timed(stream: Stream, count: int) -> float:
    """Stream `count` answers, `_AT_ONCE` at a time; return the CPU seconds of each."""
    left = iter(range(count))
    sizes = set()

    async def work() -> None:
        for _ in left:
            sizes.add(await stream())

    before = cpu_s()
    await asyncio.gather(*(work() for _ in range(_AT_ONCE)))
    assert len(sizes) == 1, "the clients read different answers"
    return (cpu_s() - before) / count


async def measure(port: int, streams: int, turns: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        clients = {
            "httptools_us": with_httptools(port),
            "aiohttp_us": await with_aiohttp(port, stack),
            "h11_us": with_h11(port),
            "httpx_us": await with_httpx(port, stack),
        }
        for turn in range(turns + 1):
            for name, stream in clients.items():
                seconds = await timed(stream, streams)
                if turn:  # the first turn opens connections
                    samples.setdefault(name, []).append(1e6 * seconds)
    return {name: statistics.median(values) for name, values in samples.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.http_clients")
    parser.add_argument("--json", action="store_true", help="figures as JSON on the last line")
    parser.add_argument("--streams", type=int, default=600, help="a turn (default 600)")
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    with StubFleet(1) as fleet:
        figures = uvloop.run(measure(fleet.ports[0], given.streams, given.turns))
    least = min(figures.values())
    rows = [[name[:-3], f"{us:,.0f}", f"{us / least:.2f}"] for name, us in figures.items()]
    text = table(["client", "CPU us a stream", "over the least"], rows)
    publish("http_clients", f"{machine_line()}\n\n{text}", rounded(figures), {}, as_json=given.json)


if __name__ == "__main__":
    main()
