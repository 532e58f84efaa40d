"""Reads a request as Ray's router has it: a method of the deployment, and its arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hetero_connector.session_ids import SESSION_HEADERS, VLLM_HEADER
from ownership.router.doors import DOORS, OTHER
from ownership.router.requests import Priority, RouterRequest

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_PATHS = {"chat": _CHAT, "completions": _COMPLETIONS}
PICK = "__call__"
"""The method of a request that is only placed here, and sent by Ray's proxy: direct streaming."""


def request_of(
    method: str, body: object, headers: Mapping[str, str], session_id: str = ""
) -> RouterRequest:
    """Return the request that a call of a deployment's `method` is.

    `body`: a pydantic model or a namespace with the request's fields; None if Ray has none.
    `headers`: the client's. `session_id`: as Ray has read it; "" without one.
    """
    path = _PATHS.get(method, "")
    if method == PICK:
        path = _COMPLETIONS if hasattr(body, "prompt") else _CHAT
    names = {name.lower(): value for name, value in headers.items()}
    if session_id:
        names.setdefault(VLLM_HEADER, session_id)
    return RouterRequest(
        DOORS.get(path, OTHER),
        "POST",
        path,
        [
            (x.encode(), names[x].encode("latin-1", "replace"))
            for x in SESSION_HEADERS
            if x in names
        ],
        _encoded(body) if path else b"",
        "",
        Priority.NORMAL,
        is_whole=True,  # Ray sends it to one replica; its prefill deployments are its own
    )


def _encoded(body: Any) -> bytes:
    """Return the fields that the client gave, as JSON; b"" for what has none."""
    if body is None:
        return b"{}"
    if hasattr(body, "model_dump_json"):
        return str(body.model_dump_json(exclude_unset=True)).encode(errors="replace")
    try:
        return msgspec.json.encode(vars(body))
    except TypeError:  # no object of ours: the replica says what is wrong with it
        return b"{}"
