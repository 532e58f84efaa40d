"""Streams: clients that leave, clients that do not read, events that come in pieces."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

import pytest
from starlette.types import Message

from benchmarks.stub_fleet import StubFleet
from ownership.router.answer import Answer
from ownership.router.config import WorkerAddress
from ownership.router.doors import Api, Reason, Refusal
from ownership.router.placer import Placed
from ownership.router.workers import Worker
from tests.ownership.router.bench import RunningRouter, seen
from tests.ownership.router.conftest import StartRouter
from tests.waiting import until


@pytest.fixture
def worker() -> Iterator[StubFleet]:
    with StubFleet(1) as alone:
        yield alone


def begin(router: RunningRouter, **body: Any) -> socket.socket:
    """Send a request and leave its answer unread."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", router.port))
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {len(content)}\r\n\r\n"
    client.sendall(head.encode() + content)
    return client


def counts(worker: StubFleet) -> dict[str, int]:
    return dict(seen(worker.urls[0])["seen"])


@pytest.mark.parametrize("stub", [{"gap_s": 30}, {"first_s": 30}], ids=["streaming", "waiting"])
@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_ends_the_worker_s_part(
    stub: dict[str, int], is_stream: bool, start_router: StartRouter, worker: StubFleet
) -> None:
    if not is_stream and "gap_s" in stub:
        stub = {"first_s": 30}
    router = start_router(workers=worker.urls)
    client = begin(router, stream=is_stream, stub=stub)
    if is_stream and "gap_s" in stub:
        assert client.recv(100).startswith(b"HTTP/1.1 200 ")
    else:
        until(lambda: counts(worker).get("/v1/completions"))
    client.close()
    until(lambda: counts(worker).get("aborted") == 1)
    until(lambda: router.metric("clients_left_total") == 1)
    (name,) = router.states()
    assert router.metric("in_flight", worker=name) == 0


@pytest.mark.parametrize("stub", [{"gap_s": 0.05, "events": 2_000}, {"first_s": 30}])
def test_a_client_that_leaves_after_a_second_request_ends_the_first(
    stub: dict[str, int],
    start_router: StartRouter,
    worker: StubFleet,
    caplog: pytest.LogCaptureFixture,
) -> None:
    router = start_router(workers=worker.urls)
    client = begin(router, stream=True, stub=stub)
    until(lambda: counts(worker).get("/v1/completions"))
    client.sendall(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
    client.close()
    until(lambda: counts(worker).get("aborted") == 1)
    until(lambda: router.metric("clients_left_total") == 1)
    assert not [x for x in caplog.records if x.exc_info], "the router wrote to a closed connection"


def test_a_client_that_leaves_the_queue_is_forgotten(
    start_router: StartRouter, worker: StubFleet
) -> None:
    router = start_router(workers=worker.urls, max_in_flight=1)
    first = begin(router, stub={"first_s": 30})
    until(lambda: counts(worker).get("/v1/completions") == 1)
    second = begin(router)
    until(lambda: router.metric("queued") == 1)
    second.close()
    until(lambda: router.metric("clients_left_total") == 1)
    first.close()
    until(lambda: counts(worker).get("aborted") == 1)
    assert router.complete().status_code == 200
    assert counts(worker)["/v1/completions"] == 2


def test_a_client_that_does_not_read_holds_the_worker_back(
    start_router: StartRouter, worker: StubFleet
) -> None:
    """Else the router would keep all of the answer, 200 MB here."""
    router = start_router(workers=worker.urls)
    event, events = 100_000, 2_000
    client = begin(router, stream=True, stub={"events": events, "padding": event})
    written = [0]

    def stands_still() -> bool:
        written.append(counts(worker).get("bytes", 0))
        return 0 < written[-2] == written[-1]

    until(stands_still, pause_s=0.3)
    assert written[-1] < 0.2 * event * events
    client.close()
    until(lambda: counts(worker).get("aborted") == 1)


def test_a_client_that_never_reads_is_ended(start_router: StartRouter, worker: StubFleet) -> None:
    router = start_router(workers=worker.urls, client_s=1.0)
    with begin(router, stream=True, stub={"events": 5_000, "padding": 100_000}):
        until(lambda: counts(worker).get("aborted") == 1)
        until(lambda: router.metric("clients_left_total") == 1)


# --- Events in pieces -----------------------------------------------------------------------------


class Response:
    """The head of a worker's stream."""

    status = 200
    content_type = "text/event-stream"
    headers = MappingProxyType[str, str]({})
    raw_headers = ((b"Content-Type", b"text/event-stream"),)


def test_a_worker_s_headers_of_its_connection_are_not_passed_on() -> None:
    response: Any = Response()
    own = ((b"Connection", b"close, X-Hop"), (b"X-Hop", b"1"), (b"X-Other", b"2"))
    response.raw_headers = (*Response.raw_headers, *own)
    heads: list[Message] = []

    async def send(message: Message) -> None:
        heads.append(message)

    placed: Any = Placed(None, Worker(WorkerAddress("a", "http://a")))  # type: ignore[arg-type]
    asyncio.run(Answer(send).start(response, placed))
    names = [name for name, _ in heads[0]["headers"]]
    assert names == [b"content-type", b"x-other", b"x-heterocache-worker"]


def sent_of(parts: list[bytes], *, is_cut: bool = False) -> list[bytes]:
    """Return the bodies that a client gets if a worker's stream comes in these parts."""
    messages: list[Message] = []

    async def send(message: Message) -> None:
        messages.append(message)

    async def run() -> None:
        answer = Answer(send)
        placed = Placed(None, Worker(WorkerAddress("a", "http://a")))  # type: ignore[arg-type]
        await answer.start(Response(), placed)  # type: ignore[arg-type]
        for part in parts:
            await answer.send(part)
        if is_cut:
            await answer.cut(Api.OPENAI, Refusal(Reason.WORKER_LOST, "lost"))
        else:
            await answer.end()

    asyncio.run(run())
    assert not messages[-1].get("more_body")
    return [message["body"] for message in messages[1:]]


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_every_split_of_a_stream_gives_the_same_bytes(end: bytes) -> None:
    stream = b"data: 1" + end + b"data: 2" + end + b": no event"
    for one in range(len(stream) + 1):
        for two in range(one, len(stream) + 1):
            bodies = sent_of([x for x in (stream[:one], stream[one:two], stream[two:]) if x])
            assert b"".join(bodies) == stream
            assert all(body.endswith(end) for body in bodies[:-1])


@pytest.mark.parametrize("part", [b":\n\n", b"\n\n", b"\r\n\r\n", b":\r\n\r\n"])
def test_the_shortest_heartbeat_is_passed_on_at_once(part: bytes) -> None:
    assert sent_of([part, b"data: 1\n\n"]) == [part, b"data: 1\n\n", b""]
    assert sent_of([part + b"d", b"ata: 1\n\n"]) == [part, b"data: 1\n\n", b""]


def test_a_stream_that_is_cut_within_an_event_ends_with_an_error_after_whole_events() -> None:
    bodies = sent_of([b"data: 1\n\ndata: {half"], is_cut=True)
    assert bodies[0] == b"data: 1\n\n"
    assert json.loads(bodies[1].removeprefix(b"data: "))["error"]["message"] == "lost"


def test_an_endless_event_is_not_kept() -> None:
    parts = [b"x" * 300_000] * 10
    bodies = sent_of(parts)
    assert b"".join(bodies) == b"".join(parts)
    assert max(map(len, bodies)) <= 4 * 300_000
