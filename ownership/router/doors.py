"""The paths of the router, and how errors look on each: as that API's own clients expect them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec


class Api(StrEnum):
    """The formats that paths speak."""

    OPENAI = "openai"
    RESPONSES = "responses"
    ANTHROPIC = "anthropic"


class Door(NamedTuple):
    """One path."""

    name: str
    """Its label in metrics."""
    api: Api = Api.OPENAI


DOORS: Mapping[str, Door] = {
    "/v1/chat/completions": Door("chat"),
    "/v1/completions": Door("completions"),
    "/v1/responses": Door("responses", Api.RESPONSES),
    "/v1/messages": Door("messages", Api.ANTHROPIC),
    "/v1/messages/count_tokens": Door("count_tokens", Api.ANTHROPIC),
    "/v1/embeddings": Door("embeddings"),
    "/tokenize": Door("tokenize"),
    "/detokenize": Door("detokenize"),
}
"""The paths whose bodies are read. All others are passed through."""
OTHER = Door("other")


class Reason(StrEnum):
    """Why the router answered in place of a worker: the header `x-heterocache-reason`."""

    BAD_BODY = "bad_body"
    BODY_TOO_LARGE = "body_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    HEAD_TOO_LARGE = "head_too_large"
    HEAD_TOO_SLOW = "head_too_slow"
    WRONG_KEY = "wrong_key"
    UNKNOWN_MODEL = "unknown_model"
    NO_WORKER = "no_worker"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    WORKER_LOST = "worker_lost"
    RESERVED = "reserved"
    NO_RESERVATION = "no_reservation"
    TOO_MANY_CONNECTIONS = "too_many_connections"


STATUS: Mapping[Reason, int] = {
    Reason.BAD_BODY: 400,
    Reason.BODY_TOO_LARGE: 413,
    Reason.BODY_TOO_SLOW: 408,
    Reason.HEAD_TOO_LARGE: 431,
    Reason.HEAD_TOO_SLOW: 408,
    Reason.WRONG_KEY: 401,
    Reason.UNKNOWN_MODEL: 404,
    Reason.NO_WORKER: 503,
    Reason.QUEUE_FULL: 429,
    Reason.QUEUE_TIMEOUT: 429,
    Reason.WORKER_LOST: 502,
    Reason.RESERVED: 409,
    Reason.NO_RESERVATION: 404,
    Reason.TOO_MANY_CONNECTIONS: 503,
}
_OPENAI_TYPES = {400: "BadRequestError", 401: "AuthenticationError", 404: "NotFoundError"}
_OPENAI_TYPES |= {429: "RateLimitError"}
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class Refusal(NamedTuple):
    """An answer of the router itself."""

    reason: Reason
    message: str
    retry_after_s: int | None = None

    @property
    def status(self) -> int:
        return STATUS[self.reason]


def error_body(api: Api, refusal: Refusal) -> bytes:
    """Return the JSON body of a refusal."""
    return msgspec.json.encode(_error(api, refusal))


def error_event(api: Api, refusal: Refusal) -> bytes:
    """Return the server-sent event that ends a stream whose worker was lost.

    No `[DONE]` follows: a client that looks for it alone sees that the answer is not whole.
    """
    error = _error(api, refusal)
    match api:
        case Api.OPENAI:
            return b"data: %b\n\n" % msgspec.json.encode(error)
        case Api.RESPONSES:
            details = {"code": refusal.reason, "message": refusal.message, "param": None}
            error = {"type": "error", **details}
    return b"event: error\ndata: %b\n\n" % msgspec.json.encode(error)


def _error(api: Api, refusal: Refusal) -> dict[str, Any]:
    status, message = refusal.status, refusal.message
    if api is Api.ANTHROPIC:
        kind = _ANTHROPIC_TYPES.get(status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": message}}
    kind = _OPENAI_TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": None, "code": status}}
