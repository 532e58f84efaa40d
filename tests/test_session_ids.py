"""The id that a request gives for its session, in every way that coding agents do."""

from __future__ import annotations

from typing import Any

import pytest

from hetero_connector.session_ids import SESSION_HEADERS, session_of


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        ({}, {}, None),
        *(({name: "h"}, {"prompt_cache_key": "k"}, "h") for name in SESSION_HEADERS),
        ({"thread-id": "t", "session-id": "s"}, {}, "s"),
        ({"x-session-id": "h"}, {"session_id": "b"}, "b"),
        ({}, {"kv_transfer_params": {"session_id": "p"}, "prompt_cache_key": "k"}, "p"),
        ({}, {"kv_transfer_params": {"heterocache": {"session_id": "o"}}}, "o"),
        ({}, {"metadata": {"user_id": '{"session_id": "c"}'}, "prompt_cache_key": "k"}, "c"),
        ({}, {"metadata": {"user_id": "{no JSON"}, "prompt_cache_key": "k"}, "k"),
        ({}, {"metadata": {"user_id": "[" * 900}, "prompt_cache_key": "k"}, "k"),
        ({}, {"session_id": "", "prompt_cache_key": "k"}, "k"),
        ({"session-id": "x" * 2_000}, {"session_id": 5, "kv_transfer_params": [1]}, None),
        ({}, {"session_id": "\ud800"}, "\ud800"),
    ],
)
def test_the_first_id_counts(
    headers: dict[str, str], body: dict[str, Any], session: str | None
) -> None:
    assert session_of(headers, body) == session
