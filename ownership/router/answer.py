"""The client's side of one answer: its head, its bytes as the worker wrote them, its end."""

from __future__ import annotations

import re

import aiohttp
from starlette.types import Send

from ownership.router.doors import Api, Refusal, error_body, error_event
from ownership.router.placer import Placed

_EVENT_BYTES = 1024 * 1024
"""Events are sent whole, up to this size."""
_ID = re.compile(rb'"id": ?"([\w.-]{1,200})"')
_OF_CONNECTION = frozenset({b"connection", b"keep-alive", b"transfer-encoding", b"upgrade"})


class AnswerCutError(Exception):
    """An answer that is no stream ended in its middle, so the server closes its connection."""


class Answer:
    """One answer. `status` is 0 until its head is sent, after which no other can be sent."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_events = False
        self._held = b""
        self.status = 0
        self.num_events = 0
        """Events sent."""

    async def start(self, response: aiohttp.ClientResponse, placed: Placed) -> None:
        """Send the head of a worker's answer, the worker's name, and how it was chosen."""
        is_stream = response.content_type == "text/event-stream"
        self._has_events = is_stream and "Content-Encoding" not in response.headers
        raw = response.raw_headers
        headers = [(name.lower(), value) for name, value in raw]
        headers = [x for x in headers if x[0] not in _OF_CONNECTION]
        headers.append((b"x-heterocache-worker", placed.worker.name.encode()))
        if placed.certainty:
            headers.append((b"x-heterocache-placement", _description(placed)))
        await self._start(response.status, headers)

    async def send(self, part: bytes) -> None:
        """Send a part of the body; of a stream as many events as are complete.

        Waits while the client has not read what was sent before.
        """
        if self._has_events:
            part = self._whole_events(part)
        if part:
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end(self) -> None:
        """Send what is left."""
        await self._send({"type": "http.response.body", "body": self._held})

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
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"x-heterocache-reason", refusal.reason.encode()),
        ]
        if refusal.retry_after_s is not None:
            headers.append((b"retry-after", str(refusal.retry_after_s).encode()))
        await self._start(refusal.status, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    def _whole_events(self, part: bytes) -> bytes:
        """Return the events that are complete now; keep the rest."""
        data = self._held + part if self._held else part
        end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\r\n\r\n") + 4)
        if end < 4 and len(data) < _EVENT_BYTES:  # neither was found: -1 + 4 is 3
            self._held = data
            return b""
        if end < 4:
            end = len(data)
        self._held = data[end:]
        self.num_events += data.count(b"data:", 0, end)
        return data[:end] if self._held else data


def answer_id(begin: bytes) -> str:
    """Return the id in an answer, or in a stream's first event; "" if it has none."""
    found = _ID.search(begin)
    return found[1].decode() if found else ""


def _description(placed: Placed) -> bytes:
    """Return a placement as a header: `degraded; action=artifact_fetch; reasons="unchecked"`."""
    text = placed.certainty
    text += f"; action={placed.action}" if placed.action else ""
    text += "" if placed.prefill is None else f"; prefill={placed.prefill.worker.name}"
    text += f'; reasons="{" ".join(placed.reasons)}"' if placed.reasons else ""
    return text.encode()
