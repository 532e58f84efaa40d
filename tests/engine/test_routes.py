"""The routes of an API server ask its own engines, and say so if one is gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hetero_connector.engine.api import engines as asking
from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.api.plugin import HeteroRoutes
from hetero_connector.engine.scheduler.status_socket import StatusServer
from hetero_connector.engine.startup import rendezvous

Start = Callable[[str], StatusServer]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start the socket of an engine that this process's parent has started."""
    monkeypatch.setattr(rendezvous, "_directory", lambda: tmp_path)
    servers: list[StatusServer] = []

    def start(name: str) -> StatusServer:
        answers = {x: lambda x=x: {"engine": name, "asked": x} for x in ("status", "costs")}
        answers["decisions"] = lambda: {"decisions": [{"request_id": x} for x in DECIDED]}
        servers.append(StatusServer(rendezvous.status_path(name), answers))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


DECIDED = (
    "chatcmpl-a-0123abcd",
    "0_chatcmpl-n-0123abcd",
    "1_chatcmpl-n-4567abcd",
    "cmpl-a/b-0-0123abcd",
    "cmpl-a/b-1-4567abcd",
    "cmpl-a/b-1-0-4567abcd",
    "as-given",
    "resp_r_0-0123abcd",
)
"""Requests of an engine, by its ids."""


def client(engine_id: str = "server", count: int = 1) -> TestClient:
    app = FastAPI()
    plugin = HeteroRoutes()
    plugin.attach_router(app)
    app.state.heterocache_engines = Engines(engine_id, os.getppid(), count)
    return TestClient(app)


def test_each_engine_of_the_server_answers_and_no_other(start: Start) -> None:
    for name in ("server_dp0.a", "server_dp1.b", "serverx.c", "other_dp0.d", "xserver.e"):
        start(name)
    answer = client(count=2).get("/v1/heterocache/status")
    assert answer.status_code == 200
    assert answer.json()["count"] == 2
    named = [x["engine"] for x in answer.json()["engines"]]
    assert named == ["server_dp0.a", "server_dp1.b"]
    assert client().get("/v1/heterocache/costs").json()["engines"][0]["asked"] == "costs"


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("chatcmpl-a", DECIDED[:1]),
        ("chatcmpl-n", DECIDED[1:3]),
        ("cmpl-a/b", DECIDED[3:5]),
        ("as-given", DECIDED[6:7]),
        ("resp_r", DECIDED[7:]),
        ("chatcmpl-a-0123abcd", DECIDED[:1]),
        ("chatcmpl", ()),
        (".*", ()),
    ],
)
def test_a_request_is_found_by_the_id_of_its_answer(
    start: Start, asked: str, found: tuple[str, ...]
) -> None:
    start("server_dp0.a")
    answer = client().get(f"/v1/heterocache/requests/{asked}")
    if found:
        assert tuple(x["request_id"] for x in answer.json()["reports"]) == found
    else:
        assert answer.status_code == 404
        assert "newest 256" in answer.json()["error"]["message"]


def test_another_server_with_the_same_engine_id_is_not_asked(start: Start) -> None:
    start("same.a")
    assert rendezvous.sockets_of_server("same", os.getppid())
    assert rendezvous.sockets_of_server("same", os.getpid()) == []
    assert len(rendezvous.sockets_of_server("same", None)) == 1, "under Ray others start engines"


def test_an_engine_that_is_gone_is_named(start: Start) -> None:
    start("server_dp0.a")
    second = start("server_dp1.b")
    routes = client(count=2)
    assert len(routes.get("/v1/heterocache/status").json()["engines"]) == 2
    second.close()
    answer = routes.get("/v1/heterocache/status")
    assert answer.status_code == 200
    first, gone = answer.json()["engines"]
    assert first["asked"] == "status"
    assert "server_dp1.b" in gone["error"]
    assert "gone" in gone["error"]


def test_a_server_without_an_engine_that_answers_says_why(start: Start) -> None:
    for path in ("status", "requests/cmpl-a"):
        answer = client().get(f"/v1/heterocache/{path}")
        assert answer.status_code == 503
        assert "see the engines' logs" in answer.json()["error"]["message"]


def test_an_engine_that_does_not_answer_in_time_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def ask() -> list[asking.Answer]:
        path = tmp_path / f"e.1.{os.getppid()}.{rendezvous._pid_namespace()}.{os.getpid()}.status"

        async def wait(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()
            writer.close()

        async with await asyncio.start_unix_server(wait, path):
            answers = await Engines("e", os.getppid(), 1).ask({"get": "status"}, timeout_s=0.1)
            await asyncio.sleep(0.1)
            return answers

    monkeypatch.setattr(rendezvous, "_directory", lambda: tmp_path)
    (answer,) = asyncio.run(ask())
    assert "has not answered within" in answer["error"]


@pytest.mark.parametrize("connector", ["NixlConnector", None])
def test_a_server_without_the_connector_says_what_to_change(connector: str | None) -> None:
    transfer: Any = connector and SimpleNamespace(
        kv_connector=connector, kv_connector_extra_config={}
    )
    engine_client = SimpleNamespace(vllm_config=SimpleNamespace(kv_transfer_config=transfer))
    app = FastAPI()
    plugin = HeteroRoutes()
    plugin.attach_router(app)
    asyncio.run(plugin.init_state(engine_client, app.state, None))  # type: ignore[arg-type]
    answer = TestClient(app).get("/v1/heterocache/status")
    assert answer.status_code == 503
    assert "--kv-transfer-config" in answer.json()["error"]["message"]
