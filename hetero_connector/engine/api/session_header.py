"""The session headers of coding agents, as the one that vLLM reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

VLLM_HEADER = b"x-session-id"
SESSION_HEADERS = (
    VLLM_HEADER,
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"session-id",
    b"thread-id",
)
"""The first that a request has names its session."""
_MAX_BYTES = 1_024


class SessionHeader:
    """ASGI middleware: gives a request with another client's session header vLLM's own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on."""
        if scope["type"] == "http" and scope["method"] == "POST":
            given = {name: value for name, value in scope["headers"] if name in SESSION_HEADERS}
            found = next((given[name] for name in SESSION_HEADERS if given.get(name)), b"")
            if VLLM_HEADER not in given and 0 < len(found) <= _MAX_BYTES:
                scope = {**scope, "headers": [*scope["headers"], (VLLM_HEADER, found)]}
        await self._app(scope, receive, send)
