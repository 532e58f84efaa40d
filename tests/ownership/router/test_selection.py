"""Other proxies ask over HTTP where to send, as they ask Dynamo's selection service."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from ownership.directory.breaker import CircuitBreaker
from ownership.router.config import RouterConfig
from ownership.router.metrics import RouterMetrics
from ownership.router.placer import LeastLoaded
from ownership.router.proxy import Proxy
from ownership.router.reservations import Reservations
from ownership.router.selection import _excluded, _Selection, worker_id
from ownership.router.spans import RouterSpans
from tests.clock import Clock
from tests.ownership.router.bench import PATIENCE_S, RunningRouter, config_of
from tests.ownership.router.conftest import StartRouter
from tests.ownership.router.test_admission import request
from tests.ownership.router.test_policy_placer import PROMPT, SIZE, KnownFleet, running
from tests.ownership.router.test_workers import workers_of
from tests.waiting import until


@pytest.fixture
def known(fleet: StubFleet, tmp_path: Path) -> Iterator[KnownFleet]:
    with running(fleet, tmp_path) as found:
        yield found


def post(router: RunningRouter, door: str, **fields: Any) -> dict[str, Any]:
    answer = router.client.post(door, json=fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def free(router: RunningRouter, name: str) -> httpx.Response:
    return router.client.delete(f"/reservations/{name}")


@pytest.mark.parametrize("holder", [0, 1])
def test_a_selection_names_the_worker_that_has_the_prompt_and_what_it_costs(
    known: KnownFleet, holder: int
) -> None:
    known.store(holder, 18)
    as_tokens = post(known.router, "/select", token_ids=PROMPT, model_name="stub-model")
    path, body = "/v1/completions", {"prompt": PROMPT, "model": "stub-model"}
    as_request = post(known.router, "/select", body=body, path=path, selection_id="mine")
    for found in (as_tokens, as_request):
        assert found["worker"] == known.names[holder]
        assert found["endpoint"] == f"http://{known.names[holder]}"
        assert (found["certainty"], found["reasons"]) == ("exact", [])
        assert found["overlap"]["cpu"] == found["overlap"]["longest_matched"] == 18 * SIZE
        assert found["overlap"]["gpu"] == 0
        assert found["isl_tokens"] == len(PROMPT)
        assert found["effective_prefill_tokens"] == len(PROMPT) - 18 * SIZE
        assert found["predicted_ttft_s"] > 0.0
        assert found["predicted_cost_s"]["compute_s"] > 0.0
    assert "selection_id" not in as_tokens
    assert as_request["selection_id"] == "mine"
    assert known.decisions() == []


def test_a_reservation_counts_at_its_worker_until_it_is_freed(known: KnownFleet) -> None:
    first = post(known.router, "/select_and_reserve", token_ids=[1] * 500, session_id="s")
    second = post(known.router, "/select_and_reserve", token_ids=[2] * 500, selection_id="b")
    assert {first["worker"], second["worker"]} == set(known.names), "the busy one was left alone"
    name = first["selection_id"]
    for step in ("prefill_complete", "output_block", "output_block"):
        post(known.router, f"/reservations/{name}/{step}")
    assert known.decisions() == []
    assert free(known.router, name).status_code == 200
    until(known.decisions)
    [line] = known.decisions()
    assert (line["worker"], line["events"]) == (first["worker"], 32)
    assert 0.0 < line["first_byte_s"] <= line["total_s"]
    again = post(known.router, "/select", token_ids=[1] * 600, session_id="s")
    assert again["worker"] == first["worker"], "its session was served there"
    new = post(known.router, "/select", token_ids=[3] * 500)
    assert new["worker"] == first["worker"], "it is idle now, and the other is not"


def test_a_reservation_of_tokens_has_its_first_token_when_its_proxy_says_so(
    known: KnownFleet,
) -> None:
    """The first token of a body that asks for no stream is predicted."""
    first = post(known.router, "/select_and_reserve", token_ids=[1] * 500)
    body = {"body": {"prompt": [2] * 500}, "path": "/v1/completions"}
    second = post(known.router, "/select_and_reserve", **body)
    ledger = known.placer.ledger
    assert ledger is not None
    until(lambda: ledger.own(second["worker"]).decoding == 1)
    assert ledger.own(first["worker"]).prefilling == 1
    for one in (first, second):
        assert free(known.router, one["selection_id"]).status_code == 200


def test_what_was_selected_is_reserved_at_that_worker(known: KnownFleet) -> None:
    known.store(0, 18)
    [other] = [x for x in workers(known.router) if x["worker"] == known.names[1]]
    fields = {"token_ids": PROMPT, "selection_id": "a", "worker_id": other["worker_id"]}
    assert post(known.router, "/reservations", **fields)["worker"] == known.names[1]
    answer = known.router.client.post("/reservations", json=fields)
    assert answer.status_code == 409
    assert answer.headers["x-heterocache-reason"] == "reserved"
    assert free(known.router, "a").status_code == 200


def test_reservations_and_requests_share_the_workers_room(
    start_router: StartRouter, fleet: StubFleet
) -> None:
    router = start_router(max_in_flight=1, max_queued=0)
    names = [post(router, "/select_and_reserve", token_ids=[1])["selection_id"] for _ in range(2)]
    assert router.complete(prompt="x").status_code == 429
    refused = router.client.post("/select_and_reserve", json={"token_ids": [1]})
    assert refused.status_code == 429
    assert refused.headers["retry-after"] == "1"
    assert router.metric("refused_total", reason="queue_full") == 2, "as the proxy's own"
    for name in names:
        free(router, name)
    assert router.complete(prompt="x").status_code == 200


def test_a_client_that_leaves_while_it_waits_for_room_has_no_reservation(
    start_router: StartRouter,
) -> None:
    router = start_router(max_in_flight=1)
    names = [post(router, "/select_and_reserve", token_ids=[1])["selection_id"] for _ in range(2)]
    body = b'{"token_ids": [1]}'
    head = f"POST /select_and_reserve HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.port)) as client:
        client.sendall(head.encode() + body)
        until(lambda: router.metric("queued") == 1)
    for name in names:
        free(router, name)
    until(lambda: router.metric("queued") == 0)
    until(lambda: all(router.metric("in_flight", worker=x) == 0 for x in router.states()))


def test_a_reservation_that_is_never_freed_ends_with_its_lease(start_router: StartRouter) -> None:
    router = start_router(max_in_flight=1, max_queued=0, lease_s=0.2)
    for _ in range(2):
        post(router, "/select_and_reserve", token_ids=[1], selection_id=None)
    until(lambda: router.complete(prompt="x").status_code == 200)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "token_ids"),
        ({"block_hashes": [1], "sequence_hashes": [2], "isl_tokens": 16}, "token_ids"),
        ({"token_ids": [1], "body": {}}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"body": {}, "path": "/v1/nothing"}, "/v1/nothing"),
        *(
            ({"token_ids": [1], "selection_id": x}, "selection_id")
            for x in ("", "a/b", "</script>", "\n", "x" * 257)
        ),
    ],
)
def test_a_wrong_body_is_told_what_to_send(
    router: RunningRouter, fields: dict[str, Any], problem: str
) -> None:
    answer = router.client.post("/select", json=fields)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]


def test_what_is_not_there_is_told(router: RunningRouter) -> None:
    assert free(router, "nobody").status_code == 404
    for asked in ({"token_ids": [1], "model_name": "other"}, {"body": {"model": "other"}}):
        assert router.client.post("/select", json=asked).status_code == 404
    answer = router.client.post("/select", json={"token_ids": [1], "allowed_worker_ids": []})
    assert answer.status_code == 503


def test_the_doors_need_a_key_if_the_router_does(fleet: StubFleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    config = config_of(tmp_path, workers=fleet.urls, api_keys=str(keys))
    with RunningRouter(config) as router:
        assert router.client.post("/select", json={"token_ids": [1]}).status_code == 401
        assert free(router, "x").status_code == 401
        headers = {"authorization": "Bearer secret"}
        answer = router.client.post("/select", json={"token_ids": [1]}, headers=headers)
        assert answer.status_code == 200


def workers(router: RunningRouter) -> list[dict[str, Any]]:
    return list(router.client.get("/workers").json())


def test_a_reservation_whose_worker_answers_ends_the_worker_s_pause() -> None:

    async def story() -> bool:
        found, (worker,) = workers_of("one")
        worker.breaker = CircuitBreaker(clock := Clock())
        worker.breaker.on_failure()
        clock.passes(1.0)
        config, placer = RouterConfig(), LeastLoaded()
        async with aiohttp.ClientSession() as session:
            proxy = Proxy(config, found, placer, session, RouterMetrics(), RouterSpans(""))
            reservations = Reservations(proxy, placer, lease_s=600.0)
            reservations.reserve("a", await reservations.place(request()))
            assert worker.breaker.is_open
            reservations.answered("a")
            reservations.free("a")
        return worker.breaker.is_open

    assert not asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_worker_that_comes_later_is_excluded_too() -> None:
    wanted = workers_of("one", "two")[1][0]
    others = [*workers_of("one", "two")[1], *workers_of("three")[1]]
    by_id = _excluded(_Selection(worker_id=worker_id(wanted.name)))
    assert [x.name for x in others if x not in by_id] == ["one"]
    allowed = frozenset({worker_id("two"), worker_id("three")})
    by_list = _excluded(_Selection(allowed_worker_ids=allowed))
    assert [x.name for x in others if x not in by_list] == ["two", "three"]
    assert not [x for x in others if x in _excluded(_Selection())]
