"""A live page's files, its own and those that all pages share. They hold no data.

A browser cannot send an API key before there is a page to type it into. So these files, and nothing
else, are served without a key; the page's request for data carries it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp

PATH = "/v1/heterocache/dashboard"
_SHARED = Path(__file__).parent / "page"
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


def page_files(folder: Path) -> Mapping[str, ASGIApp]:
    """Return the answer for each path of the page whose figures are `main.html` in `folder`."""
    files: dict[str, ASGIApp] = {
        f"{PATH}/{file.name}": _answer(file.read_bytes(), file.suffix)
        for file in (*_SHARED.iterdir(), *folder.iterdir())
        if file.suffix in _TYPES and file.suffix != ".html"
    }
    frame, main = (_SHARED / "frame.html").read_bytes(), (folder / "main.html").read_bytes()
    files[PATH] = _answer(frame.replace(b"<!-- main -->\n", main), ".html")
    files[f"{PATH}/"] = RedirectResponse("../dashboard")  # the page's links are relative to it
    return files


def _answer(content: bytes, suffix: str) -> Response:
    return Response(content, media_type=_TYPES[suffix], headers=_HEADERS)
