"""The names of sessions and tenants that clients give, for the engine and for a router.

Session ids and salts are chosen by clients and may be long or secret: digests stand for them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hetero_connector.artifacts.canonical import encode

VLLM_HEADER = "x-session-id"
SESSION_HEADERS = (
    VLLM_HEADER,
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "session-id",
    "thread-id",
)
"""Headers of vLLM, Dynamo, Claude Code, Codex and OpenCode, in lower case. The first that a request
has names its session."""
MAX_ID_BYTES = 1_024


def session_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> str | None:
    """Return the id that a request gives for its session, None without one.

    `headers`: by name in lower case. The order is vLLM's and the connector's: the body's
    `session_id`, headers, `kv_transfer_params`. Only then come ids that no engine reads: that of
    Claude Code in `metadata`, and `prompt_cache_key`, which may stand for several sessions.
    """
    for given in _ids(headers, body):
        if isinstance(given, str) and 0 < len(given.encode(errors="replace")) <= MAX_ID_BYTES:
            return given
    return None


def _ids(headers: Mapping[str, str], body: Mapping[str, Any]) -> Iterator[object]:
    yield body.get("session_id")
    yield from (headers.get(name) for name in SESSION_HEADERS)
    params = _object(body.get("kv_transfer_params"))
    yield params.get("session_id")
    yield _object(params.get("heterocache")).get("session_id")
    user = _object(body.get("metadata")).get("user_id")
    if isinstance(user, str) and user.startswith("{") and len(user) <= MAX_ID_BYTES:
        with contextlib.suppress(ValueError, RecursionError):  # another client's id, no JSON
            yield _object(json.loads(user)).get("session_id")
    yield body.get("prompt_cache_key")


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def tenant_of(salt: str | None) -> bytes:
    """Return the tenant of requests with this cache salt; they share state. b"": without one."""
    return b"" if salt is None else _digest(encode(salt))


def model_digest(model: str) -> bytes:
    """Return what stands for an adapter's name; "": for the model without an adapter."""
    return _digest(encode(["model", model]))


def session_key(salt: str | None, session_id: str) -> bytes:
    """Return the key of a session by the id that its clients gave: it is valid within its salt."""
    return _digest(encode([salt, session_id]))


def _digest(text: bytes) -> bytes:
    """Return 16 bytes for a text of any length: clients choose ids and salts."""
    return hashlib.blake2b(text, digest_size=16).digest()
