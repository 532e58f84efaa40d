"""`python -m examples.stub_worker --port 8001`: a worker without an engine, to try a router with.

It answers the OpenAI and Anthropic paths with numbered tokens, streamed or not. The body's object
`stub` says how: `events`, `first_s` and `gap_s` (seconds before the first event and between two),
and `fault`: `refuse` (status 503), `fail` (500), `lose` (the connection ends before the first
byte), `cut` (it ends in the middle), `stop` (nothing more comes) or `exit` (the process ends in the
middle, as by kill -9). A prefill for another worker does as `prefill` in `stub` says. `GET /stub`
tells what it has seen, `GET /metrics` how many requests are under way. What is posted
to `/stub/answers` by path is answered there, and added to the metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from collections import Counter
from typing import Any, cast

import httptools
import msgspec
import uvloop

_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_PATHS = frozenset(
    {"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"}
    | {"/v1/messages/count_tokens", "/v1/embeddings", "/tokenize", "/detokenize"}
)


class _Asked(msgspec.Struct):
    """The fields of a body that are read; a long prompt is skipped."""

    stream: bool | None = None
    stub: dict[str, Any] = msgspec.field(default_factory=dict)
    kv_transfer_params: dict[str, Any] | None = None


class StubServer:
    """One stub worker: its name, its model and what it has seen."""

    def __init__(self, name: str, model: str) -> None:
        self.name = name
        self.model = model
        self.is_healthy = True
        self.running = 0
        self.seen: Counter[str] = Counter()
        self.last_headers: dict[str, str] = {}
        self.last_body = ""
        self.answers: dict[str, Any] = {}

    def connection(self) -> StubConnection:
        return StubConnection(self)

    def answer(self, path: str, body: bytes) -> Any:
        """Return the answer to a path that generates nothing; None if it is none of this worker."""
        return self.answers.get(path)


class StubConnection(asyncio.Protocol):
    """One connection of a client."""

    def __init__(self, server: StubServer) -> None:
        self._server = server
        self._can_write = asyncio.Event()
        self._can_write.set()
        self._task: asyncio.Task[None] | None = None
        self._clear()

    def _clear(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._url, self._body, self._headers = b"", bytearray(), dict[str, str]()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's own class
        self._server.seen["connections"] += 1

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._can_write.set()
        if self._task is not None and not self._task.done():
            self._server.seen["aborted"] += 1
            self._task.cancel()

    def pause_writing(self) -> None:
        self._can_write.clear()

    def resume_writing(self) -> None:
        self._can_write.set()

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode().lower()] = value.decode()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._answer())

    async def _answer(self) -> None:
        path, body, headers = self._url.decode().partition("?")[0], bytes(self._body), self._headers
        self._is_head = self._parser.get_method() == b"HEAD"
        self._clear()
        server = self._server
        if path == "/health":
            self._send(200 if server.is_healthy else 503, {})
        elif path == "/v1/models":
            self._send(200, {"object": "list", "data": [{"id": server.model, "object": "model"}]})
        elif path == "/metrics":
            running = f'vllm:num_requests_running{{engine="0"}} {server.running:.1f}\n'
            self._send_text(running + server.answers.get(path, ""))
        elif path == "/stub":
            about = {"last_headers": server.last_headers, "last_body": server.last_body}
            self._send(200, {"seen": server.seen, **about})
        elif path == "/stub/answers":
            server.answers |= json.loads(body)
            self._send(200, {})
        elif path == "/stub/health":
            server.is_healthy = body == b"true"
            self._send(200, {})
        elif (answer := server.answer(path, body)) is not None:
            self._send(200, answer)
        else:
            server.seen[path] += 1
            server.last_headers, server.last_body = headers, body.decode(errors="replace")
            try:
                request = msgspec.json.decode(body or b"{}", type=_Asked)
            except msgspec.DecodeError:
                request = _Asked()
            server.running += 1
            try:
                await self._generate(path, request)
            finally:
                server.running -= 1

    async def _generate(self, path: str, request: _Asked) -> None:
        stub = request.stub
        handed = {}
        if (request.kv_transfer_params or {}).get("do_remote_decode"):
            stub = stub.get("prefill", {})
            handed = {"kv_transfer_params": {"do_remote_prefill": True, "prefilled_tokens": 7}}
        fault = stub.get("fault")
        if fault in ("refuse", "fail"):
            status = 503 if fault == "refuse" else 500
            self._send(status, {"error": {"message": f"the stub {fault}s"}})
            return
        if delay_s := stub.get("first_s"):
            await asyncio.sleep(delay_s)
        if fault == "lose":
            self._server.seen["lost"] += 1
            self._transport.abort()
        elif path not in _PATHS:
            self._send(404, {"detail": "Not Found"})
        elif not request.stream:
            if fault == "cut":
                part = b"x" * (1 + stub.get("padding", 0))
                head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % (2 * len(part))
                self._transport.write(head + part)
                self._transport.close()
            elif fault is None:
                text = " ".join(map(str, range(stub.get("events", 16))))
                choice = {"index": 0, "text": text, "message": {"content": text}}
                answer = {"id": "stub", "model": self._server.model, "choices": [choice]}
                self._send(200, answer | handed | {"served_by": self._server.name})
            elif fault == "exit":
                os.kill(os.getpid(), signal.SIGKILL)
        else:
            await self._stream(stub, fault)
        self._server.seen["answered"] += 1

    async def _stream(self, stub: dict[str, Any], fault: str | None) -> None:
        events, gap_s = stub.get("events", 16), stub.get("gap_s", 0.0)
        padding = "x" * stub.get("padding", 0)
        write = self._transport.write
        write(_STREAM_HEAD)
        for number in range(events):
            event = b'data: {"choices": [{"index": 0, "text": "%d%s"}]}\n\n' % (
                number,
                padding.encode(),
            )
            if fault and number == events // 2:
                write(b"%x\r\n%b" % (len(event), event[: len(event) // 2]))
                if fault == "cut":
                    self._transport.abort()
                elif fault == "exit":
                    os.kill(os.getpid(), signal.SIGKILL)
                await asyncio.Event().wait()
            write(b"%x\r\n%b\r\n" % (len(event), event))
            self._server.seen["bytes"] += len(event)
            await self._can_write.wait()
            await asyncio.sleep(gap_s)
        write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        self._send_body(status, json.dumps(answer).encode(), "application/json")

    def _send_text(self, text: str) -> None:
        self._send_body(200, text.encode(), "text/plain; version=0.0.4")

    def _send_body(self, status: int, body: bytes, kind: str) -> None:
        head = f"HTTP/1.1 {status} OK\r\ncontent-type: {kind}\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        if not self._is_head:
            self._transport.write(body)


async def serve(host: str, port: int, name: str, model: str) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(StubServer(name, model).connection, host, port, backlog=1024)
    print(f"listening on port {server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.stub_worker")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8001, help="0: any that is free")
    parser.add_argument("--name", default="stub")
    parser.add_argument("--model", default="stub-model")
    given = parser.parse_args()
    uvloop.run(serve(given.host, given.port, given.name, given.model))


if __name__ == "__main__":
    main()
