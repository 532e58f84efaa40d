"""The endpoint picker, asked over gRPC as Envoy asks it. `make test-envoy` asks with an Envoy."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
import uvicorn

from benchmarks.stub_fleet import StubFleet
from hetero_connector.errors import RouterConfigError
from ownership.directory.breaker import FIRST_PAUSE_S, CircuitBreaker
from ownership.router.ext_proc import addresses as addresses_module
from ownership.router.ext_proc.addresses import Addresses
from ownership.router.ext_proc.messages import NOT_SERVING, SERVING, BodyMode
from ownership.router.ext_proc.server import PROCESSOR
from ownership.router.placer import Placed, Prefill
from ownership.router.proxy import Proxy
from ownership.router.requests import RefusedError
from ownership.router.serving import Server
from ownership.router.workers import Worker, WorkerAddress, WorkerState
from tests.clock import Clock
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.ownership.router.conftest import StartRouter
from tests.ownership.router.envoy_calls import (
    BUFFERED,
    DUPLEX,
    EVENT,
    EnvoyCall,
    channel,
    destination_of,
    headers_of,
    health,
)
from tests.ownership.router.known_fleet import PROMPT, KnownFleet, running
from tests.ownership.router.test_handoffs import ROLES, last_body
from tests.waiting import until


@pytest.fixture(scope="module")
def router(fleet: StubFleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRouter]:
    """One for all tests that need no keys of their own."""
    folder = tmp_path_factory.mktemp("router")
    config = config_of(folder, workers=fleet.urls, ext_proc_port=0, max_body_mib=1, client_s=4)
    with RunningRouter(config) as running_router:
        yield running_router


@pytest.fixture(scope="module")
def picker(router: RunningRouter) -> Iterator[grpc.Channel]:
    with channel(router.picker_port) as found:
        yield found


@pytest.fixture
def known(fleet: StubFleet, tmp_path: Path) -> Iterator[KnownFleet]:
    with running(fleet, tmp_path, ext_proc_port=0) as found:
        yield found


@pytest.fixture(autouse=True)
def nothing_is_left(router: RunningRouter, fleet: StubFleet) -> Iterator[None]:
    """After each test nothing counts at a worker."""
    yield
    until(lambda: under_way(router, fleet) == 0)


def endpoints(fleet: StubFleet) -> list[str]:
    return [url.removeprefix("http://") for url in fleet.urls]


def under_way(router: RunningRouter, fleet: StubFleet) -> float:
    return sum(router.metric("in_flight", worker=x) for x in endpoints(fleet))


def test_a_request_goes_to_the_worker_that_is_named_and_counts_until_its_end(
    picker: grpc.Channel, router: RunningRouter, fleet: StubFleet
) -> None:
    done = router.metric("requests_total", path="completions", status="200")
    call = EnvoyCall(picker)
    body = json.dumps({"prompt": "x" * 200_000, "stream": True}).encode()
    call.send_head()
    call.send_body(body[:7], body[7:90_000], b"", body[90_000:])
    worker = call.destination()
    assert worker in endpoints(fleet)
    assert call.echo() == body
    assert router.metric("in_flight", worker=worker) == 1
    assert call.answer_head() == {"x-heterocache-worker": worker}
    parts = (EVENT[:9], EVENT[9:] + EVENT, b"", b"data: [DONE]\n\n")
    assert call.answer_body(*parts) == b"".join(parts)
    assert router.metric("in_flight", worker=worker) == 1
    call.close()
    assert under_way(router, fleet) == 0
    assert router.metric("requests_total", path="completions", status="200") == done + 1


def test_a_body_that_envoy_has_buffered_is_answered_once(picker: grpc.Channel) -> None:
    call = EnvoyCall(picker, BUFFERED, BodyMode.STREAMED)
    call.send_head()
    assert not call.next("request_headers").request_headers.response.HasField("header_mutation")
    call.send_body(b'{"prompt": "x"}', is_last=False)  # trailers follow
    reply = call.next("request_body")
    worker = destination_of(reply, reply.request_body.response)
    assert not reply.request_body.response.HasField("body_mutation")
    call.send(request_trailers={})
    call.next("request_trailers")
    assert call.answer_head() == {"x-heterocache-worker": worker}
    assert call.answer_body(EVENT, EVENT) == b"", "Envoy keeps the bytes in this mode"
    call.close()


def test_trailers_of_both_sides_end_the_bodies(picker: grpc.Channel) -> None:
    call = EnvoyCall(picker)
    call.send_head()
    call.send_body(b'{"prompt": ', b'"x"}', is_last=False)
    call.send(request_trailers={})
    call.destination()
    part = call.next("request_body").request_body.response.body_mutation.streamed_response
    assert (part.body, part.end_of_stream) == (b'{"prompt": "x"}', False)
    call.next("request_trailers")
    call.answer_head()
    assert call.answer_body(EVENT, is_last=False) == EVENT
    call.send(response_trailers={})
    call.next("response_trailers")
    call.close()


def test_a_request_without_a_body_is_placed_by_its_head(
    picker: grpc.Channel, fleet: StubFleet
) -> None:
    call = EnvoyCall(picker, BodyMode.NONE, BodyMode.NONE)
    call.send_head("/version?x=1", "GET", is_last=True)
    assert call.destination() in endpoints(fleet)
    call.answer_head(is_last=True)
    call.close()


@pytest.mark.parametrize(
    ("modes", "first", "key"),
    [
        ((BodyMode.STREAMED, DUPLEX), "request_headers", "request_body_mode"),
        ((BodyMode.NONE, DUPLEX), "request_headers", "request_body_mode"),
        ((BodyMode.BUFFERED_PARTIAL, DUPLEX), "request_headers", "request_body_mode"),
        ((DUPLEX, DUPLEX), "request_body", "request_header_mode"),
        ((DUPLEX, DUPLEX), "response_headers", "request_header_mode"),
    ],
)
def test_a_filter_that_cannot_work_is_told_what_to_set(
    picker: grpc.Channel, modes: tuple[int, int], first: str, key: str
) -> None:
    call = EnvoyCall(picker, *modes)
    call.send(**{first: {}}, protocol_config=call.modes)
    with pytest.raises(grpc.RpcError) as raised:
        call.next("")
    assert raised.value.code() is grpc.StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert key in raised.value.details()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "body", "status", "reason"),
    [
        ("/v1/completions", b"{nope", 400, "bad_body"),
        ("/v1/completions", b"", 400, "bad_body"),
        ("/v1/messages", b"\xff\xfe", 400, "bad_body"),
        ("/v1/chat/completions", b"[" * 100_000, 400, "bad_body"),
        ("/v1/completions", b'{"model": "other"}', 404, "unknown_model"),
    ],
)
@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_wrong_body_is_answered_here(
    picker: grpc.Channel,
    router: RunningRouter,
    path: str,
    body: bytes,
    status: int,
    reason: str,
    mode: int,
) -> None:
    refused = router.metric("refused_total", reason=reason)
    call = EnvoyCall(picker, mode)
    call.send_head(path)
    call.send_body(body)
    if mode == BUFFERED:
        call.next("request_headers")
    answer = call.refusal()
    assert answer.status.code == status
    assert headers_of(answer.headers)["x-heterocache-reason"] == reason
    error = json.loads(answer.body)
    assert error.get("type", "error") == "error", "an error of the path's own API"
    assert error["error"]["message"]
    call.close()
    assert router.metric("refused_total", reason=reason) == refused + 1


def test_a_body_that_is_too_large_is_refused_before_its_end(picker: grpc.Channel) -> None:
    call = EnvoyCall(picker)
    call.send_head()
    call.send_body(*[b" " * 50_000] * 40, is_last=False)
    assert call.refusal().status.code == 413
    call.close()
    announced = EnvoyCall(picker)
    announced.send_head(**{"content-length": "2000000"})
    assert announced.refusal().status.code == 413
    announced.close()


def test_a_body_that_stops_coming_is_refused(picker: grpc.Channel) -> None:
    call = EnvoyCall(picker)
    call.send_head()
    call.send_body(b"{", is_last=False)
    assert call.refusal().status.code == 408
    call.close()


def test_only_the_endpoints_of_the_subset_are_chosen(
    picker: grpc.Channel, fleet: StubFleet
) -> None:
    elsewhere = "10.9.9.9:1"
    for one in endpoints(fleet) * 3:
        for subset in ([elsewhere, one], f"{one}, {elsewhere}"):
            call = EnvoyCall(picker)
            call.send_request(subset)
            assert call.destination() == one
            call.echo()
            call.serve()
    for subset in ([], [elsewhere], ""):
        call = EnvoyCall(picker)
        call.send_request(subset)
        answer = call.refusal()
        assert answer.status.code == 503
        assert headers_of(answer.headers)["x-heterocache-reason"] == "no_worker"
        call.close()


def test_without_room_a_request_is_refused_and_told_when_to_come_again(
    start_router: StartRouter,
) -> None:
    router = start_router(max_in_flight=1, max_queued=0, ext_proc_port=0)
    with channel(router.picker_port) as picker:
        calls = [EnvoyCall(picker) for _ in range(3)]
        for call in calls[:2]:
            call.send_request()
        assert calls[0].destination() != calls[1].destination()
        calls[2].send_request()
        answer = calls[2].refusal()
        assert answer.status.code == 429
        headers = headers_of(answer.headers)
        assert headers["x-heterocache-reason"] == "queue_full"
        assert int(headers["retry-after"]) >= 1
        assert router.complete(prompt="x").status_code == 429, "the proxy counts them, too"
        for call in calls:
            call.call.cancel()


def test_a_request_waits_for_room_and_gets_it(start_router: StartRouter) -> None:
    router = start_router(max_in_flight=1, max_queued=1, ext_proc_port=0)
    with channel(router.picker_port) as picker:
        first, second, third = [EnvoyCall(picker) for _ in range(3)]
        for call in (first, second):
            call.send_request()
        worker = first.destination()
        assert second.destination() != worker
        leaving = EnvoyCall(picker)
        leaving.send_request()
        until(lambda: router.metric("queued") == 1)
        leaving.call.cancel()
        until(lambda: router.metric("queued") == 0)
        third.send_request()
        until(lambda: router.metric("queued") == 1)
        first.echo()
        first.serve()
        assert third.destination() == worker
        assert router.metric("queued") == 0
        for call in (second, third):
            call.call.cancel()


def sent(call: EnvoyCall, steps: int) -> None:
    """Send a request's messages up to a step, and read what comes back."""
    acts: list[Callable[[], object]] = [
        call.send_head,
        lambda: call.send_body(b'{"prompt": ', is_last=False),
        lambda: call.send_body(b'"x"}'),
        call.destination,
        call.echo,
        call.answer_head,
        lambda: call.answer_body(EVENT, EVENT, is_last=False),
        lambda: call.answer_body(EVENT),
    ]
    for act in acts[:steps]:
        act()


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("is_cancelled", [True, False])
def test_a_stream_that_ends_anywhere_leaves_nothing(
    picker: grpc.Channel, router: RunningRouter, fleet: StubFleet, steps: int, is_cancelled: bool
) -> None:
    left = router.metric("clients_left_total")
    call = EnvoyCall(picker)
    sent(call, steps)
    if steps >= 4:
        assert under_way(router, fleet) == 1
    if is_cancelled:
        call.call.cancel()
    else:
        call._messages.put(None)
        list(call.call)
    until(lambda: under_way(router, fleet) == 0)
    if 1 <= steps <= 7 and not is_cancelled:
        assert router.metric("clients_left_total") == left + 1


