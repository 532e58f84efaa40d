"""Every path of the router, with real sockets and stub workers."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from ownership.router.doors import DOORS
from ownership.router.requests import Priority, RouterRequest, read_fields
from tests.ownership.router.bench import RunningRouter, error_of, seen
from tests.ownership.router.conftest import StartRouter

STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", DOORS)
def test_an_answer_is_the_worker_s_own(path: str, router: RunningRouter, fleet: StubFleet) -> None:
    through = router.complete(path, prompt="a", stub={"events": 3})
    direct = {url: httpx.post(url + path, json={"stub": {"events": 3}}) for url in fleet.urls}
    assert through.status_code == 200
    assert through.content in [x.content for x in direct.values()]
    worker = through.headers["x-heterocache-worker"]
    assert through.content == direct[f"http://{worker}"].content


@pytest.mark.parametrize("path", STREAMED)
def test_a_stream_is_passed_on_byte_for_byte(
    path: str, router: RunningRouter, fleet: StubFleet
) -> None:
    body = {"stream": True, "stub": {"events": 50, "padding": 100}}
    through = router.client.post(path, json=body)
    direct = httpx.post(fleet.urls[0] + path, json=body)
    assert through.content == direct.content
    assert through.content.endswith(b"data: [DONE]\n\n")
    assert through.headers["content-type"] == direct.headers["content-type"]


def test_the_worker_gets_the_client_s_bytes_and_headers(start_router: StartRouter) -> None:
    with StubFleet(1) as own:
        router = start_router(workers=own.urls)
        body = b'{ "model":"stub-model",\n "prompt": "\xc3\xa9\\u00e9", "x": 1.50 }'
        headers = {"content-type": "application/json", "x-session-id": "s 1"}
        headers |= {"authorization": "Bearer its-own", "traceparent": "00-1-1-01"}
        router.client.post("/v1/completions", content=body, headers=headers)
        about = seen(own.urls[0])
    assert about["last_body"].encode() == body
    assert headers.items() <= about["last_headers"].items()
    assert about["last_headers"]["host"] == own.urls[0].removeprefix("http://")


def test_headers_arrive_as_they_were_sent_but_for_those_of_the_connection(
    start_router: StartRouter,
) -> None:
    with StubFleet(1) as own:
        router = start_router(workers=own.urls)
        headers = [
            (b"x-user", "Müller 文".encode()),
            (b"x-old", "Müller".encode("latin-1")),
            (b"connection", b"keep-alive, X-Secret"),
            (b"x-secret", b"1"),
        ]
        assert router.client.post("/v1/completions", json={}, headers=headers).status_code == 200
        got = seen(own.urls[0])["last_headers"]
    assert (got["x-user"], got["x-old"]) == ("Müller 文", "Müller")
    assert "x-secret" not in got


@pytest.mark.parametrize("stream", [True, 1, 1.0, "true", "Yes", False, 0, "off", None, {"a": 1}])
def test_a_stream_is_asked_for_by_all_values_that_vllm_takes(stream: object) -> None:
    body = json.dumps({"stream": stream}).encode()
    request = RouterRequest(DOORS["/v1/completions"], "POST", "", [], body, "", Priority.NORMAL)
    read_fields(request)
    assert request.is_stream == (stream in (True, "true", "Yes"))


def test_an_unknown_path_is_passed_through_with_its_query(
    router: RunningRouter, fleet: StubFleet
) -> None:
    paths = ["/what/ever%2Fit?is=a%20b", "/v1/audio/transcriptions"]
    for path in paths:
        assert router.client.get(path).status_code == 404
        assert router.client.post(path, content=b"\x00not json").status_code != 502
    known = seen(fleet.urls[0])["seen"] | seen(fleet.urls[1])["seen"]
    assert "/what/ever%2Fit" in known


def test_models_are_those_of_all_workers(start_router: StartRouter, fleet: StubFleet) -> None:
    with StubFleet(1, model="another-model") as other:
        router = start_router(workers=fleet.urls + other.urls)
        listed = router.client.get("/v1/models").json()
        assert sorted(x["id"] for x in listed["data"]) == ["another-model", "stub-model"]
        for _ in range(4):
            answer = router.complete(model="another-model")
            assert answer.json()["model"] == "another-model"


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/v1/completions", "NotFoundError"), ("/v1/messages", "not_found_error")],
)
def test_a_model_that_no_worker_has_is_not_found(
    path: str, kind: str, router: RunningRouter
) -> None:
    answer = router.complete(path, model="missing")
    assert answer.status_code == 404
    assert error_of(answer)["type"] == kind
    assert "missing" in error_of(answer)["message"]
    assert answer.headers["x-heterocache-reason"] == "unknown_model"


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"text"', b'{"model": 5}', b"[" * 100_000, b'{"model": "\xff"}']
)
def test_a_malformed_body_is_refused_with_an_explanation(
    body: bytes, router: RunningRouter
) -> None:
    answer = router.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == 400
    assert "JSON" in error_of(answer)["message"]
    assert answer.headers["x-heterocache-reason"] == "bad_body"
    assert router.complete().status_code == 200


def test_a_body_above_the_cap_is_refused_whatever_it_says_of_its_length(
    start_router: StartRouter,
) -> None:
    router = start_router(max_body_mib=0.5)
    size = 600_000
    answer = router.client.post("/v1/completions", content=b" " * size)
    assert answer.status_code == 413
    assert "max_body_mib" in error_of(answer)["message"]
    in_parts = router.client.post(
        "/v1/completions", content=(b" " * 60_000 for _ in range(size // 60_000))
    )
    assert in_parts.status_code == 413
    assert router.complete(prompt="x" * 400_000).status_code == 200


def test_a_body_that_stops_coming_is_given_up(start_router: StartRouter) -> None:
    router = start_router(client_s=0.3)
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 9\r\n\r\n{")
        assert client.recv(100).startswith(b"HTTP/1.1 408 ")


def test_keys_are_checked_and_not_passed_on(start_router: StartRouter, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst-key\n\nsecond-key\n")
    (tmp_path / "worker-key").write_text("of-the-workers\n")
    with StubFleet(1) as own:
        router = start_router(
            workers=own.urls,
            api_keys=str(tmp_path / "keys"),
            worker_api_key=str(tmp_path / "worker-key"),
        )
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "first-key"}):
            answer = router.complete(headers=headers)
            assert answer.status_code == 401
            refused = router.metric("refused_total", reason="wrong_key")
            models = router.client.get("/v1/models", headers=headers)
            assert models.status_code == 401
            assert models.headers["x-heterocache-reason"] == "wrong_key"
            assert router.metric("refused_total", reason="wrong_key") == refused + 1
            assert router.client.post("/sleep", headers=headers).status_code == 401
        for headers in ({"authorization": "Bearer first-key"}, {"x-api-key": "second-key"}):
            assert router.complete(headers=headers).status_code == 200
            assert router.client.get("/v1/models", headers=headers).status_code == 200
            got = seen(own.urls[0])["last_headers"]
            assert got["authorization"] == "Bearer of-the-workers"
            assert "x-api-key" not in got
        assert router.client.get("/health").status_code == 200


def test_the_routers_key_goes_only_with_requests_whose_key_it_checks(
    start_router: StartRouter, tmp_path: Path
) -> None:
    (tmp_path / "worker-key").write_text("of-the-workers\n")
    with StubFleet(1) as own:
        router = start_router(workers=own.urls, worker_api_key=str(tmp_path / "worker-key"))
        router.complete()
        assert "authorization" not in seen(own.urls[0])["last_headers"]
        router.complete(headers={"authorization": "Bearer the-clients"})
        assert seen(own.urls[0])["last_headers"]["authorization"] == "Bearer the-clients"


def test_health_readiness_and_metrics(start_router: StartRouter) -> None:
    router = start_router()
    assert router.client.get("/health").status_code == 200
    assert set(router.states().values()) == {"up"}
    router.complete()
    assert router.metric("requests_total", path="completions", status="200") == 1
    assert router.metric("first_byte_seconds_count", path="completions") == 1
    for name in router.states():
        assert router.metric("worker_up", worker=name) == 1
        assert router.metric("in_flight", worker=name) == 0


def test_without_a_worker_the_answer_is_503_and_when_to_come_again(
    start_router: StartRouter,
) -> None:
    router = start_router(0, workers=["http://127.0.0.1:9"])
    answer = router.complete()
    assert answer.status_code == 503
    assert answer.headers["x-heterocache-reason"] == "no_worker"
    assert int(answer.headers["retry-after"]) >= 1
    assert router.client.get("/ready").status_code == 503
    assert json.loads(answer.content)["error"]["message"]


def test_a_head_request_has_no_body(router: RunningRouter) -> None:
    assert router.client.head("/what/ever").content == b""
    assert router.complete().status_code == 200
