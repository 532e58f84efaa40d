"""Stock servers that share one cache: real engines, a real Redis, real reads over NIXL UCX."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from examples.disaggregated_prefill.fleet import Fleet, fleet_of, value
from examples.disaggregated_prefill.session import play
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Server
from tests.engine.fleets import (
    LEASE_S,
    MAX_TOKENS,
    computed,
    is_answered,
    same,
    server_of,
    until,
    what_happened,
)
from tests.engine.harness import CHECKPOINTS, prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@contextmanager
def fleet(
    model: str, folder: Path, directory: str, *names: str, **extra: Any
) -> Iterator[list[Server]]:
    """Yield servers that were started together and have joined."""
    with ExitStack() as stack:
        servers = [server_of(model, folder, name, directory, **extra) for name in names]
        for server in servers:
            server.launch()
            stack.callback(server.stop)
        for server in servers:
            server.start()
            until(lambda s=server: value(s, "directory_joined") == 1, "it has joined")
        yield servers


def all_written(server: Server) -> bool:
    """True if the SSD of a server without evictions has everything except replicas."""
    kept = value(server, "artifacts", tier="ssd") + value(server, "replicas")
    return kept == value(server, "artifacts", tier="dram")


MODELS = [
    "gemma3",
    pytest.param("dense", marks=pytest.mark.slow),
    pytest.param("deepseek_v4", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def apart(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that prefills, one that decodes and the proxy before them, for four tests.

    Each process may stop for seconds on a busy machine, Redis too. So the lease is long, and a
    lookup has 3 s, of which 1.5 s for the answer: without one, a request is computed.
    """
    logs = tmp_path_factory.mktemp("fleet")
    extra = {"checkpoints": "full", "lease_s": 30, "load_deadline_s": 300}
    with fleet_of(request.param, CHECKPOINTS, logs, extra=extra) as running:
        yield running


@pytest.mark.parametrize("apart", MODELS, indirect=True)
def test_prefill_and_decode_apart_answer_as_a_single_server_does(apart: Fleet) -> None:
    (ann,), bob = apart.prefillers, apart.decoder
    outcome = play(apart, task_chunks=4, turns=3)
    assert outcome.problems() == [], what_happened(*apart.servers)
    resumed = [1047, 1559, 2071] if ann.model.name == "dense" else [1024, 1536, 2048]
    assert [turn.reply.cached_tokens for turn in outcome.turns] == resumed
    # Turn by turn the decoder reads what the prefiller has added, and nothing twice but the
    # short chunk in which a handoff ends.
    first, *others = (turn.from_peer for turn in outcome.turns)
    assert first == resumed[0]
    assert all(256 <= tokens <= 512 + resumed[0] % 256 for tokens in others)
    assert 0 < outcome.moved_bytes < outcome.distinct_bytes
    assert 1.0 < outcome.duplicate_factor < 2.0
    # Of windows only those at the boundary where it resumes.
    windows = {"tier": "dram", "state_type": "window_swa"}
    if kept := value(ann, "artifacts", **windows):
        size_bytes = value(ann, "bytes", **windows) / kept
        moved = value(bob, "read_bytes", tier="peer", state_type="window_swa")
        assert moved == len(outcome.turns) * size_bytes


