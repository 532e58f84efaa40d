"""One HTTP request in Envoy: placed when its body is whole, counted until its answer has ended.

Envoy sends the request to the worker. What it tells of the answer is what the proxy would have seen
itself: the first byte, the events, the end.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator
from time import monotonic
from typing import Any, NamedTuple

import grpc

from ownership.router.answer import EventSplitter, answer_id, placement_headers, refusal_headers
from ownership.router.config import RouterConfig
from ownership.router.doors import DOORS, OTHER, Door, Refusal, error_body
from ownership.router.ext_proc.addresses import Addresses, endpoint_of
from ownership.router.ext_proc.messages import (
    OVERWRITE_IF_EXISTS_OR_ADD,
    BodyMode,
    ProcessingResponse,
)
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import Placed, Placer
from ownership.router.proxy import FIRST_ERROR, Proxy
from ownership.router.requests import (
    ClientLeftError,
    Headers,
    RefusedError,
    RouterRequest,
    read_request,
)
from ownership.router.reservations import Reservation
from ownership.router.spans import RouterSpans
from ownership.router.workers import Worker, WorkerSet

ENDPOINT = "x-gateway-destination-endpoint"
_SUBSET = ("envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset")
_METADATA = "envoy.lb"
_CHUNK_BYTES = 60_000
"""Envoy asks for parts of a body of at most 64 KiB."""
_OWN = (b"authorization", b"x-api-key", b"traceparent", b"tracestate")
"""Headers that a worker may get from the router in place of the client's."""
_LOST = frozenset({502, 503, 504})
"""Statuses that also Envoy itself gives, when it does not reach the worker."""

_log = logging.getLogger(__name__)


class Parts(NamedTuple):
    """The parts of the router that a stream needs."""

    config: RouterConfig
    workers: WorkerSet
    proxy: Proxy
    placer: Placer
    metrics: RouterMetrics
    spans: RouterSpans
    addresses: Addresses


