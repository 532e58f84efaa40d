"""The router's class on a real deployment of Ray Serve, whose replicas have no engine.

`make test-ray`; `test_ray_serve` has it with engines.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from pydantic import BaseModel, ConfigDict
from ray import serve

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.spec import StateType
from ownership.directory import Claim, Copy, Worker
from ownership.directory.opening import open_directory
from ownership.router.identity import ChainCache, Prompt
from ownership.router.ray_serve.replicas import Answer, routing_stats
from tests.ownership.router.known_fleet import PROMPT, chain_answer, published

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),  # Ray's own
]
WAIT_S = 240.0


class Request(BaseModel):
    """A body as Ray Serve LLM has it."""

    model_config = ConfigDict(extra="allow")


class Replica:
    """Answers with its worker's name."""

    def __init__(self) -> None:
        self._name = f"at-{serve.get_replica_context().rank.rank}"

    async def record_routing_stats(self) -> dict[str, Any]:
        chain = {"engines": [chain_answer(self._name)]}
        return routing_stats(
            [
                Answer("GET", "/v1/heterocache/chain", None, chain),
                Answer("GET", "/v1/models", None, {"data": [{"id": "chat", "parent": None}]}),
            ]
        )

    async def record_replica_metadata(self) -> dict[str, Any]:
        return {"name": self._name}

    async def completions(self, request: Request) -> str:
        if getattr(request, "crash", False):
            os._exit(1)
        return self._name


class Deployment:
    """A deployment, as its ingress calls it."""

    def __init__(self, handle: Any, redis: str) -> None:
        self._handle, self._redis = handle, redis

    def ask(self, prompt: list[int], session: str = "", **more: Any) -> str:
        """Return the worker that has served a request."""
        method = self._handle.options(method_name="completions", session_id=session)
        return str(method.remote(Request(prompt=prompt, **more)).result(timeout_s=WAIT_S))

    def pick(self, prompt: list[int]) -> str:
        """Return the worker that is chosen for a request that Ray's proxy sends itself."""

        async def choose() -> str:
            body = SimpleNamespace(prompt=prompt)
            async with self._handle.choose_replica(body, _reserve=False) as selection:
                return str(selection.replica_metadata["name"])

        return asyncio.run(choose())

    def reserve(self, prompt: list[int]) -> str:
        """Return the worker that has served a request after its replica was reserved for it."""

        async def serve_there() -> str:
            method, request = self._handle.completions, Request(prompt=prompt)
            async with method.choose_replica(request) as selection:
                return str(await method.dispatch(selection, request))

        return asyncio.run(serve_there())

    def store(self, worker: str, prompt: list[int]) -> None:
        """Say that a worker has the state of a prompt's chunks."""
        directory = open_directory(self._redis)
        naming = published(worker).naming(Prompt(tokens=prompt))
        assert naming is not None
        claims = [
            Claim(ArtifactId(key, StateType.DENSE_KV), Copy(10, bytes(16), 0))
            for key in ChainCache().of_tokens(prompt, naming).keys
        ]
        directory.claim_owner(directory.register(Worker(worker), WAIT_S).epoch, claims)
        directory.close()


@pytest.fixture
def deployment(monkeypatch: pytest.MonkeyPatch) -> Iterator[Deployment]:
    for name in ("RAY_USAGE_STATS_ENABLED", "RAY_SERVE_ENABLE_HA_PROXY"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # else it writes a token to the home directory
    # The names of its sockets must be short.
    with EmbeddedRedis() as redis, tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:
        ray.init(
            num_cpus=4, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=folder
        )
        try:
            serve.start(proxy_location="Disabled")
            router = {
                "request_router_class": "ownership.router.ray_serve.router:OwnerRouter",
                "request_router_kwargs": {"directory": redis.url, "directory_s": WAIT_S},
                "request_routing_stats_period_s": 0.2,
            }
            made = serve.deployment(Replica).options(
                num_replicas=2,
                ray_actor_options={"num_cpus": 0.5},
                request_router_config=router,
            )
            yield Deployment(serve.run(made.bind(), name="router"), redis.url)
        finally:
            serve.shutdown()
            ray.shutdown()


def until_served(deployment: Deployment, expected: list[tuple[list[int], str]]) -> None:
    """Ask until the router knows what it can know: what replicas tell takes a moment."""
    deadline = time.monotonic() + WAIT_S
    while (found := [deployment.ask(prompt) for prompt, _ in expected]) != [x for _, x in expected]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)


def test_the_replica_with_the_state_is_chosen_and_another_when_it_is_killed(
    deployment: Deployment,
) -> None:
    other = [token + 1 for token in PROMPT]
    deployment.store("at-0", PROMPT)
    deployment.store("at-1", other)
    first, second = (PROMPT, "at-0"), (other, "at-1")
    until_served(deployment, [first, first, second, second, first, second, second, first])
    for session in ("a", "b", "c"):
        assert deployment.ask(PROMPT, session) == "at-0"
        assert deployment.ask(other, session) == "at-1", "state counts for more than the session"
    # As with direct streaming, and as decoders choose prefillers.
    for choose in (deployment.pick, deployment.reserve):
        assert [choose(PROMPT), choose(other), choose(PROMPT)] == ["at-0", "at-1", "at-0"]

    with pytest.raises(ray.exceptions.RayActorError):
        deployment.ask(PROMPT, crash=True)
    # Its successor has its rank, so also its name, and all that the directory says of that.
    assert deployment.ask(other) == "at-1"
    until_served(deployment, [first, first, second, first])
