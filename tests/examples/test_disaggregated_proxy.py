"""The proxy before small fake servers: real sockets, one event loop."""

from __future__ import annotations

import asyncio
import io
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import ClientError, ClientResponse, ClientSession, web

from examples.disaggregated_prefill.proxy import Proxy

PATH = "/v1/completions"
PROMPT = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 7, "stream": True}

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def done(request: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": []}, headers={"X-Request-Id": "r1"})


class FakeServer:
    """Notes what it is asked and answers as told."""

    def __init__(self, answer: Answer = done) -> None:
        self.answer = answer
        self.asked: list[dict[str, Any]] = []
        self.headers: list[Mapping[str, str]] = []
        self.asked_s: list[float] = []
        self.url = "http://127.0.0.1:1"  # no server listens there
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=0)
        app.router.add_post("/{path:.*}", self._post)
        app.router.add_get("/v1/models", done)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        self.url = await listen(self._runner)

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _post(self, request: web.Request) -> web.StreamResponse:
        self.asked_s.append(time.monotonic())
        self.asked.append(await request.json())
        self.headers.append(request.headers.copy())
        return await self.answer(request)


async def listen(runner: web.AppRunner) -> str:
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0]
    return f"http://{host}:{port}"


class Bench:
    """The proxy, its servers, and a client."""

    def __init__(self, client: ClientSession, url: str) -> None:
        self.client = client
        self.url = url

    def post(self, body: object = PROMPT, path: str = PATH, **headers: str) -> Any:
        data = io.BytesIO(json.dumps(body).encode())
        headers["Content-Type"] = "application/json"
        return self.client.post(self.url + path, data=data, headers=headers)

    async def ask(self, body: object = PROMPT, **headers: str) -> tuple[int, bytes]:
        async with self.post(body, **headers) as answer:
            return answer.status, await answer.read()


@asynccontextmanager
async def proxied(
    prefillers: list[FakeServer], decoders: list[FakeServer], prefill_s: float = 20.0
) -> AsyncIterator[Bench]:
    """Servers that were not started cannot be reached."""
    proxy = Proxy([s.url for s in prefillers], [s.url for s in decoders], prefill_s)
    runner = web.AppRunner(proxy.app(), handler_cancellation=True, shutdown_timeout=0.1)
    url = await listen(runner)
    try:
        async with ClientSession() as client:
            yield Bench(client, url)
    finally:
        await runner.cleanup()
        for server in (*prefillers, *decoders):
            await server.stop()


async def started(*answers: Answer) -> list[FakeServer]:
    servers = [FakeServer(answer) for answer in answers]
    for server in servers:
        await server.start()
    return servers


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def within_a_while() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(within_a_while())


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_a_prefill_with_one_token_then_the_whole_to_the_decoder(path: str) -> None:
    async def test() -> None:
        prefiller, decoder = await started(done, done)
        wanted = {
            "logprobs": 3,
            "n": 2,
            "min_tokens": 5,
            "max_completion_tokens": 9,
            "stream_options": {"include_usage": True},
            "kv_transfer_params": {"heterocache": {"expected_back_s": 4.0, "ttl_s": 9.0}},
            "session_id": "s",
            "temperature": 0.5,
        }
        async with proxied([prefiller], [decoder]) as bench:
            headers = {"Authorization": "Bearer key", "X-Request-Id": "r1"}
            async with bench.post(PROMPT | wanted, path, **headers) as answer:
                assert await answer.json() == {"choices": []}
                assert answer.headers["X-Request-Id"] == "r1"
        assert prefiller.asked == [
            {
                "model": "m",
                "prompt": [1, 2, 3],
                "max_tokens": 1,
                "stream": False,
                "kv_transfer_params": {"do_remote_decode": True, "heterocache": {"ttl_s": 9.0}},
                "session_id": "s",
                "temperature": 0.5,
            }
        ]
        params = wanted["kv_transfer_params"] | {"do_remote_prefill": True}
        assert decoder.asked == [PROMPT | wanted | {"kv_transfer_params": params}]
        assert prefiller.asked_s < decoder.asked_s
        for server in (prefiller, decoder):
            assert server.headers[0]["Authorization"] == "Bearer key"
            assert server.headers[0]["Content-Type"] == "application/json"
            assert server.headers[0]["X-Request-Id"] == "r1"
            assert server.headers[0]["Host"] == server.url.removeprefix("http://")

    run(test)


