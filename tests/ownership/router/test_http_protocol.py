"""Clients that send too much, too little or nothing before there is a request."""

from __future__ import annotations

import json
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from benchmarks.stub_fleet import StubFleet
from ownership.router import open_files
from ownership.router.http_protocol import MAX_HEAD_BYTES
from ownership.router.open_files import MAX_EXTRA
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.ownership.router.conftest import StartRouter
from tests.waiting import until

LIMIT = 4
GET = b"GET /health HTTP/1.1\r\nhost: a\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
PART = b"a" * MAX_HEAD_BYTES

HEADS = {
    "header": GET + b"x-a: " + PART,
    "headers": GET + b"".join(b"x-%d: a\r\n" % i for i in range(8000)),
    "URL": b"GET /" + PART,
    "empty lines": b"\r\n" * MAX_HEAD_BYTES,
}
LATE = {
    "head": (GET, "head_too_slow"),
    "body": (POST + b"content-length: 9\r\n\r\n", "body_too_slow"),
    "chunks": (POST + b"transfer-encoding: chunked\r\n\r\n", "body_too_slow"),
}


@pytest.fixture(scope="module")
def hasty(fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """A router that waits for no client."""
    config = config_of(tmp_path_factory.mktemp("hasty"), workers=fleet.urls, client_s=1.0)
    with RunningRouter(config) as running:
        yield running


def connect(router: RunningRouter) -> socket.socket:
    return socket.create_connection(("127.0.0.1", router.port), PATIENCE_S)


def rest_of(client: socket.socket) -> bytes:
    """Return what comes until the router closes the connection."""
    return b"".join(iter(lambda: client.recv(65536), b""))


def send_without_end(client: socket.socket) -> None:
    while True:
        client.sendall(PART)


def answer_to(client: socket.socket, request: bytes) -> bytes:
    """Send a request whose answer has no body, and return the answer."""
    client.sendall(request)
    answer = b""
    while not answer.endswith(b"\r\n\r\n"):
        part = client.recv(65536)
        assert part, "the connection was closed"
        answer += part
    return answer


def assert_refused(answer: bytes, status: int, reason: str) -> None:
    head, _, body = answer.rpartition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert f"x-heterocache-reason: {reason}".encode() in head
    assert json.loads(body)["error"]["code"] == status


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_without_end_is_refused_and_others_are_served(
    kind: str, router: RunningRouter
) -> None:
    head = HEADS[kind][:MAX_HEAD_BYTES]
    for before in (b"", GET + b"\r\n"):
        with connect(router) as client:
            if before:
                assert answer_to(client, before).startswith(b"HTTP/1.1 200 ")
            client.sendall(head[:-1])
            assert router.complete().status_code == 200
            client.sendall(head[-1:])
            assert_refused(rest_of(client), 431, "head_too_large")


def test_a_client_that_sends_on_after_its_refusal_is_ended(router: RunningRouter) -> None:
    with connect(router) as client:
        client.sendall(HEADS["header"][:MAX_HEAD_BYTES])
        assert_refused(rest_of(client), 431, "head_too_large")
        with pytest.raises(ConnectionError):
            send_without_end(client)


def test_trailers_without_end_close_the_connection(router: RunningRouter) -> None:
    with connect(router) as client:
        client.sendall(POST + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-a: ")
        with pytest.raises(ConnectionError):
            send_without_end(client)


def test_the_largest_head_and_bodies_of_any_size_are_taken(router: RunningRouter) -> None:
    with connect(router) as client:
        start = GET + b"connection: close\r\nx-a: "
        end = b"\r\n\r\n"
        client.sendall(start + PART[: MAX_HEAD_BYTES - len(start + end)] + end)
        assert rest_of(client).startswith(b"HTTP/1.1 200 ")
    assert router.complete(prompt="x" * 2**21).status_code == 200
    parts = (b'{"a": 1,', *([b" " * 50_000] * 40), b'"b": 2}')
    in_chunks = router.client.post("/v1/completions", content=iter(parts))
    assert in_chunks.status_code == 200


def test_requests_that_come_together_are_all_answered(router: RunningRouter) -> None:
    body = json.dumps({"prompt": "x" * 100_000}).encode()
    post = POST + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    with connect(router) as client:
        last = GET + b"connection: close\r\n\r\n"
        client.sendall(GET + b"\r\n" + post * 5 + GET + b"\r\n" + last)
        assert rest_of(client).count(b"HTTP/1.1 200 ") == 8


@pytest.mark.parametrize("kind", LATE)
@pytest.mark.parametrize("before", [b"", GET + b"\r\n"])
def test_a_request_that_does_not_come_is_given_up(
    kind: str, before: bytes, hasty: RunningRouter
) -> None:
    sent, reason = LATE[kind]
    with connect(hasty) as client:
        if before:
            answer_to(client, before)
        client.sendall(sent)
        assert_refused(client.recv(65536), 408, reason)


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
def test_a_connection_without_a_request_is_closed(sent: bytes, hasty: RunningRouter) -> None:
    with connect(hasty) as client:
        client.sendall(sent)
        assert rest_of(client) == b""


def test_the_body_of_a_request_that_is_answered_is_not_waited_for(hasty: RunningRouter) -> None:
    with connect(hasty) as client:
        answer_to(client, GET + b"content-length: 9\r\n\r\n")
        client.sendall(b"{")
        assert rest_of(client) == b""


def test_a_request_answered_before_its_body_came_does_not_end_the_connection(
    hasty: RunningRouter,
) -> None:
    """A client that has sent all of it takes the connection for its next request."""
    with connect(hasty) as client:
        answer_to(client, GET + b"content-length: 9\r\n\r\n")
        client.sendall(b"123456789")
        time.sleep(0.8)
        answer_to(client, GET + b"\r\n")


def test_neither_a_long_answer_nor_a_pause_after_it_is_cut_off(hasty: RunningRouter) -> None:
    with connect(hasty) as client:
        answer_to(client, GET + b"\r\n")
        time.sleep(1.3)
        answer_to(client, GET + b"\r\n")
    assert "[DONE]" in hasty.stream(stub={"first_s": 1.3, "events": 1})


def test_no_connection_without_a_request_delays_the_end(start_router: StartRouter) -> None:
    router = start_router(drain_s=3600)
    with connect(router) as silent, connect(router) as half, connect(router) as again:
        half.sendall(GET)
        answer_to(again, GET + b"\r\n")
        again.sendall(GET)
        router.complete()
        router.end()
        assert [rest_of(client) for client in (silent, half, again)] == [b"", b"", b""]


@pytest.fixture(scope="module")
def small(fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """A router that has few connections, of which the test's HTTP client uses one or two."""
    config = config_of(tmp_path_factory.mktemp("small"), workers=fleet.urls, max_connections=LIMIT)
    with RunningRouter(config) as running:
        yield running


def test_beyond_its_connections_a_router_answers_503_and_those_that_are_open_go_on(
    small: RunningRouter,
) -> None:
    before = small.metric("connections_refused_total")
    answered = small.metric("refused_total", reason="too_many_connections")
    body = b"{" + b" " * 100_000 + b"}"
    post = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    served, num_refused = list[socket.socket](), 0
    with ExitStack() as stack:
        for _ in range(2 * LIMIT):
            client = stack.enter_context(connect(small))
            client.sendall(post)
            if client.recv(13, socket.MSG_PEEK) == b"HTTP/1.1 200 ":
                served.append(client)
            else:
                assert_refused(rest_of(client), 503, "too_many_connections")
                num_refused += 1
        assert 1 <= len(served) <= LIMIT
        assert small.metric("connections_refused_total") == before + num_refused
        told = small.metric("refused_total", reason="too_many_connections")
        assert told == answered + num_refused, "the alert is by reason"
        for client in served:
            client.sendall(GET + b"connection: close\r\n\r\n")
            assert rest_of(client).count(b"HTTP/1.1 200 ") == 2
    until(lambda: is_served(small))


@pytest.mark.parametrize("path", [b"/health", b"/ready", b"/metrics"])
def test_a_router_that_is_full_still_tells_how_it_is(path: bytes, small: RunningRouter) -> None:
    with ExitStack() as stack:
        *_, extra = (stack.enter_context(connect(small)) for _ in range(LIMIT + 2))
        extra.sendall(GET.replace(b"/health", path) + b"\r\n")
        assert rest_of(extra).startswith(b"HTTP/1.1 200 "), "it is closed after its answer"


def test_connections_far_beyond_the_limit_are_closed_and_then_there_is_room_again(
    small: RunningRouter,
) -> None:
    before = small.metric("connections_refused_total")
    with ExitStack() as stack:
        clients = [stack.enter_context(connect(small)) for _ in range(LIMIT + MAX_EXTRA + 20)]
        assert [read_or_reset(x) for x in clients[-20:]] == [b""] * 20
        assert small.metric("connections_refused_total") >= before + 20
    until(lambda: is_served(small))


def read_or_reset(client: socket.socket) -> bytes:
    try:
        return client.recv(65536)
    except ConnectionResetError:
        return b""


def is_served(router: RunningRouter) -> bool:
    """Return True if a new connection is served."""
    with connect(router) as client:
        client.sendall(POST + b"connection: close\r\ncontent-length: 2\r\n\r\n{}")
        return rest_of(client).startswith(b"HTTP/1.1 200 ")


def test_the_limit_of_open_files_is_that_of_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (1024, 4096))
    assert open_files.default_connections() == 384
    assert open_files.problem_of(1920) == ""
    assert "raise that" in open_files.problem_of(1921)
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert open_files.default_connections() == 2**19 - 128
    assert open_files.problem_of(2**20) == ""
