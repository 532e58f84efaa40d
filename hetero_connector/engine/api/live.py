"""The live page of the server's engines: its files, and the events with what they do now."""

from __future__ import annotations

import json
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_connector.engine.api.answers import NO_ENGINES, failed
from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.api.routes import PREFIX
from hetero_connector.live_page.feed import PERIOD_S, TOO_MANY, Feed, LiveResponse
from hetero_connector.live_page.page_files import page_files

_FOLDER = Path(__file__).parent / "page"
_ENGINE_PATIENCE_S = 3.0


class Dashboard:
    """ASGI middleware: answers for the page's files, and passes all else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = page_files(_FOLDER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        app = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            app = self._files.get(path, app)
        await app(scope, receive, send)


def engine_feed(engines: Engines, period_s: float = PERIOD_S) -> Feed:
    """Return the events with the engines' answers."""

    async def ask() -> bytes:
        answers = await engines.ask({"get": "live"}, _ENGINE_PATIENCE_S)
        document = {"engines": answers, "count": engines.count}
        return json.dumps(document, separators=(",", ":")).encode()

    return Feed(ask, period_s)


def make_live_router() -> APIRouter:
    """Return the route of the events."""
    router = APIRouter(prefix=PREFIX, tags=["heterocache"])

    @router.get("/live", name="live", description="Send each second what the engines do.")
    async def live(request: Request) -> Response:
        feed: Feed | None = request.app.state.heterocache_feed
        if feed is None:
            return failed(503, NO_ENGINES)
        return failed(503, TOO_MANY) if feed.is_full else LiveResponse(feed, request.app)

    return router
