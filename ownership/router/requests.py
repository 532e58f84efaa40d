"""A client's request as the router sees it, and reading it from the socket."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from ownership.router.config import RouterConfig, digest_of
from ownership.router.doors import DOORS, OTHER, Door, Reason, Refusal
from ownership.router.spans import NO_SPANS, RequestSpans

Headers = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te"}
    | {b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"expect"}
)
"""Headers of one connection, and those that the client for workers writes itself."""
_PRIORITY = b"x-priority"
_TRUE = frozenset({"true", "t", "yes", "y", "on", "1", "1.0"})
"""Values that vLLM's models take for true, besides `true` itself. What they refuse, it answers."""


class Priority(StrEnum):
    """The classes of the header `x-priority`."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class RefusedError(Exception):
    """The router answers the request itself."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.refusal = refusal


class ClientLeftError(Exception):
    """The client closed its connection."""


class _Body(msgspec.Struct):
    """The fields that the router reads; the others are skipped."""

    model: str | None = None
    stream: object = None


@dataclass(slots=True)
class RouterRequest:
    """One request, read completely."""

    door: Door
    method: str
    target: str
    """Path and query as the client wrote them."""
    headers: Headers
    """The headers for the worker, names in lower case."""
    body: bytes
    caller: str
    """The client's API key, hashed; "" without one. Fairness is between callers."""
    priority: Priority
    model: str | None = None
    """None: the worker's own default, or a path whose body is not read."""
    is_stream: bool = False
    is_whole: bool = False
    """True if one worker must serve it: no prompt of it is computed at another."""
    times_lost: int = 0
    """Workers that may have had it when they were lost."""
    spans: RequestSpans = NO_SPANS
    tried: Container[object] = ()
    """The workers that have lost or refused it: it waits for others."""


NO_KEY = Refusal(Reason.WRONG_KEY, "this needs an API key: in Authorization: Bearer, or x-api-key")


def has_key(headers: Mapping[bytes, bytes], config: RouterConfig) -> bool:
    """Return True if the request has one of the keys, or none is needed."""
    return not config.api_keys or digest_of(_api_key(headers)) in config.api_keys


async def read_request(scope: Scope, receive: Receive, config: RouterConfig) -> RouterRequest:
    """Read a request. Raises RefusedError, or ClientLeftError if the client has gone."""
    headers = dict[bytes, bytes](scope["headers"])
    api_key = _api_key(headers)
    caller = digest_of(api_key)[:8].hex() if api_key else ""
    if not has_key(headers, config):
        raise RefusedError(NO_KEY)
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length) > config.max_body_bytes:
        raise _too_large(config)
    body = await _read_body(receive, config)
    door = DOORS.get(scope["path"], OTHER)
    query = scope["query_string"]
    target = scope["raw_path"] + b"?" + query if query else scope["raw_path"]
    request = RouterRequest(
        door,
        scope["method"],
        target.decode("latin-1"),
        _for_worker(scope["headers"], config),
        body,
        caller,
        _priority(headers),
    )
    if door is not OTHER or headers.get(b"content-type", b"").startswith(b"application/json"):
        read_fields(request)
    return request


async def _read_body(receive: Receive, config: RouterConfig) -> bytes:
    message = await _next(receive, config)
    if not message.get("more_body"):
        return _checked(message.get("body", b""), config)
    body = bytearray(message["body"])
    while message.get("more_body"):
        message = await _next(receive, config)
        body += message.get("body", b"")
        if len(body) > config.max_body_bytes:
            raise _too_large(config)
    return bytes(body)


async def _next(receive: Receive, config: RouterConfig) -> Mapping[str, Any]:
    try:
        async with asyncio.timeout(config.client_s):
            message = await receive()
    except TimeoutError:
        text = f"nothing of the body came for {config.client_s:g} s"
        raise RefusedError(Refusal(Reason.BODY_TOO_SLOW, text)) from None
    if message["type"] == "http.disconnect":
        raise ClientLeftError
    return message


def _checked(body: bytes, config: RouterConfig) -> bytes:
    if len(body) > config.max_body_bytes:
        raise _too_large(config)
    return body


def _too_large(config: RouterConfig) -> RefusedError:
    text = f"the body is larger than {config.max_body_mib:g} MiB (the router's max_body_mib)"
    return RefusedError(Refusal(Reason.BODY_TOO_LARGE, text))


def read_fields(request: RouterRequest) -> None:
    """Read the model, and if the answer is to be a stream. A body of another path may be none."""
    if not request.body and request.method in ("GET", "HEAD", "DELETE", "OPTIONS"):
        return
    try:
        fields = msgspec.json.decode(request.body, type=_Body)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        if request.door is OTHER:
            return
        text = f"the body is not a JSON object of this API: {error}"
        raise RefusedError(Refusal(Reason.BAD_BODY, text)) from error
    request.model, request.is_stream = fields.model, str(fields.stream).lower() in _TRUE


def _api_key(headers: Mapping[bytes, bytes]) -> str:
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    key = token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
    return key.decode("latin-1")


def _priority(headers: Mapping[bytes, bytes]) -> Priority:
    """Read the class; one that does not exist is `normal`."""
    given = headers.get(_PRIORITY, b"").decode("latin-1").lower()
    return Priority(given) if given in list(Priority) else Priority.NORMAL


def named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Return the headers that are of this connection only, as `Connection` says."""
    values = [value for name, value in headers if name == b"connection"]
    return frozenset(x.strip().lower() for value in values for x in value.split(b","))


def _for_worker(headers: Headers, config: RouterConfig) -> Headers:
    """Return the headers for the worker. It gets the router's key only if the router checks keys:
    else it checks the client's, and all who reach the router could use the router's.
    """
    dropped = _HOP_BY_HOP | named_by_connection(headers)
    if config.api_keys:
        dropped |= {b"authorization", b"x-api-key"}
    kept = [(name, value) for name, value in headers if name not in dropped]
    if config.api_keys and config.worker_api_key:
        kept.append((b"authorization", b"Bearer " + config.worker_api_key.encode()))
    return kept
