"""A span of the API server for each call, so that vLLM's and our spans of a request have a parent.

vLLM makes its span of a request when the request has ended, so nothing can be below it. And without
a `traceparent` of the client's, vLLM's span and ours would be two traces.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = (b"traceparent", b"tracestate")
_CONTEXT = TraceContextTextMapPropagator()


class ServerSpans:
    """ASGI middleware: makes the span, and puts it into the headers that vLLM reads."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, inside a span if it is one for a model."""
        if scope["type"] != "http" or scope["method"] != "POST" or _is_ours(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = {k: v.decode("latin-1") for k, v in scope["headers"] if k in _HEADERS}
        carrier = {name.decode(): value for name, value in headers.items()}
        attributes = {"http.request.method": "POST", "url.path": scope["path"]}
        span = trace.get_tracer("heterocache").start_span(
            "POST", _CONTEXT.extract(carrier), SpanKind.SERVER, attributes
        )
        carrier = {}
        _CONTEXT.inject(carrier, trace.set_span_in_context(span))
        others = [(k, v) for k, v in scope["headers"] if k not in _HEADERS]
        own = [(name.encode(), value.encode("latin-1")) for name, value in carrier.items()]
        scope = {**scope, "headers": [*others, *own]}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                status = message["status"]
                span.set_attribute("http.response.status_code", status)
                if path := getattr(scope.get("route"), "path", None):
                    span.update_name(f"POST {path}")
                    span.set_attribute("http.route", path)
                if status >= 500:
                    span.set_status(StatusCode.ERROR)
            await send(message)

        with trace.use_span(span, end_on_exit=True):
            await self._app(scope, receive, send_on)


def _is_ours(path: str) -> bool:
    return path.startswith("/v1/heterocache/")
