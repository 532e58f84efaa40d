"""HTTP/1.1 towards clients: uvicorn's protocol, with limits on what comes before a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from ownership.router.answer import refusal_headers
from ownership.router.doors import Api, Reason, Refusal, error_body
from ownership.router.metrics import RouterMetrics
from ownership.router.open_files import MAX_EXTRA

MAX_HEAD_BYTES = 65536
_LINGER_S = 1.0
"""A refused client may go on sending for so long: if it was reset, it would not see the answer."""
_EXTRA_S = 5.0
"""Seconds in which a connection beyond the limit must send its head."""
_ALWAYS_SERVED = frozenset({b"/health", b"/ready", b"/metrics"})
"""Paths served beyond the limit, too: a router that is full must not be taken for a dead one."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A client's connection. A complete head makes a request; these limits hold without one.

    A head has at most `MAX_HEAD_BYTES`, as has what comes between two pieces of a body, such as
    trailers. A connection is closed if no head is complete `client_s` after its start, or after the
    first byte that follows an answer. uvicorn closes one on which nothing follows an answer, or the
    end of a body that was answered before it had come.

    A new connection beyond `max_connections` gets one answer, 503 unless it asks for the router's
    own state. Those that are open go on.
    """

    def __init__(
        self,
        client_s: float,
        max_connections: int,
        metrics: RouterMetrics,
        **parts: Any,
    ) -> None:
        """`metrics`: each connection that is refused counts there, and each answer."""
        super().__init__(**parts)
        self._client_s = client_s
        self._max_connections, self._metrics = max_connections, metrics
        self._is_extra = False
        self._timer: asyncio.TimerHandle | None = None
        self._running: RequestResponseCycle | None = None
        """The request that was begun last. `cycle` may be one that waits for its answer."""
        self._num_unparsed = 0
        """Bytes since the last head or piece of a body. The parser copies them at each read."""
        self._is_in_head = self._is_refused = False
        self._is_between = True
        """True if no request has begun that is not received to its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        num_extra = len(self.connections) - self._max_connections
        self._is_extra = num_extra > 0
        if num_extra > MAX_EXTRA:
            self._metrics.connections_refused.inc()
            transport.abort()
            return
        if self._is_extra:
            self._client_s = min(self._client_s, _EXTRA_S)
        self._timer = self.loop.call_later(self._client_s, self._on_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self._is_refused and not self.transport.is_closing():
            room = MAX_HEAD_BYTES - self._num_unparsed
            piece, data = data[:room], data[room:]
            self._num_unparsed += len(piece)
            super().data_received(piece)
            if self._num_unparsed == MAX_HEAD_BYTES and not self.transport.is_closing():
                text = f"the request's head is larger than {MAX_HEAD_BYTES // 1024} KiB"
                self._refuse(Refusal(Reason.HEAD_TOO_LARGE, text))
        is_begun = not self._is_between or self._num_unparsed > 0
        if is_begun and self._timer is None and self._is_idle and not self.transport.is_closing():
            self._timer = self.loop.call_later(self._client_s, self._on_late)

    def on_message_begin(self) -> None:
        self._is_in_head, self._is_between = True, False
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._num_unparsed = 0
        self._stop_timer()
        if self._is_extra and self.url.partition(b"?")[0] not in _ALWAYS_SERVED:
            self._metrics.connections_refused.inc()
            text = f"this router has its {self._max_connections} connections (max_connections)"
            self._refuse(Refusal(Reason.TOO_MANY_CONNECTIONS, text, retry_after_s=1))
            return
        super().on_headers_complete()
        if self._is_extra:
            self.cycle.keep_alive = False
        if len(self.pipeline) == 1:  # not more of them, but the client's leaving must be seen
            self.flow.resume_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        self._num_unparsed = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self._is_refused:
            return
        self._num_unparsed, self._is_between = 0, True
        super().on_message_complete()
        if self._is_idle:  # it was answered before its body came: the connection is idle as of now
            self._stop_timer()
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _on_late(self) -> None:
        self._timer = None
        if self._is_extra:
            self._metrics.connections_refused.inc()
        if self._is_in_head and not self.transport.is_closing():
            text = f"the request's head did not come within {self._client_s:g} s"
            self._refuse(Refusal(Reason.HEAD_TOO_SLOW, text))
        else:
            self.transport.close()

    def _refuse(self, refusal: Refusal) -> None:
        """Answer, if it is this head's turn, and close."""
        self._is_refused = True
        self._stop_timer()
        if not self._is_idle:
            self.transport.close()
            return
        self._metrics.refused.labels(refusal.reason).inc()
        body = error_body(Api.OPENAI, refusal)
        head = [
            STATUS_LINE[refusal.status],
            *(b"%b: %b\r\n" % header for header in refusal_headers(refusal)),
            b"content-length: %d\r\nconnection: close\r\n\r\n" % len(body),
        ]
        self.transport.write(b"".join([*head, body]))
        self.transport.write_eof()
        self._timer = self.loop.call_later(_LINGER_S, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
