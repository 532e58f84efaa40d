"""Stock servers that share one cache: real engines, a real Redis, real reads over NIXL UCX."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Reply, Server, kv_transfer_config
from ownership.embedded_redis import EmbeddedRedis
from tests.engine.harness import CHECKPOINTS, prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LEASE_S = 3.0
MAX_TOKENS = 8
TOLERANCE = 1e-4
WAIT_S = 60.0


def server_of(model: str, folder: Path, name: str, directory: str, **extra: Any) -> Server:
    given = {
        "dram_gib": 0.1,
        "planner": "always_load",
        "checkpoints": "full",
        "directory": directory,
        "lease_s": LEASE_S,
        "load_deadline_s": 100,  # of which 1 s for a lookup: the machine may be busy
        "worker_name": name,
        **extra,
    }
    return Server(
        write_checkpoint(model, CHECKPOINTS), folder / f"{name}.log", kv_transfer_config(given)
    )


@contextmanager
def fleet(model: str, folder: Path, directory: str, *names: str) -> Iterator[list[Server]]:
    """Servers started side by side, once all have joined."""
    with ExitStack() as stack:
        servers = [server_of(model, folder, name, directory) for name in names]
        for server in servers:
            server.launch()
            stack.callback(server.stop)
        for server in servers:
            server.start()
            until("it has joined", lambda s=server: value(s, "directory_joined") == 1)
        yield servers


def value(server: Server, name: str, **labels: str) -> float:
    """Sum of a metric's series with these labels, as of now."""
    server.complete([1, 2, 3], max_tokens=1)  # metrics come out with a step of the engine
    found = [*server.series(f"heterocache_{name}"), *server.series(f"heterocache_{name}_total")]
    return sum(n for have, n in found if labels.items() <= have.items())


def until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < deadline, f"still not so: {what}"
        time.sleep(0.1)


def same(reply: Reply, answer: Reply) -> None:
    assert reply.tokens == answer.tokens
    for ours, theirs in zip(reply.top_logprobs, answer.top_logprobs, strict=True):
        shared = ours.keys() & theirs.keys()
        assert len(shared) >= len(theirs) - 1  # the last places may swap
        assert max(abs(ours[token] - theirs[token]) for token in shared) <= TOLERANCE


def computed(server: Server, prompt: list[int]) -> Reply:
    """Have the server compute a prompt and tell the fleet; its answer from its own prefix."""
    before = value(server, "directory_claims", outcome="owned")
    server.complete(prompt, max_tokens=1)
    answer = server.complete(prompt, MAX_TOKENS)
    until("the fleet knows", lambda: value(server, "directory_claims", outcome="owned") > before)
    told = -1.0
    while told != (now := value(server, "directory_claims", outcome="owned")):
        told = now
        time.sleep(0.5)
    return answer


def asks(server: Server, seed: int) -> bool:
    """Whether the server is answered when it looks for a prompt that nobody has."""
    before = value(server, "directory_lookups", outcome="nothing")
    server.complete(prompt_tokens(600, seed), max_tokens=1)
    return value(server, "directory_lookups", outcome="nothing") > before


@pytest.mark.parametrize(
    "model",
    [
        "gemma3",
        pytest.param("dense", marks=pytest.mark.slow),
        pytest.param("deepseek_v4", marks=pytest.mark.slow),
    ],
)
def test_a_server_restores_what_another_computed_and_outlives_it_and_the_directory(
    model: str, tmp_path: Path
) -> None:
    prompts = [prompt_tokens(1400, seed=300 + i) for i in range(4)]
    with EmbeddedRedis() as redis, fleet(model, tmp_path, redis.url, "ann", "bob") as (ann, bob):
        answers = [computed(ann, prompt) for prompt in prompts]
        claims = value(ann, "directory_claims")
        reply = bob.complete(prompts[0], MAX_TOKENS)
        same(reply, answers[0])
        from_peer = value(bob, "hit_tokens", tier="peer")
        assert reply.cached_tokens == from_peer >= 1024
        assert value(bob, "restored_bytes", tier="peer") > 0
        until("it is a replica", lambda: value(bob, "replicas") > 0)

        redis.kill()
        same(bob.complete(prompts[1], MAX_TOKENS), answers[1])
        until("alone", lambda: value(bob, "directory_joined") == 0)
        same(ann.complete(prompts[1], MAX_TOKENS), answers[1])
        assert value(bob, "hit_tokens", tier="peer") == from_peer
        redis.start()
        for server in (ann, bob):
            until("back", lambda s=server: value(s, "directory_joined") == 1)
        seeds = count(1_000)
        until("bob is answered", lambda: asks(bob, next(seeds)))
        until("ann has told all again", lambda: value(ann, "directory_claims") >= 2 * claims)
        same(bob.complete(prompts[2], MAX_TOKENS), answers[2])
        assert value(bob, "hit_tokens", tier="peer") > from_peer

        ann.kill()
        same(bob.complete(prompts[3], MAX_TOKENS), answers[3])
        same(bob.complete(prompts[3], MAX_TOKENS), answers[3])


@pytest.mark.slow
def test_a_server_stopped_for_longer_than_its_lease_takes_nothing_back(tmp_path: Path) -> None:
    prompts = [prompt_tokens(1400, seed=400 + i) for i in range(2)]
    with EmbeddedRedis() as redis, fleet("gemma3", tmp_path, redis.url, "ann", "bob") as (ann, bob):
        answers = [computed(ann, prompt) for prompt in prompts]
        assert ann._process is not None
        os.killpg(ann._process.pid, signal.SIGSTOP)
        try:
            time.sleep(2 * LEASE_S)
            for prompt, answer in zip(prompts, answers, strict=True):
                same(bob.complete(prompt, MAX_TOKENS), answer)
            assert value(bob, "hit_tokens", tier="peer") == 0
            until("bob owns it", lambda: value(bob, "directory_claims", outcome="owned") > 0)
        finally:
            os.killpg(ann._process.pid, signal.SIGCONT)
        until("ann has replicas", lambda: value(ann, "replicas") > 0)
        assert value(bob, "replicas") == 0
        for prompt, answer in zip(prompts, answers, strict=True):
            same(ann.complete(prompt, MAX_TOKENS), answer)


@pytest.mark.slow
def test_a_redis_that_hangs_or_refuses_leaves_each_server_with_its_own(tmp_path: Path) -> None:
    prompts = [prompt_tokens(1400, seed=500 + i) for i in range(3)]
    with EmbeddedRedis() as redis, fleet("gemma3", tmp_path, redis.url, "ann", "bob") as (ann, bob):
        answers = [computed(ann, prompt) for prompt in prompts]
        redis.pause()
        for prompt, answer in zip(prompts[:2], answers, strict=False):
            same(bob.complete(prompt, MAX_TOKENS), answer)
        redis.resume()
        assert value(bob, "hit_tokens", tier="peer") == 0
        seeds = count(2_000)
        until("bob is answered", lambda: asks(bob, next(seeds)))
        same(bob.complete(prompts[2], MAX_TOKENS), answers[2])
        assert value(bob, "hit_tokens", tier="peer") > 0
        bob.stop()
        wrong = redis.url.replace(redis.password, "wrong")
        with server_of("gemma3", tmp_path, "cay", wrong) as cay:
            same(cay.complete(prompts[0], MAX_TOKENS), answers[0])
            assert value(cay, "directory_joined") == 0
            assert "wrong user or password" in cay.log_path.read_text()