@pytest.mark.parametrize("apart", MODELS, indirect=True)
def test_the_parameters_of_vllms_own_proxy_make_a_handoff_too(apart: Fleet) -> None:
    (ann,), bob = apart.prefillers, apart.decoder
    prompt = prompt_tokens(600, seed=200)
    before = value(bob, "hit_tokens", tier="peer")
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    short = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": asked}
    prefilled = ann.post("/v1/completions", {"model": ann.model.name, **short})
    handed = prefilled["kv_transfer_params"]
    assert handed["do_remote_prefill"] is True
    resume = handed["prefilled_tokens"]
    # The last token, but for less than a window's block, or a compressor's.
    at_least = {"gemma3": 568, "dense": 599, "deepseek_v4": 512}[ann.model.name]
    assert at_least <= resume <= 599
    reply = bob.complete(prompt, MAX_TOKENS, kv_transfer_params=handed)
    assert value(bob, "hit_tokens", tier="peer") - before == resume
    same(reply, ann.complete(prompt, MAX_TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("apart", MODELS, indirect=True)
def test_a_killed_server_finds_on_its_ssd_what_continues_anothers_chain(
    apart: Fleet, tmp_path: Path
) -> None:
    """The beginning comes from its owner again. The lease is long because the machine may be busy:
    an owner that is not served for its length has lost what it owned.
    """
    (ann,) = apart.prefillers
    preamble, task = prompt_tokens(1100, seed=600), prompt_tokens(900, seed=601)
    prompt = preamble + task
    extra = {
        "ssd_dir": str(tmp_path / "ssd"),
        "ssd_gib": 0.2,
        "lease_s": 30,
        "load_deadline_s": 300,
    }

    def start_bob() -> Server:
        engine_args = ann.engine_args  # the length is a part of the model's identity
        return server_of(ann.model.name, tmp_path, "bob", apart.redis.url, engine_args, **extra)

    computed(ann, preamble)
    with start_bob() as bob:
        until(lambda: value(bob, "directory_joined") == 1, "bob has joined")
        answer = computed(bob, prompt)
        until(lambda: all_written(bob), "what is bob's is on its SSD")
        assert value(bob, "replicas") > 0
        bob.kill()
    with start_bob() as bob:
        until(lambda: value(bob, "directory_joined") == 1, "bob is back")
        assert value(bob, "artifacts", tier="ssd") > 0
        reply = bob.complete(prompt, MAX_TOKENS)
        same(reply, answer)
        from_ann, from_ssd = (value(bob, "hit_tokens", tier=t) for t in ("peer", "ssd"))
        assert from_ann == 1024, what_happened(ann, bob)
        assert from_ssd >= 512
        assert reply.cached_tokens == from_ann + from_ssd >= 1792
        assert value(bob, "restores_replanned") == 0


@pytest.mark.parametrize("apart", MODELS, indirect=True)
def test_a_server_restores_what_another_computed_and_outlives_it_and_the_directory(
    apart: Fleet,
) -> None:
    """This test stops the server that prefills, so it must be the last to use it."""
    redis, (ann,), bob = apart.redis, apart.prefillers, apart.decoder
    prompts = [prompt_tokens(1400, seed=300 + i) for i in range(4)]
    answers = [computed(ann, prompt) for prompt in prompts]
    before = value(bob, "hit_tokens", tier="peer")
    reply = bob.complete(prompts[0], MAX_TOKENS)
    same(reply, answers[0])
    from_peer = value(bob, "hit_tokens", tier="peer")
    assert reply.cached_tokens == from_peer - before >= 1024, what_happened(ann, bob)
    assert value(bob, "restored_bytes", tier="peer") > 0
    until(lambda: value(bob, "replicas") > 0, "it is a replica")

    redis.kill()
    same(bob.complete(prompts[1], MAX_TOKENS), answers[1])
    until(lambda: value(bob, "directory_joined") == 0, "alone")
    same(ann.complete(prompts[1], MAX_TOKENS), answers[1])
    assert value(bob, "hit_tokens", tier="peer") == from_peer
    claimed, has = value(ann, "directory_claims"), value(ann, "artifacts", tier="dram")
    redis.start()
    for server in (ann, bob):
        until(lambda s=server: value(s, "directory_joined") == 1, "back")
    seeds = count(1_000)
    until(lambda: is_answered(bob, next(seeds)), "bob is answered")
    until(lambda: value(ann, "directory_claims") >= claimed + has, "ann has claimed all again")
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
        os.killpg(ann.group, signal.SIGSTOP)
        try:
            time.sleep(2 * LEASE_S)
            for prompt, answer in zip(prompts, answers, strict=True):
                same(bob.complete(prompt, MAX_TOKENS), answer)
            assert value(bob, "hit_tokens", tier="peer") == 0
            until(lambda: value(bob, "directory_claims", outcome="owned") > 0, "bob owns it")
        finally:
            os.killpg(ann.group, signal.SIGCONT)
        until(lambda: value(ann, "replicas") > 0, "ann has replicas")
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
        until(lambda: is_answered(bob, next(seeds)), "bob is answered")
        same(bob.complete(prompts[2], MAX_TOKENS), answers[2])
        assert value(bob, "hit_tokens", tier="peer") > 0
        bob.stop()
        wrong = redis.url.replace(redis.password, "wrong")
        with server_of("gemma3", tmp_path, "cay", wrong) as cay:
            same(cay.complete(prompts[0], MAX_TOKENS), answers[0])
            assert value(cay, "directory_joined") == 0
            assert "wrong user or password" in cay.log_path.read_text()