@pytest.mark.parametrize(
    ("content", "handed"),
    [
        (b'{"kv_transfer_params": {"prefilled_tokens": 2}}', {"prefilled_tokens": 2}),
        (b'{"kv_transfer_params": {"remote_prefill_cached_tokens": 2}}', {}),
        (b'{"kv_transfer_params": null}', {}),
    ],
)
def test_the_prefillers_answer_goes_to_the_decoder(content: bytes, handed: dict[str, Any]) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    async def test() -> None:
        (prefiller,), (decoder,) = await started(answer), await started(done)
        async with proxied([prefiller], [decoder]) as bench:
            assert (await bench.ask())[0] == 200
        assert decoder.asked[0]["kv_transfer_params"] == {"do_remote_prefill": True, **handed}

    run(test)


@pytest.mark.parametrize("content", [b'{"kv_transfer_params": 3}', b"[]", b"{"])
def test_a_prefillers_answer_that_is_none_leaves_the_whole_to_the_decoder(content: bytes) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(body=content)

    async def test() -> None:
        prefiller, decoder = await started(answer, done)
        async with proxied([prefiller], [decoder]) as bench:
            assert (await bench.ask())[0] == 200
        assert len(prefiller.asked) == 1
        assert decoder.asked == [PROMPT]

    run(test)


@pytest.mark.parametrize("params", [{"heterocache": {"no_store": True}}, {"max_offload_tokens": 0}])
def test_a_prompt_that_must_not_be_stored_is_computed_by_the_decoder(params: Any) -> None:
    async def test() -> None:
        prefiller, decoder = await started(done, done)
        async with proxied([prefiller], [decoder]) as bench:
            assert (await bench.ask(PROMPT | {"kv_transfer_params": params}))[0] == 200
        assert not prefiller.asked
        assert decoder.asked == [PROMPT | {"kv_transfer_params": params}]

    run(test)


def test_an_answer_streams_through_as_it_comes() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def in_two_parts(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: one\n\n")
            await go_on.wait()
            await response.write(b"data: two\n\n")
            return response

        prefiller, decoder = await started(done, in_two_parts)
        async with proxied([prefiller], [decoder]) as bench, bench.post() as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.content.readuntil(b"\n\n") == b"data: one\n\n"
            go_on.set()
            assert await answer.content.read() == b"data: two\n\n"

    run(test)


@pytest.mark.parametrize("how", ["body", "header", "params"])
def test_a_session_stays_on_one_decoder(how: str) -> None:
    async def test() -> None:
        decoders = await started(done, done, done)
        sessions = [f"agent-{i}" for i in range(12)]
        async with proxied([], decoders) as bench:
            for session in 3 * sessions:
                where = {
                    "body": {"session_id": session},
                    "params": {"kv_transfer_params": {"session_id": session}},
                }.get(how, {})
                named = {"X-Session-ID": session} if how == "header" else {}
                await bench.ask(PROMPT | {"user": session} | where, **named)
        users = [{body["user"] for body in decoder.asked} for decoder in decoders]
        assert all(users)
        assert sum(map(len, users)) == len(sessions)

    run(test)


def test_the_prefiller_with_the_least_to_do_is_asked() -> None:
    async def test() -> None:
        go_on = asyncio.Event()

        async def when_told(request: web.Request) -> web.StreamResponse:
            if (await request.json())["prompt"] == [9]:
                await go_on.wait()
            return await done(request)

        *prefillers, decoder = await started(when_told, when_told, done)
        async with proxied(prefillers, [decoder]) as bench:
            long = asyncio.create_task(bench.ask(PROMPT | {"prompt": [9]}))
            while not any(p.asked for p in prefillers):
                await asyncio.sleep(0.001)
            for _ in range(3):
                await bench.ask()
            busy, idle = sorted(prefillers, key=lambda p: len(p.asked))
            assert (len(busy.asked), len(idle.asked)) == (1, 3)
            go_on.set()
            assert (await long)[0] == 200
            for _ in range(4):  # both idle: they take turns
                await bench.ask()
            assert (len(busy.asked), len(idle.asked)) == (3, 5)

    run(test)


def test_without_its_prefiller_the_decoder_computes_alone() -> None:
    async def test() -> None:
        away = FakeServer()
        (decoder,) = await started(done)
        async with proxied([away], [decoder]) as bench:
            assert (await bench.ask())[0] == 200
        assert decoder.asked == [PROMPT]

    run(test)


def test_another_prefiller_takes_the_place_of_one_that_is_away() -> None:
    async def test() -> None:
        away = FakeServer()
        prefiller, decoder = await started(done, done)
        async with proxied([away, prefiller], [decoder]) as bench:
            for _ in range(4):
                assert (await bench.ask())[0] == 200
        assert len(prefiller.asked) == 4
        assert all(body["kv_transfer_params"]["do_remote_prefill"] for body in decoder.asked)

    run(test)


@pytest.mark.parametrize("status", [400, 404, 500, 503])
def test_a_prefill_that_fails_leaves_the_whole_to_the_decoder(status: int) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no"}}, status=status)

    async def test() -> None:
        prefiller, decoder = await started(refuse, done)
        async with proxied([prefiller], [decoder]) as bench:
            assert (await bench.ask())[0] == 200
        assert len(prefiller.asked) == 1
        assert decoder.asked == [PROMPT]

    run(test)


def test_a_prefiller_that_hangs_is_waited_for_once() -> None:
    async def never(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(60)
        raise AssertionError("the test did not end before this answer")

    async def test() -> None:
        prefiller, decoder = await started(never, done)
        async with proxied([prefiller], [decoder], prefill_s=0.3) as bench:
            for _ in range(3):
                assert (await bench.ask())[0] == 200
        assert len(prefiller.asked) == 1
        assert decoder.asked_s[0] - prefiller.asked_s[0] >= 0.25
        assert decoder.asked == 3 * [PROMPT]

    run(test)


def test_a_decoder_that_is_away_is_named() -> None:
    async def test() -> None:
        (prefiller,) = await started(done)
        away = FakeServer()
        async with proxied([prefiller], [away]) as bench:
            status, body = await bench.ask()
            async with bench.client.get(f"{bench.url}/v1/models") as models:
                assert models.status == 502
        assert status == 502
        assert away.url in json.loads(body)["error"]["message"]

    run(test)


def test_what_the_decoder_says_of_a_bad_request_is_passed_on() -> None:
    async def too_long(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "too long"}}, status=400)

    async def test() -> None:
        prefiller, decoder = await started(too_long, too_long)
        async with proxied([prefiller], [decoder]) as bench:
            status, body = await bench.ask()
        assert status == 400
        assert json.loads(body)["error"]["message"] == "too long"

    run(test)


