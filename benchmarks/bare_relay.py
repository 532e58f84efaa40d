"""A relay without a router's work, to tell a slow machine from a slow router.

It is made of the same server and client as `heterocache router`, uvicorn and aiohttp. It knows one
worker and nothing of requests, so what the router adds to it is the router's own.
`python -m benchmarks.bare_relay URL` serves until it is ended.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import aiohttp
import psutil
import uvicorn
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from benchmarks.child_processes import announced


class _Relay:
    """The ASGI application."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._session: aiohttp.ClientSession | None = None
        """None until the first request: it is made in the event loop."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = await Request(scope, receive).body()
        async with self._session.post(self._worker + scope["path"], data=body) as answer:
            kind = answer.headers["content-type"]
            parts = StreamingResponse(answer.content.iter_any(), answer.status, media_type=kind)
            await parts(scope, receive, send)


@contextmanager
def running_relay(worker: str) -> Iterator[tuple[str, psutil.Process]]:
    """Start a relay to a worker; yield its URL and its process."""
    with announced(["-m", "benchmarks.bare_relay", worker]) as (line, process):
        yield line.strip(), psutil.Process(process.pid)


def main() -> None:
    [worker] = sys.argv[1:]
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(
        _Relay(worker),
        loop="uvloop",
        http="httptools",
        lifespan="off",
        log_level="warning",
        access_log=False,
    )
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvicorn.Server(settings).run(sockets=[listener])


if __name__ == "__main__":
    main()
