"""Workers that refuse, hang, break off, are killed, come and go."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.stub_fleet import StubFleet
from ownership.scheduling.fleet import Role
from tests.ownership.router.bench import RunningRouter, error_of, seen
from tests.ownership.router.conftest import StartRouter
from tests.ownership.router.known_fleet import PROMPT, running
from tests.waiting import until


@pytest.fixture
def pair() -> Iterator[StubFleet]:
    """Two workers that a test may harm."""
    with StubFleet(2) as workers:
        yield workers


def total(workers: StubFleet, what: str) -> int:
    return sum(seen(url)["seen"].get(what, 0) for url in workers.urls)


def set_health(url: str, is_healthy: bool) -> None:
    httpx.post(f"{url}/stub/health", content=json.dumps(is_healthy))


def last_event(text: str) -> str:
    return text.rstrip("\n").rpartition("\n\n")[2]


def test_a_request_that_a_worker_refuses_is_sent_to_another(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    answer = router.complete(stub={"fault": "refuse"})
    assert answer.status_code == 503  # the second one's own words: there is no third
    assert error_of(answer)["message"] == "the stub refuses"
    assert total(pair, "/v1/completions") == 2


def test_a_worker_that_is_gone_costs_a_request_nothing(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls, probe_s=30.0)  # no probe tells it first
    pair.processes[0].kill()
    pair.processes[0].wait()
    for _ in range(20):
        assert router.complete().status_code == 200
        assert "[DONE]" in router.stream()
    retried = router.metric("retried_total", worker=pair.urls[0].removeprefix("http://"))
    assert 1 <= retried < 15, "it was tried with more than one request after each pause"


def test_a_request_whose_worker_is_lost_is_sent_again_once_only(
    start_router: StartRouter, pair: StubFleet
) -> None:
    """It may be the request that ended the worker: it must not end the whole fleet."""
    with StubFleet(2) as more:
        router = start_router(workers=pair.urls + more.urls)
        answer = router.complete(stub={"fault": "lose"})
        assert answer.status_code == 502
        assert answer.headers["x-heterocache-reason"] == "worker_lost"
        assert total(pair, "lost") + total(more, "lost") == 2


def test_a_request_that_ends_workers_ends_two_at_most_over_kept_connections(
    start_router: StartRouter,
) -> None:
    with StubFleet(4) as workers:
        router = start_router(workers=workers.urls)
        for _ in range(8):
            assert router.complete().status_code == 200
        assert router.complete(stub={"fault": "exit"}).status_code == 502
        assert sum(router.metric("retried_total", worker=name) for name in router.states()) == 1
        until(lambda: sum(x.poll() is not None for x in workers.processes) == 2)
        assert router.complete().status_code == 200


@pytest.mark.parametrize("fault", ["lose", "exit"])
def test_a_request_that_ends_its_prefill_worker_ends_one_other_at_most(
    fault: str, tmp_path: Path
) -> None:
    roles = [Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE]
    with StubFleet(4) as workers, running(workers, tmp_path, "static_pd", roles) as known:
        stub = {"fault": fault, "prefill": {"fault": fault}}
        answer = known.router.complete(prompt=PROMPT, stub=stub)
        assert answer.status_code == 502
        until(lambda: len(known.decisions()) == 1)
        [line] = known.decisions()
        assert line["prefill_problem"], "no worker computed the prompt for another one"
        assert not any(known.router.metric("retried_total", worker=x) for x in known.names)
        if fault == "lose":
            assert total(workers, "lost") == 2


def test_the_only_worker_gets_a_request_again_that_it_may_not_have_seen(
    start_router: StartRouter,
) -> None:
    """It may have closed an idle connection just then."""
    with StubFleet(1) as alone:
        router = start_router(workers=alone.urls)
        assert router.complete(stub={"fault": "lose"}).status_code == 502
        assert total(alone, "lost") == 2
        assert router.complete(stub={"fault": "cut"}).status_code == 502
        assert total(alone, "/v1/completions") == 3


def test_a_request_that_all_workers_lose_costs_others_a_pause_and_no_answer(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    for _ in range(3):
        assert router.complete(stub={"fault": "lose"}).status_code == 502
        assert router.complete().status_code == 200


@pytest.mark.parametrize("fault", ["cut", "exit"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_stream_whose_worker_is_lost_ends_with_an_error_event(
    path: str, fault: str, start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    text = router.stream(path, stub={"fault": fault, "events": 8})
    assert text.count("choices") == 4
    assert "[DONE]" not in text
    event = last_event(text)
    if path == "/v1/chat/completions":
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == 502
    else:
        name, _, data = event.partition("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["type"] == "error"
    assert sum(router.metric("cut_total", worker=name) for name in router.states()) == 1
    assert router.complete().status_code == 200


def test_an_answer_that_is_cut_before_its_first_byte_is_an_error_or_another_s(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    answer = router.complete(stub={"fault": "cut"})
    assert answer.status_code == 502
    assert error_of(answer)["message"].startswith("worker ")


def test_a_long_answer_that_is_cut_is_seen_to_be_cut(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    with pytest.raises(httpx.RemoteProtocolError):
        router.complete(stub={"fault": "cut", "padding": 600_000})
    assert sum(router.metric("cut_total", worker=name) for name in router.states()) == 1
    until(lambda: router.metric("requests_total", path="completions", status="200") == 1)


@pytest.mark.long
def test_a_stopped_worker_s_requests_go_elsewhere_or_end_with_an_error(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls, probe_timeout_s=3.0)
    stopped, name = pair.processes[0], pair.urls[0].removeprefix("http://")
    texts: list[str] = []
    threads = []
    # By turns: each worker has one that streams, and one that has no byte yet.
    for number, stub in enumerate([{"gap_s": 0.4}] * 2 + [{"first_s": 5}] * 2, 1):
        send = partial(router.stream, stub=stub)
        threads.append(threading.Thread(target=lambda send=send: texts.append(send())))
        threads[-1].start()
        until(lambda number=number: total(pair, "/v1/completions") == number)
    os.kill(stopped.pid, signal.SIGSTOP)
    try:
        until(lambda: router.states()[name] == "down")
        for thread in threads:
            thread.join()
        assert sum(text.endswith("data: [DONE]\n\n") for text in texts) == 3
        (cut,) = [text for text in texts if "[DONE]" not in text]
        assert '"code":502' in last_event(cut)
        assert router.metric("retried_total", worker=name) == 1
    finally:
        os.kill(stopped.pid, signal.SIGCONT)
    until(lambda: router.states()[name] == "up")


def test_a_worker_is_down_while_its_health_says_so(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    name = pair.urls[0].removeprefix("http://")
    set_health(pair.urls[0], False)
    until(lambda: router.states()[name] == "down")
    served = {router.complete().headers["x-heterocache-worker"] for _ in range(6)}
    assert served == {pair.urls[1].removeprefix("http://")}
    set_health(pair.urls[0], True)
    until(lambda: router.states()[name] == "up")
    served = {router.complete().headers["x-heterocache-worker"] for _ in range(6)}
    assert len(served) == 2


def test_a_worker_that_comes_back_at_its_address_serves_again(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls)
    for process in pair.processes:
        process.kill()
        process.wait()
    until(lambda: set(router.states().values()) == {"down"})
    assert router.complete().status_code == 503
    pair.restart(0)
    until(lambda: "up" in router.states().values())
    assert router.complete().status_code == 200


def test_the_file_of_workers_is_read_again_when_it_changes(
    start_router: StartRouter, pair: StubFleet, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "workers.yaml"
    one, two = ({"url": url, "name": name} for url, name in zip(pair.urls, "ab", strict=True))
    file.write_text(json.dumps([one]))
    router = start_router(1, workers_file=str(file))
    assert set(router.states()) == {"a"}

    streamed: list[str] = []
    stub = {"gap_s": 0.1, "events": 20}
    thread = threading.Thread(target=lambda: streamed.append(router.stream(stub=stub)))
    thread.start()
    until(lambda: total(pair, "/v1/completions") == 1)
    file.write_text(json.dumps([two]))
    until(lambda: router.states() == {"b": "up"})
    shown = router.client.get("/metrics").text
    assert 'worker_up{worker="b"} 1.0' in shown
    assert 'worker_up{worker="a"}' not in shown, "one that has left is shown"
    assert router.complete().headers["x-heterocache-worker"] == "b"
    thread.join()
    assert streamed[0].endswith("data: [DONE]\n\n"), "what it had begun was ended"

    for text, problem in (("", "it is empty"), ("- nonsense", "'nonsense'")):
        file.write_text(text)
        until(lambda problem=problem: problem in caplog.text)
        assert router.complete().status_code == 200, "a file that cannot be read changes nothing"
    two["drain"] = True
    file.write_text(json.dumps([one, two]))
    until(lambda: router.states() == {"a": "up", "b": "up"})
    served = {router.complete().headers["x-heterocache-worker"] for _ in range(6)}
    assert served == {"a"}, "a draining worker got something new"


def test_a_dns_name_s_addresses_are_the_workers(start_router: StartRouter, pair: StubFleet) -> None:
    router = start_router(1, workers_dns=f"127.0.0.1:{pair.ports[0]}")
    assert set(router.states()) == {f"127.0.0.1:{pair.ports[0]}"}
    assert router.complete().status_code == 200


@pytest.mark.long
def test_with_full_workers_requests_wait_and_then_are_refused(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls, max_in_flight=1, max_queued=2, queue_s=4)
    answers: list[httpx.Response] = []
    threads: list[threading.Thread] = []

    def send() -> None:
        answers.append(router.complete(stub={"first_s": 9}))

    def begin(count: int) -> None:
        begun = [threading.Thread(target=send) for _ in range(count)]
        threads.extend(begun)
        for thread in begun:
            thread.start()

    begin(2)
    until(lambda: total(pair, "/v1/completions") == 2)
    begin(2)
    until(lambda: router.metric("queued") == 2)
    begin(4)
    for thread in threads:
        thread.join()
    reasons = [x.headers.get("x-heterocache-reason", "") for x in answers]
    assert reasons.count("") == 2
    assert reasons.count("queue_full") == 4
    assert reasons.count("queue_timeout") == 2
    refused = [x for x in answers if x.status_code == 429]
    assert len(refused) == 6
    assert all(int(x.headers["retry-after"]) >= 1 for x in refused)
    assert total(pair, "/v1/completions") == 2, "a refused request reached a worker"
    assert router.complete().status_code == 200


def test_ten_times_the_load_neither_hangs_nor_loses_a_request(
    start_router: StartRouter, pair: StubFleet
) -> None:
    router = start_router(workers=pair.urls, max_in_flight=2, max_queued=8)
    answers: list[httpx.Response] = []

    def send() -> None:
        answers.extend(router.complete(stub={"first_s": 0.02}) for _ in range(5))

    threads = [threading.Thread(target=send) for _ in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    statuses = [x.status_code for x in answers]
    assert len(statuses) == 200
    assert set(statuses) == {200, 429}
    assert total(pair, "/v1/completions") == statuses.count(200)


def test_a_router_that_ends_lets_streams_end_first(
    fleet: StubFleet, start_router: StartRouter
) -> None:
    router: RunningRouter = start_router()
    streamed: list[str] = []
    stub = {"gap_s": 0.1, "events": 10}
    thread = threading.Thread(target=lambda: streamed.append(router.stream(stub=stub)))
    before = total(fleet, "/v1/completions")
    thread.start()
    until(lambda: total(fleet, "/v1/completions") == before + 1)
    router.end()
    thread.join()
    assert streamed[0].endswith("data: [DONE]\n\n")
