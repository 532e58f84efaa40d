"""The router in front of two real servers: equal answers, and a worker that is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Server, kv_transfer_config
from ownership.router import opening
from ownership.router.identity import ChainCache
from ownership.router.view import EventReader
from ownership.router.view.block_index import block_naming
from tests.engine.harness import CHECKPOINTS, prompt_tokens
from tests.ownership.router.bench import RunningRouter, config_of
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

MODEL = "dense"
LONG = {"max_tokens": 3000, "ignore_eos": True, "temperature": 0.0}
VARY = frozenset({"id", "created", "created_at", "completed_at", "item_id", "kv_transfer_params"})
"""Fields that differ between two answers to one request."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("workers")
    checkpoint = write_checkpoint(MODEL, CHECKPOINTS)
    found = [
        Server(
            checkpoint,
            folder / f"{name}.log",
            kv_transfer_config({"dram_gib": 0.1}),
            {"kv_events_config": published_at(folder / name)},
        )
        for name in "ab"
    ]
    for server in found:
        server.launch()
    try:
        yield [server.start() for server in found]
    finally:
        for server in found:
            server.kill()


def published_at(path: Path) -> str:
    """Return the settings of an engine that publishes its events on sockets with this name."""
    endpoints = {"endpoint": f"ipc://{path}.pub", "replay_endpoint": f"ipc://{path}.replay"}
    return json.dumps({"enable_kv_cache_events": True, **endpoints})


@pytest.fixture(scope="module")
def router(
    servers: list[Server], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningRouter]:
    config = config_of(
        tmp_path_factory.mktemp("router"), workers=[x.url for x in servers], probe_timeout_s=60
    )
    with RunningRouter(config) as running:
        running.client.timeout = httpx.Timeout(300.0)
        yield running


def same_in_all(answer: Any) -> Any:
    """Return the answer without what differs from one to the next."""
    if isinstance(answer, dict):
        return {k: same_in_all(v) for k, v in answer.items() if k not in VARY}
    return [same_in_all(x) for x in answer] if isinstance(answer, list) else answer


def read(answer: httpx.Response) -> list[Any]:
    """Return the JSON of an answer, or of each event of a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [same_in_all(answer.json())]
    data = [x.removeprefix("data: ") for x in answer.text.splitlines() if x.startswith("data: ")]
    return [x if x == "[DONE]" else same_in_all(json.loads(x)) for x in data]


def said(answer: httpx.Response) -> str:
    """Return all text of an answer. A server may send one token in an event, or several."""
    return "".join(texts(read(answer)))


def texts(found: Any) -> Iterator[str]:
    for key, value in found.items() if isinstance(found, dict) else enumerate(found):
        if isinstance(value, dict | list):
            yield from texts(value)
        elif key in ("text", "content", "delta") and isinstance(value, str):
            yield value


CHAT = {"messages": [{"role": "user", "content": "Who owns this prefix?"}], "max_tokens": 48}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt_tokens(300, seed=3), "max_tokens": 48, "logprobs": 5},
    "/v1/chat/completions": CHAT | {"logprobs": True, "top_logprobs": 5},
    "/v1/responses": {"input": "Who owns this prefix?", "max_output_tokens": 48},
    "/v1/messages": CHAT,
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
    "/tokenize": {"prompt": "Who owns this prefix?"},
    "/detokenize": {"tokens": [5, 6, 7]},
    "/v1/embeddings": {"input": "a generating model refuses this"},
}
STREAMED = ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages")


@pytest.mark.parametrize("path", REQUESTS)
def test_an_answer_equals_a_server_s_own(
    path: str, router: RunningRouter, servers: list[Server]
) -> None:
    for extra in ({}, {"stream": True}) if path in STREAMED else ({},):
        body = {"model": MODEL, "temperature": 0.0, **REQUESTS[path], **extra}
        if path in ("/tokenize", "/detokenize", "/v1/messages/count_tokens"):
            del body["temperature"]
        for _ in range(2):  # the first of them computes what the others find in the cache
            direct = [httpx.post(x.url + path, json=body, timeout=300.0) for x in servers]
        through = [router.client.post(path, json=body) for _ in range(2)]
        assert {x.status_code for x in through} == {x.status_code for x in direct}
        if path != "/v1/embeddings":
            assert through[0].status_code == 200, through[0].text
        assert len({x.headers["x-heterocache-worker"] for x in through}) == 2
        told = said if extra else read
        assert told(through[0]) == told(through[1]) == told(direct[0]) == told(direct[1])
        if extra:
            assert len(read(through[0])) > 4
            assert said(through[0])


def test_a_prompt_goes_to_the_server_whose_events_say_that_it_has_it(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The servers do not answer about chains, so they count as stock.

    The policy goes by prefixes alone: whether computing 700 tokens again would be cheaper depends
    on how busy the machine is.
    """
    reader = EventReader()
    monkeypatch.setattr(opening, "EventReader", lambda: reader)
    keys = {"workers": [x.url for x in servers], "policy": "prefix_aware", "probe_timeout_s": 60}
    with RunningRouter(config_of(tmp_path, **keys)) as router:
        router.client.timeout = httpx.Timeout(300.0)

        def is_exact(body: dict[str, Any], name: str) -> bool:
            answer = router.client.post("/v1/completions", json=body)
            assert answer.headers["x-heterocache-worker"] == name
            return answer.headers["x-heterocache-placement"].startswith("exact; ")

        for seed, server in enumerate([*servers, *servers], start=100):
            prompt, name = prompt_tokens(700, seed=seed), server.url.removeprefix("http://")
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2}
            direct = httpx.post(f"{server.url}/v1/completions", json=body, timeout=300.0)
            assert direct.status_code == 200
            until(lambda p=prompt, n=name: known_tokens(reader, n, p) >= 640)
            until(lambda b=body, n=name: is_exact(b, n))