def test_an_answer_of_envoys_own_before_the_body_is_whole_is_let_through(
    picker: grpc.Channel,
) -> None:
    call = EnvoyCall(picker)
    call.send_head()
    call.send_body(b"{", is_last=False)
    assert call.answer_head(408) == {}
    assert call.answer_body(b"too slow") == b"too slow"
    call.close()


def test_the_ledger_and_the_decisions_are_those_of_the_proxy(known: KnownFleet) -> None:
    known.store(1, 18)
    with channel(known.router.picker_port) as picker:
        for status, events in ((200, 5), (400, 0), (503, 0)):
            call = EnvoyCall(picker)
            call.send_request(prompt=PROMPT, stream=True)
            assert call.destination() == known.names[1]
            call.echo()
            headers = call.answer_head(status)
            assert headers["x-heterocache-placement"] == "exact; action=colocated_prefill"
            call.answer_body(*[EVENT] * events or [b"{}"])
            call.close()
    until(lambda: len(known.decisions()) == 3)
    answered, wrong, failed = known.decisions()
    assert (answered["events"], answered["failed"]) == (5, False)
    assert 0.0 < answered["first_byte_s"] <= answered["total_s"]
    for line in (wrong, failed):
        assert (line["first_byte_s"], line["events"], line["failed"]) == (None, None, True)
    assert known.router.metric("first_byte_seconds_count", path="completions") == 1