class Stream:
    """One call of `Process`."""

    def __init__(self, parts: Parts, context: Any) -> None:
        self._parts, self._context = parts, context
        self._request_mode = self._response_mode = BodyMode.FULL_DUPLEX_STREAMED
        self._has_body = self._has_trailers = False
        self._next: Any = None
        """A message that was read too early; None without one."""

    async def run(self) -> None:
        """Answer all messages."""
        first = await self._read()
        if first is None:
            return
        await self._check(first)
        headers, scope = _scope(first.request_headers.headers)
        door = DOORS.get(scope["path"], OTHER)
        metrics, spans = self._parts.metrics, self._parts.spans.begin(scope)
        answer, reason = FollowedAnswer(self._response_mode), "client_left"
        try:
            try:
                if self._has_body and self._request_mode == BodyMode.BUFFERED:
                    self._next = await self._read()  # Envoy itself limits how slowly it may come
                request = await read_request(scope, self._receive, self._parts.config)
                request.spans = spans
                await self._serve(request, headers, _subset(first), answer)
            except RefusedError as error:
                reason, answer.status = error.refusal.reason, error.refusal.status
                metrics.refused.labels(reason).inc()
                await self._write(_refusal(door, error.refusal))
            except ClientLeftError:
                await self._follow(answer)  # Envoy may have an answer of its own
        finally:
            if answer.is_complete or reason != "client_left":
                metrics.requests.labels(door.name, str(answer.status)).inc()
                reason = "" if answer.is_complete else reason
            else:
                metrics.left.inc()
            spans.on_end(answer.status, reason)

    async def _check(self, first: Any) -> None:
        """End the stream if Envoy's filter is configured so that no worker can be chosen."""
        problem = ""
        if first.WhichOneof("kind") != "request_headers":
            problem = "request_header_mode: set it to SEND"
        elif first.HasField("protocol_config"):
            modes = first.protocol_config
            self._request_mode = modes.request_body_mode
            self._response_mode = modes.response_body_mode
        self._has_body = not first.request_headers.end_of_stream
        if self._has_body and self._request_mode not in (
            BodyMode.BUFFERED,
            BodyMode.FULL_DUPLEX_STREAMED,
        ):
            problem = "request_body_mode: set it to FULL_DUPLEX_STREAMED or BUFFERED"
        if problem:
            _log.warning("Envoy's ext_proc filter, processing_mode.%s", problem)
            await self._context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem)
        if self._has_body and self._request_mode == BodyMode.BUFFERED:
            await self._write(ProcessingResponse(request_headers={}))

    async def _serve(
        self,
        request: RouterRequest,
        given: Headers,
        subset: frozenset[str] | None,
        answer: FollowedAnswer,
    ) -> None:
        """Place a request, and follow its answer. Raises RefusedError."""
        parts, arrived_s = self._parts, monotonic()
        excluded: Container[Worker] = ()
        addresses: dict[str, str] = {}
        if subset is not None:
            addresses = await parts.addresses.in_subset(subset, parts.workers)
            excluded = _Outside(subset | addresses.keys())
        with request.spans.placing():
            placed = await parts.proxy.place(request, excluded)
            request.spans.on_placed(placed)
        worker = placed.worker
        reservation = Reservation(parts.proxy, parts.placer, placed)
        parts.metrics.wait.observe(reservation.sent_s - arrived_s)
        answer.placed = placed
        has_failed = False
        try:
            endpoint = addresses.get(endpoint_of(worker))
            endpoint = endpoint or (await parts.addresses.of(worker))[0]
            if placed.prefill is not None:
                await parts.proxy.prefill(placed, placed.prefill)
            sent_s = monotonic()
            with request.spans.sending(worker.name, "upstream") as span:
                for reply in self._request_replies(placed, endpoint, given, span.headers):
                    await self._write(reply)
                await self._follow(answer, reservation, arrived_s)
                span.on_status(answer.status)
            has_failed = answer.status >= FIRST_ERROR
        except RefusedError:
            has_failed = True
            raise
        finally:
            # Events that Envoy does not show are counted as those of an answer in one piece.
            request.is_stream &= self._response_mode != BodyMode.NONE
            reservation.free(has_failed=has_failed)
        if answer.status in _LOST:
            worker.breaker.on_failure(sent_s)
        elif answer.status:
            worker.breaker.on_success()

    async def _follow(
        self, answer: FollowedAnswer, reservation: Reservation | None = None, arrived_s: float = 0.0
    ) -> None:
        """Answer the messages that tell of an answer, up to the stream's end."""
        while (message := await self._read()) is not None:
            had_byte, num_events = answer.has_byte, answer.num_events
            reply = answer.reply(message)
            if reservation is not None and answer.has_byte:
                reservation.answered(answer.num_events - num_events)
                if not had_byte and answer.placed is not None:
                    door = answer.placed.request.door.name
                    self._parts.metrics.first_byte.labels(door).observe(monotonic() - arrived_s)
            await self._write(reply)

    async def _receive(self) -> dict[str, Any]:
        """Return the next part of the request's body, as an ASGI server does."""
        if not self._has_body:
            return {"type": "http.request", "body": b""}
        message = await self._read()
        match message and message.WhichOneof("kind"):
            case "request_body":
                body = message.request_body
                is_last = body.end_of_stream or self._request_mode == BodyMode.BUFFERED
                return {"type": "http.request", "body": body.body, "more_body": not is_last}
            case "request_trailers":
                self._has_trailers = True
                return {"type": "http.request", "body": b""}
        self._next = message
        return {"type": "http.disconnect"}

    def _request_replies(
        self, placed: Placed, endpoint: str, given: Headers, headers_of: Any
    ) -> Iterator[Any]:
        """Yield the answers to the request's messages: where it goes, and its body."""
        request = placed.request
        body = request.body if placed.body is None else placed.body
        is_buffered = self._has_body and self._request_mode == BodyMode.BUFFERED
        reply = ProcessingResponse(dynamic_metadata=_struct(_METADATA, ENDPOINT, endpoint))
        changed = reply.request_body.response if is_buffered else reply.request_headers.response
        changed.clear_route_cache = True
        own = dict[bytes, bytes](headers_of(request.headers))
        before = dict[bytes, bytes](given)
        mutation = changed.header_mutation
        _set(mutation, [(ENDPOINT.encode(), endpoint.encode())])
        _set(mutation, [(x, own[x]) for x in _OWN if x in own and own[x] != before.get(x)])
        mutation.remove_headers.extend(x.decode() for x in _OWN if x in before and x not in own)
        if is_buffered and placed.body is not None:
            changed.body_mutation.body = body
            _set(mutation, [(b"content-length", str(len(body)).encode())])
        yield reply
        if self._has_body and not is_buffered:
            yield from _chunks(body, has_trailers=self._has_trailers)
            if self._has_trailers:
                yield ProcessingResponse(request_trailers={})

    async def _read(self) -> Any:
        """Return the next message; None at the end."""
        message, self._next = self._next, None
        if message is None:
            message = await self._context.read()
        return None if message is grpc.aio.EOF else message

    async def _write(self, reply: Any) -> None:
        await self._context.write(reply)


