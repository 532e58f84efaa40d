"""The names of sessions and tenants that clients give, for the engine and for a router.

Session ids and salts are chosen by clients and may be long or secret: digests stand for them.
"""

from __future__ import annotations

import hashlib

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
