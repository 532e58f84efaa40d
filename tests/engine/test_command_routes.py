"""The routes that change something: guarded, checked, bounded, and carried out by real engines."""

from __future__ import annotations

import json
import os
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from hetero_connector.engine.api import command_routes
from hetero_connector.engine.api.command_routes import COMMANDS, MAX_AT_ONCE, MAX_BODY_BYTES
from hetero_connector.engine.api.engines import Engines
from hetero_connector.engine.api.plugin import HeteroRoutes
from hetero_connector.engine.scheduler.status_socket import StatusServer
from hetero_connector.engine.startup import rendezvous
from tests.engine.fakes import FakeRequest
from tests.engine.socket_engine import SocketEngine
from tests.engine.stepped import tokens

Start = Callable[..., SocketEngine]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder where engines are found."""
    path = tmp_path / "sockets"
    path.mkdir()
    monkeypatch.setattr(rendezvous, "_directory", lambda: path)
    return path


@pytest.fixture
def start() -> Iterator[Start]:
    engines: list[SocketEngine] = []

    def start(name: str = "server.a", **options: Any) -> SocketEngine:
        engines.append(SocketEngine(name, **options))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


class Tokenization:
    """vLLM's own, which a word makes a token of its length."""

    async def create_tokenize(self, asked: Any, raw_request: object) -> Any:
        if asked.model == "unknown":
            error = SimpleNamespace(code=404, message="The model `unknown` does not exist.")
            return SimpleNamespace(error=error)
        text = getattr(asked, "prompt", None) or asked.messages[0]["content"]
        return SimpleNamespace(tokens=[len(word) for word in text.split()])


def client(has_key: bool = True) -> TestClient:
    app = FastAPI()
    HeteroRoutes().attach_router(app)
    app.state.heterocache_engines = Engines("server", os.getppid(), 1)
    app.state.heterocache_has_key = has_key
    app.state.serving_tokenization = Tokenization()
    return TestClient(app)


def turn(name: str, count: int = 256, seed: int = 0, **request: Any) -> FakeRequest:
    return FakeRequest(name, tokens(count, seed), **request)


def test_without_an_api_key_nothing_is_changed(start: Start) -> None:
    engine = start()
    request = turn("1")
    engine.run(request)
    for name in COMMANDS:
        answer = client(has_key=False).post(f"/v1/heterocache/{name}", json={"all": True})
        assert answer.status_code == 403
        assert "--api-key" in answer.json()["error"]["message"]
    assert engine.stored(request) == 256
    assert client(has_key=False).get("/v1/heterocache/status").status_code == 200


@pytest.mark.parametrize(
    ("option", "variable", "has_key"),
    [
        *((None, None, False), ([], "", False), ([""], "x", False)),
        *((["k"], None, True), (None, "k", True), ([], "k", True)),
    ],
)
def test_the_key_is_the_one_that_vllm_demands(
    monkeypatch: pytest.MonkeyPatch, option: list[str] | None, variable: str | None, has_key: bool
) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    if variable is not None:
        monkeypatch.setenv("VLLM_API_KEY", variable)
    assert command_routes.has_api_key(Namespace(api_key=option)) is has_key


def test_commands_are_carried_out_by_every_engine(start: Start, tmp_path: Path) -> None:
    engines = [
        start(f"server_dp{n}.a", ssd_dir=tmp_path / f"{n}", ssd_bytes=1 << 22) for n in (0, 1)
    ]
    other = start("another.a")
    request, session = turn("1", seed=1), turn("2", session_id="s", cache_salt="t")
    for engine in [*engines, other]:
        engine.run(turn("1", seed=1))
        engine.run(turn("2", session_id="s", cache_salt="t"))
    routes = client()
    answer = routes.post("/v1/heterocache/clear", json={"session": "s", "salt": "t"})
    assert answer.status_code == 200
    assert [x["cleared"] for x in answer.json()["engines"]] == ["session"] * 2
    assert [x.stored(session) for x in engines] == [0, 0]
    assert other.stored(session) == 256, "another server's"
    for engine in engines:
        engine.leave_to_ssd()
    answer = routes.post("/v1/heterocache/warm", json={"token_ids": request.all_token_ids})
    assert [x["dram_tokens"] for x in answer.json()["engines"]] == [256, 256]
    answer = routes.post("/v1/heterocache/drain", json={"wait_s": 10})
    assert [x["written"] for x in answer.json()["engines"]] == [True, True]
    drained = turn("3", seed=7)
    engines[0].run(drained)
    assert engines[0].stored(drained) == 0
    assert routes.post("/v1/heterocache/resume").status_code == 200
    again = turn("4", seed=7)
    engines[0].run(again)
    assert engines[0].stored(again) == 256
    answer = routes.post("/v1/heterocache/scrub", json={"mib_per_s": 1e5})
    assert {x["scrub"]["state"] for x in answer.json()["engines"]} <= {"running", "complete"}
    assert routes.post("/v1/heterocache/clear", json={"all": True}).status_code == 200
    assert engines[0].stored(again) == 0