def test_requests_that_a_worker_fails_together_are_one_failure(
    known: KnownFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, fail = list[CircuitBreaker](), CircuitBreaker.on_failure

    def noted(breaker: CircuitBreaker, *given: float) -> None:
        fail(breaker, *given)
        failed.append(breaker)

    monkeypatch.setattr(CircuitBreaker, "on_failure", noted)
    with channel(known.router.picker_port) as picker:
        calls = [EnvoyCall(picker) for _ in range(2)]
        for call in calls:
            call.send_request(subset=known.names[:1], prompt=PROMPT, stream=True)
            assert call.destination() == known.names[0]
            call.echo()
        for call in calls:
            call.answer_head(503)
            call.answer_body(b"{}")
            call.close()
    until(lambda: len(failed) == 2)
    assert failed[1]._pause_s == FIRST_PAUSE_S


def test_a_decoder_that_fails_before_and_after_the_prefill_has_failed_twice(
    fleet: StubFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, prefill = list[CircuitBreaker](), Proxy.prefill

    async def fail(proxy: Proxy, placed: Placed, to: Prefill) -> None:
        await prefill(proxy, placed, to)
        placed.worker.breaker.on_failure()
        failed.append(placed.worker.breaker)

    monkeypatch.setattr(Proxy, "prefill", fail)
    with (
        running(fleet, tmp_path, "static_pd", ROLES, ext_proc_port=0) as known,
        channel(known.router.picker_port) as picker,
    ):
        call = EnvoyCall(picker)
        call.send_request(prompt=PROMPT, stream=True)
        assert call.destination() == known.names[1]
        call.echo()
        call.answer_head(503)
        call.answer_body(b"{}")
        call.close()
        until(lambda: failed[0]._pause_s == 2 * FIRST_PAUSE_S)


def test_an_answer_whose_body_is_not_shown_counts_to_its_end_with_a_guessed_length(
    known: KnownFleet,
) -> None:
    with channel(known.router.picker_port) as picker:
        call = EnvoyCall(picker, response_mode=BodyMode.NONE)
        call.send_request(prompt=PROMPT, stream=True)
        worker = call.destination()
        call.echo()
        call.answer_head()
        assert known.router.metric("in_flight", worker=worker) == 1
        call.close()
        assert known.router.metric("in_flight", worker=worker) == 0
    until(known.decisions)
    [line] = known.decisions()
    assert line["events"] is None
    assert 0.0 < line["first_byte_s"] <= line["total_s"]
    assert known.router.metric("requests_total", path="completions", status="200") == 1


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_another_worker_computes_the_prompt_and_the_body_says_so(
    fleet: StubFleet, tmp_path: Path, mode: int
) -> None:
    with (
        running(fleet, tmp_path, "static_pd", ROLES, ext_proc_port=0) as known,
        channel(known.router.picker_port) as picker,
    ):
        call = EnvoyCall(picker, mode)
        body = call.send_request(prompt=PROMPT, stream=True)
        if mode == BUFFERED:
            call.next("request_headers")
            reply = call.next("request_body").request_body.response
            handed = reply.body_mutation.body
            assert headers_of(reply.header_mutation)["content-length"] == str(len(handed))
        else:
            assert call.destination() == known.names[1]
            handed = call.echo()
        assert last_body(fleet, 0)["max_tokens"] == 1
        params = {"do_remote_prefill": True, "prefilled_tokens": 7}
        assert json.loads(handed) == json.loads(body) | {"kv_transfer_params": params}
        call.serve()
        until(known.decisions)
        [line] = known.decisions()
        assert (line["worker"], line["prefill_worker"]) == (known.names[1], known.names[0])


def test_the_routers_keys_take_the_place_of_the_clients(fleet: StubFleet, tmp_path: Path) -> None:
    for name, text in (("keys", "secret"), ("worker_key", "workers")):
        (tmp_path / name).write_text(text)
    keys = {"api_keys": str(tmp_path / "keys"), "worker_api_key": str(tmp_path / "worker_key")}
    config = config_of(tmp_path, workers=fleet.urls, ext_proc_port=0, **keys)
    with RunningRouter(config) as router, channel(router.picker_port) as picker:
        call = EnvoyCall(picker)
        call.send_head()
        call.send_body(b"{}")
        assert call.refusal().status.code == 401
        call = EnvoyCall(picker)
        call.send_head(**{"x-api-key": "secret"})
        call.send_body(b'{"prompt": "x"}')
        mutation = call.next("request_headers").request_headers.response.header_mutation
        assert headers_of(mutation)["authorization"] == "Bearer workers"
        assert list(mutation.remove_headers) == ["x-api-key"]
        call.call.cancel()


def test_two_hundred_requests_at_once_are_all_counted_and_all_freed(
    picker: grpc.Channel, router: RunningRouter, fleet: StubFleet
) -> None:
    def ask(number: int) -> str:
        call = EnvoyCall(picker)
        call.send_request(prompt="x" * number, stream=True)
        worker = call.destination()
        if number % 3 == 0:
            call.call.cancel()
            return worker
        call.echo()
        call.serve()
        return worker

    with ThreadPoolExecutor(200) as pool:
        found = Counter(pool.map(ask, range(200)))
    assert set(found) == set(endpoints(fleet))
    until(lambda: under_way(router, fleet) == 0)


def test_a_worker_with_a_name_is_given_by_its_address(
    start_router: StartRouter, fleet: StubFleet
) -> None:
    url = f"http://localhost:{fleet.ports[0]}"
    router = start_router(workers=[url, "http://nobody.invalid:1"], num_ready=1, ext_proc_port=0)
    with channel(router.picker_port) as picker:
        call = EnvoyCall(picker)
        call.send_request()
        address = call.destination()
        assert address in {f"{x}:{fleet.ports[0]}" for x in ("127.0.0.1", "[::1]")}
        call.call.cancel()
        in_subset = EnvoyCall(picker)
        in_subset.send_request(subset=[address])
        assert in_subset.destination() == address
        in_subset.call.cancel()


def test_any_address_of_a_name_may_be_in_the_subset_and_gets_the_request(
    start_router: StartRouter, fleet: StubFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = fleet.ports[0]
    both = [f"{address}:{port}" for address in ("127.0.0.1", "127.0.0.9")]

    async def found(addresses: Addresses, worker: Worker) -> list[str]:
        return both

    monkeypatch.setattr(Addresses, "of", found)
    router = start_router(workers=[f"http://localhost:{port}"], ext_proc_port=0)
    with channel(router.picker_port) as picker:
        for address in both:
            call = EnvoyCall(picker)
            call.send_request(subset=[address])
            assert call.destination() == address
            call.call.cancel()


def worker_at(url: str, state: WorkerState = WorkerState.UP) -> Worker:
    return Worker(WorkerAddress(url, url), state)


def test_names_are_looked_up_at_once_and_only_for_what_no_worker_is_configured_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    urls = ("http://one.test:1", "http://two.test:2", "http://10.0.0.3:3")
    workers = [worker_at(url) for url in urls]
    workers.append(worker_at("http://down.test:4", WorkerState.DOWN))
    asked = list[str]()

    async def found(subset: set[str]) -> dict[str, str]:
        both = asyncio.Barrier(2)

        async def look_up(host: str, port: int) -> Any:
            asked.append(host)
            async with asyncio.timeout(PATIENCE_S):
                await both.wait()
            return [(0, 0, 0, "", (x, port)) for x in ("10.0.0.7", f"fd00::{port}")]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        return await Addresses(60.0).in_subset(frozenset(subset), workers)

    assert asyncio.run(found({"one.test:1", "10.0.0.3:3"})) == {}
    assert asked == []
    matched = {"two.test:2": "[fd00::2]:2", "10.0.0.3:3": "10.0.0.3:3"}
    assert asyncio.run(found({"[fd00::2]:2", "10.0.0.3:3"})) == matched
    assert sorted(asked) == ["one.test", "two.test"]


def test_all_requests_share_one_look_up_of_a_name_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, asked, worker = Clock(0.0), list[str](), worker_at("http://one.test:1")
    answers: list[str | OSError] = ["10.0.0.1", "10.0.0.2", OSError(5, "gone"), "10.0.0.4"]

    async def look_up(host: str, port: int) -> Any:
        asked.append(host)
        answer = answers.pop(0)
        await asyncio.sleep(0)
        if isinstance(answer, OSError):
            raise answer
        return [(0, 0, 0, "", (answer, port))]

    async def act() -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        addresses = Addresses(60.0, clock)
        found = await asyncio.gather(*(addresses.of(worker) for _ in range(9)))
        assert found == 9 * [["10.0.0.1:1"]]
        clock.passes(59.0)
        assert await addresses.of(worker) == ["10.0.0.1:1"]
        clock.passes(1.0)
        assert await addresses.of(worker) == ["10.0.0.2:1"], "its container has started again"
        clock.passes(60.0)
        with pytest.raises(RefusedError, match="has no address: gone"):
            await addresses.of(worker)
        assert await addresses.of(worker) == ["10.0.0.4:1"], "a failure is not kept"
        assert len(asked) == 4

    asyncio.run(act())


def test_a_name_that_is_not_answered_costs_a_request_a_second_and_one_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(addresses_module, "_ANSWER_S", 0.01)
    worker, asked = worker_at("http://one.test:1"), list[str]()

    async def act() -> None:
        answered = asyncio.Event()

        async def look_up(host: str, port: int) -> Any:
            asked.append(host)
            await answered.wait()
            return [(0, 0, 0, "", ("10.0.0.1", port))]

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
        addresses = Addresses(0.0)
        for _ in range(3):
            with pytest.raises(RefusedError, match=r"no answer within 0\.01 s"):
                await addresses.of(worker)
        assert await addresses.in_subset(frozenset({"10.0.0.1:1"}), [worker]) == {}
        answered.set()
        await asyncio.sleep(0)
        assert len(asked) == 1

    asyncio.run(act())


def test_a_router_that_ends_lets_streams_come_to_their_ends(start_router: StartRouter) -> None:
    router = start_router(ext_proc_port=0)
    with channel(router.picker_port) as picker:
        call, refused = EnvoyCall(picker), grpc.StatusCode.UNAVAILABLE
        call.send_request()
        call.destination()
        call.echo()
        call.answer_head()
        router.end()

        def is_closed() -> bool:
            late = EnvoyCall(picker)
            late.send_request()
            try:
                late.destination()
            except grpc.RpcError as error:
                return bool(error.code() is refused)  # type: ignore[attr-defined]
            late.call.cancel()
            return False

        until(is_closed)
        assert call.answer_body(EVENT) == EVENT
        call.close()


def test_a_router_that_ends_is_not_ready_while_it_ends_http_requests(
    start_router: StartRouter,
) -> None:
    router = start_router(ext_proc_port=0)
    body = {"stream": True, "stub": {"events": 10_000, "gap_s": 0.05}}
    with (
        channel(router.picker_port) as picker,
        router.client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        parts = answer.iter_raw()
        next(parts)
        router.end()
        until(lambda: health(picker, "readiness") == NOT_SERVING)
        assert health(picker, "liveness") == SERVING
        assert next(parts)


def test_requests_over_http_and_the_picker_s_have_one_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a parent of several processes would kill one that has not ended the picker's yet."""
    clock = Clock()

    async def drain(server: uvicorn.Server, sockets: object) -> None:
        clock.passes(45.0)

    monkeypatch.setattr(uvicorn.Server, "shutdown", drain)
    server = Server(uvicorn.Config("app"), 60.0, clock)
    assert server.grace_s() == 60.0
    asyncio.run(server.shutdown())
    assert server.grace_s() == 15.0
    clock.passes(45.0)
    assert server.grace_s() == 0.0


def test_certificates_are_those_of_the_folder_also_after_they_were_replaced(
    start_router: StartRouter, tmp_path: Path
) -> None:
    folder = tmp_path / "tls"
    folder.mkdir()

    def issue() -> bytes:
        authority = trustme.CA()
        own = authority.issue_cert("127.0.0.1")
        own.private_key_pem.write_to_path(folder / "tls.key")
        own.cert_chain_pems[0].write_to_path(folder / "tls.crt")
        return bytes(authority.cert_pem.bytes())

    first = issue()
    router = start_router(ext_proc_port=0, ext_proc_tls=str(folder))
    with channel(router.picker_port, first) as picker:
        assert health(picker, "readiness") == SERVING
    second = issue()
    with channel(router.picker_port, second) as picker:
        assert health(picker, "readiness") == SERVING
    with channel(router.picker_port, first) as picker, pytest.raises(grpc.RpcError):
        health(picker, "readiness")


def test_health_says_if_a_worker_serves(picker: grpc.Channel, start_router: StartRouter) -> None:
    services = ("", "liveness", "readiness", PROCESSOR)
    assert [health(picker, x) for x in services] == [SERVING] * 4
    with pytest.raises(grpc.RpcError, match="NOT_FOUND"):
        health(picker, "other")
    router = start_router(workers=["http://127.0.0.1:1"], num_ready=0, ext_proc_port=0)
    with channel(router.picker_port) as other:
        found = [health(other, x) for x in services]
    assert found == [SERVING, SERVING, NOT_SERVING, NOT_SERVING]


def test_without_grpc_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpc", None)
    for name in [x for x in sys.modules if x.startswith("ownership.router.ext_proc")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(RouterConfigError, match=r"heterocache\[ext-proc\]"):
        __import__("ownership.router.ext_proc")
