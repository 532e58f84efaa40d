"""The client's side of one answer: its head, its bytes as the worker wrote them, its end."""

from __future__ import annotations

import re

import aiohttp
from starlette.responses import Response
from starlette.types import Send

from ownership.router.doors import Api, Refusal, error_body, error_event
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import Placed
from ownership.router.requests import Headers, named_by_connection

_EVENT_BYTES = 1024 * 1024
"""Events are sent whole, up to this size."""
_ID = re.compile(rb'"id": ?"([\w.-]{1,200})"')
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})


class AnswerCutError(Exception):
    """An answer that is no stream ended in its middle, so the server closes its connection."""


class EventSplitter:
    """Cuts a stream of server-sent events where one is complete, and counts them."""

    def __init__(self) -> None:
        self.rest = b""
        """The begin of an event that is not complete."""
        self.count = 0
        """Events that were complete."""

    def split(self, part: bytes) -> bytes:
        """Return the events that are complete now; keep the rest."""
        data = self.rest + part if self.rest else part
        short, long = data.rfind(b"\n\n"), data.rfind(b"\r\n\r\n")
        end = max(0 if short < 0 else short + 2, 0 if long < 0 else long + 4)
        if not end and len(data) < _EVENT_BYTES:
            self.rest = data
            return b""
        end = end or len(data)
        self.rest = data[end:]
        self.count += data.count(b"data:", 0, end)
        return data[:end] if self.rest else data


class Answer:
    """One answer. `status` is 0 until its head is sent, after which no other can be sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_events = False
        self._events = EventSplitter()
        self.status = 0

    @property
    def num_events(self) -> int:
        """Events sent."""
        return self._events.count

    async def start(self, response: aiohttp.ClientResponse, placed: Placed) -> None:
        """Send the head of a worker's answer, the worker's name, and how it was chosen."""
        is_stream = response.content_type == "text/event-stream"
        self._has_events = is_stream and "Content-Encoding" not in response.headers
        raw = response.raw_headers
        headers = [(name.lower(), value) for name, value in raw]
        dropped = _OF_CONNECTION | named_by_connection(headers)
        headers = [x for x in headers if x[0] not in dropped]
        await self._start(response.status, headers + placement_headers(placed))

    async def send(self, part: bytes) -> None:
        """Send a part of the body; of a stream as many events as are complete.

        Waits while the client has not read what was sent before.
        """
        if self._has_events:
            part = self._events.split(part)
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Send what is left."""
        await self._send({"type": "http.response.body", "body": self._events.rest})

    async def cut(self, api: Api, refusal: Refusal) -> None:
        """End an answer whose worker was lost: a stream by an event that says so.

        Raises AnswerCutError for an answer that is no stream.
        """
        if not self._has_events:
            raise AnswerCutError(refusal.message)
        await self._send({"type": "http.response.body", "body": error_event(api, refusal)})

    async def refuse(self, api: Api, refusal: Refusal) -> None:
        """Send an answer of the router's own."""
        body = error_body(api, refusal)
        length = (b"content-length", str(len(body)).encode())
        await self._start(refusal.status, [*refusal_headers(refusal), length])
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def answer_id(begin: bytes) -> str:
    """Return the id in an answer, or in a stream's first event; "" if it has none."""
    found = _ID.search(begin)
    return found[1].decode() if found else ""


def placement_headers(placed: Placed) -> Headers:
    """Return what the client is told of a placement."""
    headers = [(b"x-heterocache-worker", placed.worker.name.encode())]
    if placed.certainty:
        headers.append((b"x-heterocache-placement", _description(placed)))
    return headers


def refusal_headers(refusal: Refusal) -> Headers:
    """Return the headers of a refusal, but for its length."""
    headers = [
        (b"content-type", b"application/json"),
        (b"x-heterocache-reason", refusal.reason.encode()),
    ]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
    return headers


def refusal_response(refusal: Refusal, metrics: RouterMetrics) -> Response:
    """Count a refusal, and return it as the answer of a door that no worker serves."""
    metrics.refused.labels(refusal.reason).inc()
    headers = {name.decode(): value.decode() for name, value in refusal_headers(refusal)}
    return Response(error_body(Api.OPENAI, refusal), refusal.status, headers)


def _description(placed: Placed) -> bytes:
    """Return a placement as a header: `degraded; action=artifact_fetch; reasons="unchecked"`."""
    text = placed.certainty
    text += f"; action={placed.action}" if placed.action else ""
    text += "" if placed.prefill is None else f"; prefill={placed.prefill.worker.name}"
    text += f'; reasons="{" ".join(placed.reasons)}"' if placed.reasons else ""
    return text.encode()
