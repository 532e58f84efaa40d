"""Server-sent events with the newest document, one a second, for the viewers of a live page.

Whoever waits for news first asks for it, and the others take that answer: so the source is asked
once a second however many watch, and not at all if there are none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

PERIOD_S = 1.0
MAX_VIEWERS = 16
TOO_MANY = f"{MAX_VIEWERS} viewers watch already, which is the most: close a page"
_VIEWER_PATIENCE_S = 30.0
"""A viewer that does not read for so long is dropped."""


class Feed:
    """The newest document, as an event. It lives on the server's event loop."""

    def __init__(self, ask: Callable[[], Awaitable[bytes]], period_s: float = PERIOD_S) -> None:
        """`ask`: returns the document as it is now, as one line of JSON."""
        self.viewers = 0
        self._ask = ask
        self._period_s = period_s
        self._asking = asyncio.Lock()
        self._event = b""
        self._due_s = 0.0
        """The event loop's time from which on the event is too old."""

    @property
    def is_full(self) -> bool:
        """True if another viewer would be one too many."""
        return self.viewers >= MAX_VIEWERS

    async def next(self, seen: bytes = b"") -> bytes:
        """Return the newest event; if it is `seen`, the one after it."""
        now = asyncio.get_running_loop().time
        async with self._asking:
            if self._event is seen or now() >= self._due_s:
                await asyncio.sleep(self._due_s - now())
                self._event = b"data: %b\n\n" % await self._ask()
                self._due_s = now() + self._period_s
            return self._event


class LiveResponse(StreamingResponse):
    """Events for one viewer, until it leaves or the server stops."""

    def __init__(self, feed: Feed, app: Starlette) -> None:
        """`app`: has uvicorn's server in its state as `server`, or none."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(_events(feed, app), media_type="text/event-stream", headers=headers)
        self._feed = feed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. The viewer counts from here to the end, whatever ends it."""

        async def send_soon(message: Message) -> None:
            async with asyncio.timeout(_VIEWER_PATIENCE_S):
                await send(message)

        self._feed.viewers += 1
        try:
            await super().__call__(scope, receive, send_soon)
        finally:
            self._feed.viewers -= 1


async def _events(feed: Feed, app: Starlette) -> AsyncIterator[bytes]:
    event = b""
    while not _is_stopping(app):
        event = await feed.next(event)
        yield event


def _is_stopping(app: Starlette) -> bool:
    """Return True once the server waits for its responses to end."""
    server: Any = getattr(app.state, "server", None)
    return bool(server and server.should_exit)