def test_half_an_answer_does_not_look_like_a_whole_one() -> None:
    async def leave(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: one\n\n")
        assert request.transport is not None
        request.transport.abort()
        return response

    async def test() -> None:
        prefiller, decoder = await started(done, leave)
        async with proxied([prefiller], [decoder]) as bench, bench.post() as answer:
            assert answer.status == 200
            with pytest.raises(ClientError):
                await answer.content.read()

    run(test)


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_a_client_that_leaves_is_not_computed_for(phase: str) -> None:
    async def test() -> None:
        reached, cancelled = asyncio.Event(), asyncio.Event()

        async def long(request: web.Request) -> web.StreamResponse:
            reached.set()
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError("the test did not end before this answer")

        prefiller, decoder = await started(*((long, done) if phase == "prefill" else (done, long)))
        async with proxied([prefiller], [decoder]) as bench:
            asking = asyncio.create_task(bench.ask())
            await reached.wait()
            asking.cancel()
            await cancelled.wait()
            assert len(decoder.asked) == (phase == "decode")

    run(test)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"s"', b"\xff\xfe", b'{"kv_transfer_params": [1]}']
)
def test_what_is_no_request_is_refused_at_once(body: bytes) -> None:
    async def test() -> None:
        prefiller, decoder = await started(done, done)
        async with proxied([prefiller], [decoder]) as bench:
            answer: ClientResponse
            async with bench.client.post(bench.url + PATH, data=body) as answer:
                assert answer.status == 400
                assert (await answer.json())["error"]["message"]
        assert not prefiller.asked + decoder.asked

    run(test)


def test_a_prompt_of_many_megabytes_passes() -> None:
    async def test() -> None:
        prefiller, decoder = await started(done, done)
        prompt = list(range(300_000))
        async with proxied([prefiller], [decoder]) as bench:
            assert (await bench.ask(PROMPT | {"prompt": prompt}))[0] == 200
        assert prefiller.asked[0]["prompt"] == decoder.asked[0]["prompt"] == prompt

    run(test)