def known_tokens(reader: EventReader, server: str, prompt: list[int]) -> int:
    """Return the tokens of a prompt that a server's engine has by its events."""
    for stream in reader.streams(server):
        if size := stream.index.block_size:
            chain = ChainCache().of_tokens(prompt, block_naming(size, None, ""))
            return stream.index.prefix(chain.keys).hbm_tokens
    return 0


def test_a_client_that_leaves_ends_its_request_in_the_engine(
    router: RunningRouter, servers: list[Server]
) -> None:
    body = {"model": MODEL, "prompt": [5, 6, 7], "stream": True, **LONG}
    generated = []
    for _ in range(3):  # on a busy machine the first token may arrive when all are generated
        before = total(servers, "vllm:generation_tokens_total")
        with router.client.stream("POST", "/v1/completions", json=body) as answer:
            next(answer.iter_raw())
        until(lambda: total(servers, "vllm:num_requests_running") == 0)
        generated.append(total(servers, "vllm:generation_tokens_total") - before)
        if generated[-1] < LONG["max_tokens"]:
            return
    pytest.fail(f"every request was computed to its end: {generated}")


def total(servers: list[Server], metric: str) -> float:
    return sum(value for server in servers for _, value in server.series(metric))


def test_a_worker_that_is_killed_ends_its_stream_with_an_error_and_the_other_serves(
    router: RunningRouter, servers: list[Server]
) -> None:
    """The last test: it ends a server."""
    body = {"model": MODEL, "prompt": [5, 6, 7], "stream": True, **LONG}
    with router.client.stream("POST", "/v1/completions", json=body) as answer:
        name = answer.headers["x-heterocache-worker"]
        parts = answer.iter_text()
        text = next(parts)
        next(x for x in servers if x.url.endswith(name)).kill()
        text += "".join(parts)
    assert "[DONE]" not in text
    events = text.rstrip("\n").split("\n\n")
    assert all("choices" in json.loads(x.removeprefix("data: ")) for x in events[:-1])
    error = json.loads(events[-1].removeprefix("data: "))["error"]
    assert error["code"] == 502
    assert name in error["message"]
    for _ in range(4):
        assert router.complete(model=MODEL, prompt=[5, 6, 7], max_tokens=2).status_code == 200
    assert router.metric("cut_total", worker=name) == 1
    until(lambda: router.states()[name] == "down")
