"""The router in front of two real servers that share a cache: who has a prompt, and hand-offs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.disaggregated_prefill.fleet import CHUNK, value
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Server
from tests.engine.fleets import all_claimed, server_of, until
from tests.engine.harness import prompt_tokens
from tests.ownership.router.bench import RunningRouter, config_of

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(900),
    pytest.mark.xdist_group("routed fleet"),
]

MODEL = "dense"
WORDS = "Every artifact has one owner in the fleet, and all others read from it. "
CHAT = {"messages": [{"role": "user", "content": WORDS * 40}], "max_tokens": 8}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": prompt_tokens(700, seed=70), "max_tokens": 8},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "In other words. " + WORDS * 40, "max_output_tokens": 8},
    "/v1/messages": CHAT | {"system": "Be brief."},
}


@pytest.fixture(scope="module")
def redis() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as running:
        yield running


@pytest.fixture(scope="module")
def servers(
    redis: EmbeddedRedis, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("workers")
    found = [
        server_of(MODEL, folder, name, redis.url, chunk_tokens=CHUNK, lease_s=30) for name in "ab"
    ]
    for server in found:
        server.environment = {"VLLM_PLUGINS": "heterocache"}
        server.launch()
    try:
        yield [server.start() for server in found]
    finally:
        for server in found:
            server.kill()


def router_of(
    folder: Path, redis: EmbeddedRedis, servers: list[Server], **keys: Any
) -> RunningRouter:
    given = {"workers": [x.url for x in servers], "directory": redis.url, "directory_s": 30}
    given |= {"model_path": str(servers[0].model), "probe_timeout_s": 60, **keys}
    return RunningRouter(config_of(folder, decisions=str(folder / "decisions.jsonl"), **given))


def decisions(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of requests, the oldest first."""
    lines = [json.loads(x) for x in (folder / "decisions.jsonl").read_text().splitlines()]
    return [x for x in lines if "worker" in x]


def certainty(router: RunningRouter, path: str, body: dict[str, Any]) -> str:
    placement: str = router.client.post(path, json=body).headers["x-heterocache-placement"]
    return placement.partition(";")[0]


def texts(answer: Any) -> list[str]:
    """Return all texts of an answer, in order."""
    found = answer.items() if isinstance(answer, dict) else enumerate(answer)
    nested = [
        texts(x) if isinstance(x, dict | list) else [x] if name in ("text", "content") else []
        for name, x in found
    ]
    return [text for part in nested for text in part if text is not None]


def test_a_prompt_is_computed_by_one_server_and_answered_by_another(
    redis: EmbeddedRedis, servers: list[Server], tmp_path: Path
) -> None:
    prefiller, decoder = servers
    names = [x.url.removeprefix("http://") for x in servers]
    workers = [
        {"url": prefiller.url, "role": "prefill"},
        {"url": decoder.url, "role": "decode"},
    ]
    with router_of(tmp_path, redis, servers, workers=workers, policy="static_pd") as router:
        router.client.timeout = httpx.Timeout(300.0)
        short = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        until(
            lambda: (
                router.client.post("/v1/completions", json=short)
                and router.metric("prefills_total", result="done", worker=names[0]) > 0
            )
        )
        for path, request in REQUESTS.items():
            body = {"model": MODEL, "temperature": 0.0, **request}
            before = value(decoder, "hit_tokens", tier="peer")
            answer = router.client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["x-heterocache-worker"] == names[1]
            assert "action=remote_prefill" in answer.headers["x-heterocache-placement"]
            moved = value(decoder, "hit_tokens", tier="peer") - before
            own = httpx.post(prefiller.url + path, json=body, timeout=300.0)
            usage = own.json()["usage"]
            length = usage.get("prompt_tokens") or usage["input_tokens"]
            length += usage.get("cache_read_input_tokens") or 0  # of Anthropic's API
            assert length - CHUNK <= moved < length, path
            assert texts(answer.json()) == texts(own.json())
            assert texts(answer.json())
        for path in ("/v1/responses", "/v1/messages"):  # the answers above were compared
            body = {"model": MODEL, "temperature": 0.0, **REQUESTS[path]}
            until(lambda p=path, b=body: certainty(router, p, b) == "exact")
        assert router.metric("prefills_total", result="failed", worker=names[0]) == 0
        until(lambda: len([x for x in decisions(tmp_path) if x["prompt_tokens"] > 300]) > 5)
    for line in decisions(tmp_path):
        assert line["prefill_problem"] is None, line


def test_a_cold_router_sends_a_conversation_to_the_server_that_has_it(
    redis: EmbeddedRedis, servers: list[Server], tmp_path: Path
) -> None:
    """The last test: it ends the directory.

    The policy goes by prefixes alone: whether reading from a peer would be cheaper depends on how
    busy the machine is.
    """
    holder = servers[1]
    name = holder.url.removeprefix("http://")
    talk = [{"role": "user", "content": "Once more. " + WORDS * 40}]
    body = {"model": MODEL, "messages": talk, "max_tokens": 4, "temperature": 0.0}
    first = httpx.post(f"{holder.url}/v1/chat/completions", json=body, timeout=300.0).json()
    until(lambda: value(holder, "directory_claims") > 0 and all_claimed(holder), "the fleet knows")
    answer = first["choices"][0]["message"]["content"]
    talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Go on."}]
    with router_of(tmp_path, redis, servers, policy="prefix_aware") as router:
        router.client.timeout = httpx.Timeout(300.0)

        def ask(messages: list[dict[str, str]], session: str) -> httpx.Response:
            told = router.client.post(
                "/v1/chat/completions",
                json=body | {"messages": messages},
                headers={"x-session-id": session},
            )
            assert told.status_code == 200, told.text
            return told

        small = [{"role": "user", "content": "hi"}]
        until(lambda: ask(small, "").headers["x-heterocache-placement"].startswith("exact"))
        assert ask(talk, "s").headers["x-heterocache-worker"] == name
        until(lambda: decisions(tmp_path)[-1]["session"] != "")
        assert decisions(tmp_path)[-1]["prefixes"][name][1] >= 2 * CHUNK

        redis.kill()
        alone = ask([*talk, {"role": "user", "content": "Alone."}], "s")
        assert alone.headers["x-heterocache-placement"].startswith("degraded")
        assert alone.headers["x-heterocache-worker"] == name