class FollowedAnswer:
    """A worker's answer, as Envoy tells of it."""

    def __init__(self, body_mode: int) -> None:
        self._body_mode = body_mode
        self._events: EventSplitter | None = None
        self.placed: Placed | None = None
        """None if the answer is Envoy's own."""
        self.status = 0
        self.has_byte = False
        """True once a byte of an answer has come that is no error."""
        self.is_complete = False

    @property
    def num_events(self) -> int:
        return 0 if self._events is None else self._events.count

    def reply(self, message: Any) -> Any:
        """Note what a message tells, and return the answer to it."""
        match message.WhichOneof("kind"):
            case "response_headers":
                return self._on_head(message.response_headers)
            case "response_body":
                return self._on_body(message.response_body)
            case "response_trailers":
                self.is_complete = True
                return ProcessingResponse(response_trailers={})
            case "request_trailers":
                return ProcessingResponse(request_trailers={})
        return ProcessingResponse(request_body={})

    def _on_head(self, head: Any) -> Any:
        headers = dict(_pairs(head.headers))
        status = headers.get(b":status", b"")
        self.status = int(status) if status.isdigit() else 0
        is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        if is_stream and b"content-encoding" not in headers:
            self._events = EventSplitter()
        self.is_complete = head.end_of_stream or self._body_mode == BodyMode.NONE
        self.has_byte = self.is_complete and self.status < FIRST_ERROR
        reply = ProcessingResponse(response_headers={})
        if self.placed is not None:
            _set(
                reply.response_headers.response.header_mutation,
                placement_headers(self.placed),
            )
        return reply

    def _on_body(self, body: Any) -> Any:
        part = body.body
        if part and not self.has_byte and self.status < FIRST_ERROR:
            self.has_byte = True
            if self.placed is not None:
                self.placed.answer_id = answer_id(part)
        if self._events is not None:
            self._events.split(part)
        self.is_complete = body.end_of_stream
        if self._body_mode == BodyMode.FULL_DUPLEX_STREAMED:
            return _chunk("response_body", part, is_last=body.end_of_stream)
        return ProcessingResponse(response_body={})


class _Outside(Container[Worker]):
    """The workers that are not in a subset of endpoints."""

    def __init__(self, subset: frozenset[str]) -> None:
        self._subset = subset

    def __contains__(self, worker: object) -> bool:
        return isinstance(worker, Worker) and endpoint_of(worker) not in self._subset


def _scope(head: Any) -> tuple[Headers, dict[str, Any]]:
    """Return a request's headers, and its scope as an ASGI server makes it."""
    pairs = list(_pairs(head))
    pseudo = dict(x for x in pairs if x[0].startswith(b":"))
    headers = [x for x in pairs if not x[0].startswith(b":")]
    raw_path, _, query = pseudo.get(b":path", b"/").partition(b"?")
    return headers, {
        "method": pseudo.get(b":method", b"GET").decode("latin-1"),
        "path": raw_path.decode("latin-1"),
        "raw_path": raw_path,
        "query_string": query,
        "headers": headers,
    }


def _pairs(head: Any) -> Iterator[tuple[bytes, bytes]]:
    for header in head.headers:
        yield header.key.encode(), header.raw_value or header.value.encode()


def _subset(message: Any) -> frozenset[str] | None:
    """Return the endpoints to choose from; None for all."""
    for entry in message.metadata_context.filter_metadata:
        for field in entry.value.fields:
            if (entry.key, field.key) == _SUBSET:
                values = [x.string_value for x in field.value.list_value.values]
                values += field.value.string_value.split(",")
                return frozenset(x.strip() for x in values if x.strip())
    return None


def _struct(namespace: str, key: str, value: str) -> dict[str, Any]:
    inner = {"fields": [{"key": key, "value": {"string_value": value}}]}
    return {"fields": [{"key": namespace, "value": {"struct_value": inner}}]}


def _set(mutation: Any, headers: Headers) -> None:
    for name, value in headers:
        option = mutation.set_headers.add(append_action=OVERWRITE_IF_EXISTS_OR_ADD)
        option.header.key, option.header.raw_value = name.decode(), value


def _refusal(door: Door, refusal: Refusal) -> Any:
    reply = ProcessingResponse()
    answer = reply.immediate_response
    answer.status.code = refusal.status
    answer.body = error_body(door.api, refusal)
    answer.details = f"heterocache_{refusal.reason}"
    _set(answer.headers, refusal_headers(refusal))
    return reply


def _chunks(body: bytes, *, has_trailers: bool) -> Iterator[Any]:
    for start in range(0, max(1, len(body)), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        is_last = end >= len(body) and not has_trailers
        yield _chunk("request_body", body[start:end], is_last=is_last)


def _chunk(kind: str, part: bytes, *, is_last: bool) -> Any:
    reply = ProcessingResponse()
    chunk = getattr(reply, kind).response.body_mutation.streamed_response
    chunk.body, chunk.end_of_stream = part, is_last
    return reply
