"""The session headers of coding agents, as the one that vLLM reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hetero_connector.session_ids import MAX_ID_BYTES, SESSION_HEADERS, VLLM_HEADER

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_NAMES = tuple(name.encode() for name in SESSION_HEADERS)
_VLLM = VLLM_HEADER.encode()


class SessionHeader:
    """ASGI middleware: gives a request with another client's session header vLLM's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            given = {name: value for name, value in scope["headers"] if name in _NAMES}
            found = next((given[name] for name in _NAMES if given.get(name)), b"")
            if _VLLM not in given and 0 < len(found) <= MAX_ID_BYTES:
                scope = {**scope, "headers": [*scope["headers"], (_VLLM, found)]}
        await self._app(scope, receive, send)
