"""Server-sent events with what the engines do now, one a second, for the live page.

Whoever waits for news first asks the engines, and the others take that answer: so the engines are
asked once a second however many watch, and not at all if there are none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from hetero_connector.engine.api.answers import NO_ENGINES, failed
from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.api.routes import PREFIX

PERIOD_S = 1.0
MAX_VIEWERS = 16
_ENGINE_PATIENCE_S = 3.0
_VIEWER_PATIENCE_S = 30.0
"""A viewer that does not read for so long is dropped."""


class Feed:
    """The newest answer of the engines, as an event. It lives on the server's event loop."""

    def __init__(self, engines: Engines, period_s: float = PERIOD_S) -> None:
        self.viewers = 0
        self._engines = engines
        self._period_s = period_s
        self._asking = asyncio.Lock()
        self._event = b""
        self._due_s = 0.0
        """The event loop's time from which on the event is too old."""

    async def next(self, seen: bytes = b"") -> bytes:
        """Return the newest event; if it is `seen`, the one after it."""
        now = asyncio.get_running_loop().time
        async with self._asking:
            if self._event is seen or now() >= self._due_s:
                await asyncio.sleep(self._due_s - now())
                answers = await self._engines.ask({"get": "live"}, _ENGINE_PATIENCE_S)
                document = json.dumps(
                    {"engines": answers, "count": self._engines.count}, separators=(",", ":")
                )
                self._event = f"data: {document}\n\n".encode()
                self._due_s = now() + self._period_s
            return self._event


class LiveResponse(StreamingResponse):
    """Events for one viewer, until it leaves or the server stops."""

    def __init__(self, feed: Feed, app: FastAPI) -> None:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_events(feed, app), media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. The viewer counts from here to the end, whatever ends it."""

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(_VIEWER_PATIENCE_S):
                await send(message)

        if self._feed.viewers >= MAX_VIEWERS:
            await failed(503, _TOO_MANY)(scope, receive, send)
            return
        self._feed.viewers += 1
        try:
            await super().__call__(scope, receive, send_soon)
        finally:
            self._feed.viewers -= 1


def make_live_router() -> APIRouter:
    """Return the route of the events."""
    router = APIRouter(prefix=PREFIX, tags=["heterocache"])

    @router.get("/live", name="live", description="Send each second what the engines do.")
    async def live(request: Request) -> Response:
        feed: Feed | None = request.app.state.heterocache_feed
        return failed(503, NO_ENGINES) if feed is None else LiveResponse(feed, request.app)

    return router


async def _events(feed: Feed, app: FastAPI) -> AsyncIterator[bytes]:
    event = b""
    while not _is_stopping(app):
        event = await feed.next(event)
        yield event


def _is_stopping(app: FastAPI) -> bool:
    """Return True once the server waits for its responses to end. vLLM keeps it in the state."""
    server: Any = getattr(app.state, "server", None)
    return bool(server and server.should_exit)


_TOO_MANY = f"{MAX_VIEWERS} viewers watch already, which is the most: close a page"
