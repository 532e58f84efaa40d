"""The live page's own files, from the folder `page`. They hold no data.

A browser cannot send an API key before there is a page to type it into. So these files, and nothing
else, are served before vLLM asks for the key; the page's request for data carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from hetero_connector.engine.api.routes import PREFIX

PATH = f"{PREFIX}/dashboard"
_FOLDER = Path(__file__).parent / "page"
_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


class Dashboard:
    """ASGI middleware: answers for the page's files, and passes all else on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._files = _read_files()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        app = self._app
        if scope["type"] == "http" and scope["method"] in ("GET", "HEAD"):
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            app = self._files.get(path, app)
        await app(scope, receive, send)


def _read_files() -> Mapping[str, ASGIApp]:
    files: dict[str, ASGIApp] = {
        f"{PATH}/{file.name}": Response(
            file.read_bytes(), media_type=_TYPES[file.suffix], headers=_HEADERS
        )
        for file in _FOLDER.iterdir()
        if file.suffix in _TYPES
    }
    files[PATH] = files.pop(f"{PATH}/index.html")
    files[f"{PATH}/"] = RedirectResponse("../dashboard")  # the page's links are relative to it
    return files