def test_a_command_that_one_engine_refuses_is_an_error(start: Start, tmp_path: Path) -> None:
    start("server_dp0.a", ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    start("server_dp1.a")
    answer = client().post("/v1/heterocache/drain")
    assert answer.status_code == 409
    assert "no ssd_dir" in answer.json()["error"]["message"]
    drained, refused = answer.json()["engines"]
    assert drained["written"] is True
    assert "error" in refused


def test_a_prompt_is_given_as_ids_text_or_messages(start: Start, tmp_path: Path) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    words = ["x" * (1 + n % 9) for n in range(128)]
    engine.run(FakeRequest("1", [len(word) for word in words]))
    text = " ".join(words)
    for prompt in (
        {"token_ids": [len(word) for word in words]},
        {"prompt": text, "add_special_tokens": False},
        {"messages": [{"role": "system", "content": text}], "chat_template_kwargs": {"a": 1}},
    ):
        engine.leave_to_ssd()
        answer = client().post("/v1/heterocache/warm", json={**prompt, "keep_s": 60})
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["engines"]
        assert found == {"tokens": 128, "stored_tokens": 128, "dram_tokens": 128}
    answer = client().post("/v1/heterocache/warm", json={"prompt": text, "salt": "other"})
    assert answer.json()["engines"][0]["stored_tokens"] == 0
    answer = client().post("/v1/heterocache/warm", json={"prompt": text, "model": "unknown"})
    assert answer.status_code == 404
    assert "does not exist" in answer.json()["error"]["message"]


def test_a_prompt_and_a_session_are_pinned(start: Start) -> None:
    engine = start()
    request = turn("1", session_id="s")
    engine.run(request)
    routes = client()
    for named in ({"token_ids": request.all_token_ids}, {"session": "s"}):
        answer = routes.post("/v1/heterocache/pin", json={**named, "seconds": 60})
        assert answer.json()["engines"][0]["pinned_tokens"] == 256
        answer = routes.post("/v1/heterocache/unpin", json=named)
        assert answer.json()["engines"][0]["unpinned_tokens"] == 256


BAD: list[tuple[str, Any, int, str]] = [
    ("clear", {}, 400, "say what to clear"),
    ("clear", {"all": "yes"}, 400, "true or false"),
    ("clear", {"session": {"a": 1}}, 400, "text"),
    ("clear", {"all": True, "salt": "x"}, 400, "nothing else"),
    ("clear", {"sesion": "s"}, 400, "unknown argument sesion"),
    ("clear", {"get": "status"}, 400, "unknown argument get"),
    ("clear", {"do": "drain"}, 400, "unknown argument do"),
    ("clear", {"session": "../../etc/passwd"}, 409, "no such session"),
    ("clear", {"session": "unknown"}, 409, "no such session"),
    ("clear", [1], 400, "a JSON object"),
    ("clear", None, 400, "a JSON object"),
    ("warm", {}, 400, "one of token_ids, prompt and messages"),
    ("warm", {"prompt": "x", "messages": []}, 400, "one of"),
    ("warm", {"prompt": 7}, 400, "prompt"),
    ("warm", {"prompt": "x", "temperature": 1}, 400, "unknown argument temperature"),
    ("warm", {"messages": "x"}, 400, "messages"),
    ("warm", {"token_ids": "AAAA"}, 400, "token_ids must be"),
    ("warm", {"token_ids": []}, 400, "token_ids must be"),
    ("warm", {"token_ids": [1, "x"]}, 400, "integers"),
    ("warm", {"token_ids": [1 << 40]}, 400, "integers"),
    ("warm", {"token_ids": [-1]}, 400, "integers"),
    ("warm", {"token_ids": [1], "temperature": 1}, 400, "temperature"),
    ("warm", {"tokens": "AAAA"}, 400, "unknown argument tokens"),
    ("warm", {"token_ids": [1], "wait_s": 1e9}, 400, "wait_s"),
    ("warm", {"token_ids": [1], "wait_s": "long"}, 400, "wait_s"),
    ("warm", {"token_ids": [1], "keep_s": -1}, 400, "keep_s"),
    ("pin", {}, 400, "one of token_ids, prompt and messages"),
    ("pin", {"session": "s", "token_ids": [1]}, 400, "unknown argument token_ids"),
    ("pin", {"token_ids": [1], "seconds": 0}, 400, "seconds"),
    ("pin", {"session": "unknown"}, 409, "no such session"),
    ("drain", {"resume": True}, 400, "unknown argument resume"),
    ("resume", {"wait_s": 1, "stop": True}, 400, "unknown argument stop"),
    ("scrub", {"mib_per_s": 0}, 400, "mib_per_s"),
]


@pytest.mark.parametrize(("name", "body", "status", "problem"), BAD)
def test_a_malformed_body_is_answered_with_what_to_change(
    start: Start, tmp_path: Path, name: str, body: Any, status: int, problem: str
) -> None:
    engine = start(ssd_dir=tmp_path / "ssd", ssd_bytes=1 << 22)
    request = turn("1")
    engine.run(request)
    answer = client().post(f"/v1/heterocache/{name}", content=json.dumps(body), headers=JSON)
    assert (answer.status_code, problem in answer.json()["error"]["message"]) == (status, True), (
        answer.text
    )
    assert engine.stored(request) == 256
    assert not engine.engine.side.commands.is_draining


JSON = {"Content-Type": "application/json"}
GARBAGE = [
    (b"{", JSON, 400),
    (b"\xff\xfe", JSON, 400),
    (b"[" * 100_000, JSON, 400),
    (b'{"all": true}', {"Content-Type": "text/plain"}, 415),
    (b'{"all": true}', {"Content-Type": "application/x-www-form-urlencoded"}, 415),
    (b'{"all": true}', {}, 415),
    (b" " * (MAX_BODY_BYTES + 1), JSON, 413),
]


@pytest.mark.parametrize(("body", "headers", "status"), GARBAGE)
def test_garbage_is_refused(
    start: Start, body: bytes, headers: dict[str, str], status: int
) -> None:
    engine = start()
    request = turn("1")
    engine.run(request)
    answer = client().post("/v1/heterocache/clear", content=body, headers=headers)
    assert answer.status_code == status
    assert engine.stored(request) == 256


def test_a_body_without_end_is_not_kept(start: Start) -> None:
    """Without a length, 50 MB: it is refused once it is too long."""
    sent = []

    def parts() -> Iterator[bytes]:
        for _ in range(50):
            sent.append(1)
            yield b" " * (1 << 20)

    answer = client().post("/v1/heterocache/clear", content=parts(), headers=JSON)
    assert answer.status_code == 413


def test_more_commands_at_once_are_sent_away_and_questions_are_answered() -> None:
    holding, entered = threading.Event(), threading.Semaphore(0)

    def hold(arguments: object) -> dict[str, bool]:
        entered.release()
        assert holding.wait(30)
        return {"done": True}

    path = rendezvous.status_path("server.a")
    server = StatusServer(path, {"status": lambda: {"ok": True}}, {"scrub": hold})
    try:
        with client() as routes, ThreadPoolExecutor(MAX_AT_ONCE) as pool:
            held = [
                pool.submit(routes.post, "/v1/heterocache/scrub", json={})
                for _ in range(MAX_AT_ONCE)
            ]
            for _ in held:
                assert entered.acquire(timeout=30)
            assert routes.post("/v1/heterocache/scrub", json={}).status_code == 429
            assert routes.get("/v1/heterocache/status").status_code == 200
            holding.set()
            assert [x.result().status_code for x in held] == [200] * MAX_AT_ONCE
            assert routes.post("/v1/heterocache/scrub", json={}).status_code == 200
    finally:
        holding.set()
        server.close()


def test_without_an_engine_that_answers_it_says_so() -> None:
    answer = client().post("/v1/heterocache/clear", json={"all": True})
    assert answer.status_code == 503
    assert "see the engines' logs" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    "body", [b'{"all": true, "\\ud800": 1}', b'{"token_ids": [1], "\\udfff": 1}']
)
def test_text_that_is_no_unicode_is_refused(start: Start, body: bytes) -> None:
    start()
    headers = {"Content-Type": "application/json"}
    for name in ("clear", "warm"):
        answer = client().post(f"/v1/heterocache/{name}", content=body, headers=headers)
        assert answer.status_code == 400
        assert "the body is not JSON" in answer.json()["error"]["message"]
