"""A prompt computed at one worker and answered by another, and what can go wrong between them."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory import Worker
from ownership.router.handoffs import (
    can_hand_off,
    decode_parameters,
    prefill_body,
    prefill_parameters,
)
from ownership.scheduling.fleet import Role
from tests.ownership.router.bench import seen
from tests.ownership.router.known_fleet import PROMPT, KnownFleet, published, running, worker_of
from tests.ownership.router.test_streams import begin
from tests.waiting import until

ROLES = (Role.PREFILL, Role.DECODE, Role.DECODE)
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
DOORS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 50, "n": 2},
    "/v1/chat/completions": CHAT | {"max_completion_tokens": 50},
    "/v1/messages": CHAT | {"max_tokens": 50},
    "/v1/responses": {"input": "hi", "max_output_tokens": 50, "background": True},
}


@pytest.fixture
def known(fleet: StubFleet, tmp_path: Path) -> Iterator[KnownFleet]:
    """The first worker prefills, the second decodes."""
    with running(fleet, tmp_path, "static_pd", ROLES) as found:
        yield found


@pytest.fixture
def apart(tmp_path: Path) -> Iterator[tuple[StubFleet, KnownFleet]]:
    """Three workers that a test may harm; two of them decode."""
    with (
        StubFleet(3) as fleet,
        running(fleet, tmp_path, "static_pd", ROLES, probe_timeout_s=3.0) as found,
    ):
        yield fleet, found


def last_body(fleet: StubFleet, worker: int) -> dict[str, Any]:
    return dict(json.loads(seen(fleet.urls[worker])["last_body"]))


def busy(known: KnownFleet, worker: int) -> float:
    return known.router.metric("in_flight", worker=known.names[worker])


def test_the_fleets_page_has_both_workers_and_the_time_of_the_prefill(known: KnownFleet) -> None:
    known.complete()
    [decision] = known.router.client.get("/v1/heterocache/fleet").json()["decisions"]
    assert [decision["prefill_worker"], decision["worker"]] == known.names
    assert 0 < decision["prefill_s"] < decision["first_byte_s"]
    assert decision["prefill_problem"] == ""


@pytest.mark.parametrize("path", DOORS)
def test_one_worker_computes_the_prompt_and_another_answers(
    path: str, known: KnownFleet, fleet: StubFleet
) -> None:
    given = {"heterocache": {"report": True, "ttl_s": 60}}
    body = {**DOORS[path], "stream": True, "kv_transfer_params": given}
    headers = {"accept-encoding": "gzip"}
    answer = known.router.client.post(path, json=body, headers=headers)
    assert worker_of(answer) == known.names[1]
    shown = f"action=remote_prefill; prefill={known.names[0]}"
    assert shown in answer.headers["x-heterocache-placement"]
    assert answer.text == httpx.post(fleet.urls[1] + path, json=body).text

    prefill = last_body(fleet, 0)
    limit = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    assert (prefill[limit], prefill["stream"]) == (1, False)
    assert not prefill.keys() & {"n", "max_completion_tokens"}
    assert not prefill.get("background")
    stored = {"do_remote_decode": True, "heterocache": {"ttl_s": 60}}
    assert prefill["kv_transfer_params"] == stored
    assert "accept-encoding" not in seen(fleet.urls[0])["last_headers"]

    known.router.client.post(path, json=body)
    handed = {**given, "do_remote_prefill": True, "prefilled_tokens": 7}
    assert last_body(fleet, 1) == body | {"kv_transfer_params": handed}
    until(lambda: len(known.decisions()) == 2)
    line = known.decisions()[0]
    assert (line["worker"], line["prefill_worker"]) == (known.names[1], known.names[0])
    assert 0.0 < line["prefill_s"] < line["first_byte_s"]
    assert line["prefill_problem"] is None
    assert line["handoffs"]
    assert known.router.metric("prefills_total", result="done", worker=known.names[0]) == 2


def test_no_prompt_is_computed_where_the_other_worker_cannot_find_it(known: KnownFleet) -> None:
    known.directory.register(Worker(known.names[0]), 60.0)
    assert "remote_prefill" in known.complete().headers["x-heterocache-placement"]
    [epoch] = [x for x, y in known.directory.workers().items() if y.name == known.names[0]]
    known.directory.end_lease(epoch)
    told = 'degraded; action=colocated_prefill; reasons="not_in_directory"'
    until(lambda: known.complete().headers["x-heterocache-placement"] == told)
    known.directory.register(Worker(known.names[0]), 60.0)
    until(lambda: "remote_prefill" in known.complete().headers["x-heterocache-placement"])


def test_no_prompt_is_computed_elsewhere_while_the_directory_does_not_answer(
    known: KnownFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(chain: object) -> None:
        raise DirectoryUnavailableError("gone")

    told = set[str]()

    def fails_for_both_reasons() -> bool:
        told.add(known.complete().headers["x-heterocache-placement"])
        return len(told) == 2

    with monkeypatch.context() as broken:
        broken.setattr(known.directory, "lookup", fail)
        until(fails_for_both_reasons)  # after an error it is given a pause
    reasons = ("directory_failed", "directory_late")
    assert told == {f'blind; action=colocated_prefill; reasons="{x}"' for x in reasons}
    until(lambda: "remote_prefill" in known.complete().headers["x-heterocache-placement"])


def test_no_prompt_is_computed_elsewhere_without_a_directory(
    known: KnownFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known.views, "_directory", None)
    for name in known.names:
        known.views.fleet.told(name, [published("")], 0.0)
    told = known.complete().headers["x-heterocache-placement"]
    assert told == 'blind; action=colocated_prefill; reasons="no_directory"'


def test_a_prompt_that_was_computed_elsewhere_counts_as_begun_when_that_is_predicted(
    known: KnownFleet,
) -> None:
    with begin(known.router, prompt=PROMPT, stub={"first_s": 600}):
        until(lambda: busy(known, 1) == 1)
        ledger = known.placer.ledger
        assert ledger is not None
        until(lambda: ledger.own(known.names[1]).decoding == 1)
    until(lambda: busy(known, 1) == 0)


@pytest.mark.parametrize("fault", ["refuse", "fail", "lose", "cut", "exit"])
def test_a_failed_prefill_is_computed_where_it_is_decoded(
    fault: str, apart: tuple[StubFleet, KnownFleet]
) -> None:
    fleet, known = apart
    stub = {"prefill": {"fault": fault}}
    body = {"prompt": PROMPT, "stub": stub, "stream": True}
    answer = known.complete(**body)
    assert "[DONE]" in answer.text
    decoder = known.names.index(worker_of(answer))
    assert decoder > 0
    assert last_body(fleet, decoder) == body, "as the client wrote it"
    until(lambda: known.decisions())
    [line] = known.decisions()
    assert line["prefill_problem"]
    assert not line["failed"]
    assert known.router.metric("prefills_total", result="failed", worker=known.names[0]) == 1
    assert busy(known, 0) == busy(known, decoder) == 0


@pytest.mark.long
def test_a_prefill_worker_that_hangs_costs_the_time_until_its_probes_fail(
    apart: tuple[StubFleet, KnownFleet],
) -> None:
    fleet, known = apart
    fleet.processes[0].send_signal(signal.SIGSTOP)
    assert worker_of(known.complete()) in known.names[1:]
    until(lambda: known.decisions())
    assert known.decisions()[0]["prefill_problem"]


def test_a_client_that_leaves_ends_the_prefill_and_its_decoder_gets_nothing(
    known: KnownFleet, fleet: StubFleet
) -> None:
    before = seen(fleet.urls[1])["seen"].get("/v1/completions", 0)
    aborted = seen(fleet.urls[0])["seen"].get("aborted", 0)
    body = json.dumps({"prompt": PROMPT, "stub": {"prefill": {"first_s": 600}}}).encode()
    with socket.create_connection(("127.0.0.1", known.router.port)) as client:
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        until(lambda: busy(known, 0) == busy(known, 1) == 1)
    until(lambda: busy(known, 0) == busy(known, 1) == 0)
    until(lambda: seen(fleet.urls[0])["seen"].get("aborted", 0) > aborted)
    assert seen(fleet.urls[1])["seen"].get("/v1/completions", 0) == before


def test_a_decoder_that_dies_during_the_prefill_is_replaced(
    apart: tuple[StubFleet, KnownFleet],
) -> None:
    fleet, known = apart
    answers = list[httpx.Response]()
    stub = {"prefill": {"first_s": 3.0}}
    asking = threading.Thread(target=lambda: answers.append(known.complete(stub=stub)))
    asking.start()
    until(lambda: busy(known, 0) == 1)
    [decoder] = [number for number in (1, 2) if busy(known, number) == 1]
    fleet.processes[decoder].kill()
    asking.join()
    assert worker_of(answers[0]) == known.names[3 - decoder]


def test_a_request_that_has_lost_its_decoder_is_computed_where_it_is_decoded(
    apart: tuple[StubFleet, KnownFleet],
) -> None:
    """Handed off again it could end its prefiller, and then the decoder: three workers."""
    fleet, known = apart
    body = {"prompt": PROMPT, "stub": {"fault": "lose"}}
    assert known.router.client.post("/v1/completions", json=body).status_code == 502
    assert [seen(url)["seen"]["/v1/completions"] for url in fleet.urls] == [1, 1, 1]


def test_a_worker_that_fails_while_the_directory_is_asked_gets_no_request(
    apart: tuple[StubFleet, KnownFleet], monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, known = apart
    find, gone = known.views.find, known.names[1]

    async def find_late(*given: Any) -> Any:
        view = await find(*given)
        fleet.processes[1].kill()
        await asyncio.to_thread(until, lambda: known.router.states()[gone] == "down")
        return view

    monkeypatch.setattr(known.views, "find", find_late)
    for _ in range(2):
        assert worker_of(known.complete()) == known.names[2]
    assert known.router.metric("retried_total", worker=gone) == 0


@pytest.mark.parametrize(
    ("params", "prompt", "expected"),
    [
        (None, PROMPT, True),
        ({"heterocache": {"pin_s": 60}}, "text", True),
        ({"heterocache": {"no_store": True}}, "text", False),
        ({"max_offload_tokens": 64}, "text", False),
        ({"kv_load_tiers": []}, "text", False),
        ({"do_remote_decode": True}, "text", False),
        (["wrong"], "text", False),
        (None, ["two", "prompts"], False),
        (None, [PROMPT, PROMPT], False),
    ],
)
def test_a_request_whose_state_must_not_be_stored_is_served_whole(
    params: object, prompt: object, expected: bool
) -> None:
    assert can_hand_off({"prompt": prompt, "kv_transfer_params": params}) is expected


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"prompt_logprobs": 0}, False),
        ({"echo": True, "logprobs": 1}, False),
        ({"prompt_logprobs": None, "echo": False, "logprobs": 1}, True),
    ],
)
def test_a_request_that_reads_no_cache_is_served_whole(
    change: dict[str, Any], expected: bool
) -> None:
    assert can_hand_off({"prompt": "text", **change}) is expected


def test_the_prefill_has_the_token_ids_that_take_the_place_of_messages() -> None:
    body = CHAT | {"kv_transfer_params": {"prompt_token_ids": [1, 2], "other": 3}}
    params = json.loads(prefill_body("chat", body))["kv_transfer_params"]
    assert params == {"do_remote_decode": True, "prompt_token_ids": [1, 2]}


def test_the_prefill_is_told_what_may_be_loaded_and_stored_and_nothing_of_the_session() -> None:
    own = {"no_store": True, "ttl_s": 60, "priority": "low"}
    session = {"session_id": "a", "end_session": True, "pin_s": 9, "report": True}
    limits = {"max_offload_tokens": 0, "max_load_tokens": 8, "kv_load_tiers": []}
    given = {"heterocache": own | session, "expected_back_s": 5.0, "do_remote_prefill": True}
    found = prefill_parameters(given | limits)
    assert found == {"heterocache": own, "do_remote_decode": True, **limits}


@pytest.mark.parametrize("given", [None, {}, {"heterocache": "wrong"}])
def test_a_prefill_of_a_request_without_parameters_has_its_own(given: Any) -> None:
    assert prefill_parameters(given) == {"do_remote_decode": True}


def test_what_the_prefill_tells_of_itself_does_not_replace_what_the_client_has_given() -> None:
    given = {"heterocache": {"report": True, "no_store": True}, "expected_back_s": 5.0}
    resume = {"do_remote_prefill": True, "prefilled_tokens": 9}
    told = {"heterocache": {"report": {}}, "remote_prefill_cached_tokens": 4}
    assert decode_parameters(given, resume | told) == given | resume
    assert decode_parameters(None, None) == {"do_remote_prefill": True}
