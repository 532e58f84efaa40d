"""Session headers of coding agents reach vLLM as its own."""

from __future__ import annotations

import pytest
from fastapi import FastAPI, Request
from fastapi.testclient import TestClient
from vllm.entrypoints.generate.base.serving import GenerateBaseServing

from hetero_connector.engine.api.session_header import SessionHeader


@pytest.fixture
def client() -> TestClient:
    app = FastAPI()
    app.add_middleware(SessionHeader)

    @app.post("/v1/chat/completions")
    def chat(request: Request) -> str | None:
        return GenerateBaseServing._get_session_id_from_headers(request)

    return TestClient(app)


@pytest.mark.parametrize(
    ("headers", "session"),
    [
        ({}, None),
        ({"X-Session-ID": "a"}, "a"),
        ({"X-Claude-Code-Session-Id": "c"}, "c"),
        ({"session-id": "s", "thread-id": "t"}, "s"),
        ({"thread-id": "t"}, "t"),
        ({"X-Dynamo-Session-ID": "d", "thread-id": "t"}, "d"),
        ({"X-Session-ID": "a", "X-Claude-Code-Session-Id": "c"}, "a"),
        ({"session-id": "", "thread-id": "t"}, "t"),
        ({"session-id": "x" * 2_000}, None),
        ({"x-other": "o"}, None),
    ],
)
def test_vllm_sees_the_first_session_header(
    client: TestClient, headers: dict[str, str], session: str | None
) -> None:
    assert client.post("/v1/chat/completions", headers=headers).json() == session
