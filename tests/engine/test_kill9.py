"""After kill -9 of a server under traffic the SSD is intact and answers are right.

The server is small enough that restores come from SSD all the time. After each kill, of the whole
server or of its API server alone, the directory verifies, nothing of the server is left, and the
next engine of the same directory answers as one without a connector does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from examples.checkpoints import write_checkpoint
from examples.serving import Reply, Server, kv_transfer_config
from hetero_connector.tools.verification import verify_model
from tests.engine.harness import (
    CHECKPOINTS,
    Completion,
    delta,
    engine,
    generate,
    metric,
    prompt_tokens,
)
from tests.engine.process_group import assert_gone

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]  # three server starts

MODEL = "gemma3"
PROMPTS = [prompt_tokens(700 + 90 * i, seed=70 + i) for i in range(5)]
"""Prompts of more than two chunks; together they exceed the DRAM tier."""
MAX_TOKENS = 8
HIT_TOKENS = "heterocache_hit_tokens_total"
TOLERANCE = 1e-4
TIERS = {"dram_gib": 0.006, "ssd_gib": 0.06, "checkpoints": "full", "planner": "always_load"}


@pytest.fixture(scope="module")
def answers() -> list[Completion]:
    """Return the answers of an engine without the connector."""
    with engine(MODEL) as llm:
        return [generate(llm, prompt, MAX_TOKENS) for prompt in PROMPTS]


def extra_at(folder: Path) -> dict[str, Any]:
    return {**TIERS, "ssd_dir": str(folder / "ssd")}


def server_at(folder: Path, **engine_args: Any) -> Server:
    return Server(
        write_checkpoint(MODEL, CHECKPOINTS),
        folder / "server.log",
        kv_transfer_config(extra_at(folder)),
        engine_args,
    )


def same(reply: Reply, answer: Completion) -> None:
    """Compare the most likely tokens' logprobs, which are all that a server sends."""
    assert reply.tokens == answer.tokens
    for ours, theirs in zip(reply.top_logprobs, answer.logprobs, strict=True):
        differences = [abs(x - theirs[int(name.split(":")[1])]) for name, x in ours.items()]
        assert len(differences) >= 20
        assert max(differences) <= TOLERANCE


def ssd_hit_tokens(server: Server) -> float:
    found = server.series(HIT_TOKENS)
    return sum(value for labels, value in found if labels["tier"] == "ssd")


class Traffic(threading.Thread):
    """Sends prompts, old and new ones, until the server is gone."""

    def __init__(self, server: Server, rng: random.Random) -> None:
        super().__init__()
        self._server = server
        self._rng = rng
        self.answered = 0

    def run(self) -> None:
        # The connection breaks with the server; whatever that looks like ends the traffic.
        with suppress(OSError, RuntimeError, ValueError):
            while True:
                prompt = self._rng.choice(PROMPTS)
                if self._rng.random() < 0.4:  # a fork: a stored beginning, then something new
                    cut = self._rng.randrange(len(prompt))
                    prompt = prompt[:cut] + prompt_tokens(300, seed=self._rng.randrange(1 << 30))
                self._server.complete(prompt, 4)
                self.answered += 1


def kill_api_server(server: Server) -> None:
    """Kill only that process with -9: vLLM then does not end the engine core."""
    assert server._process is not None
    server._process.kill()
    server._process.wait()


def killed_under_traffic(
    server: Server, rng: random.Random, kill: Callable[[Server], None] = Server.kill
) -> int:
    """Kill at a random moment; return the number of answered requests."""
    threads = [Traffic(server, random.Random(rng.random())) for _ in range(2)]
    for thread in threads:
        thread.start()
    time.sleep(rng.uniform(0.3, 3.0))
    group = server.group
    kill(server)
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert_gone(group)
    return sum(thread.answered for thread in threads)


def verified(folder: Path) -> int:
    """Return the number of artifacts in the directory, all of them intact."""
    count = 0
    for path in (folder / "ssd").iterdir():
        if path.is_dir():
            report = verify_model(path)
            assert not report.bad
            count += report.artifacts
    return count


def arenas_of_others() -> set[str]:
    """Return the files in /dev/shm: a DRAM tier must leave none."""
    return {path.name for path in Path("/dev/shm").iterdir() if "heterocache" in path.name}


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(2, marks=pytest.mark.smoke),
        pytest.param(50, marks=[pytest.mark.slow, pytest.mark.timeout(5400)]),
    ],
)
def test_an_engine_killed_at_random_moments_restores_exactly(
    rounds: int, tmp_path: Path, answers: list[Completion]
) -> None:
    from_ssd, stored, answered = 0.0, 0, 0
    for seed in range(rounds):
        print(f"round {seed}: seed {seed}")
        rng = random.Random(seed)
        server = server_at(tmp_path).start()
        try:
            for index in rng.sample(range(len(PROMPTS)), 3):
                same(server.complete(PROMPTS[index], MAX_TOKENS), answers[index])
            from_ssd += ssd_hit_tokens(server)
            kill = kill_api_server if seed % 2 else Server.kill
            answered += killed_under_traffic(server, rng, kill)
        finally:
            server.kill()
        stored = verified(tmp_path)
        assert not arenas_of_others()
    with engine(MODEL, extra_at(tmp_path), disable_log_stats=False) as llm:
        before = metric(HIT_TOKENS, tier="ssd")
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            restored = generate(llm, prompt, MAX_TOKENS)
            assert restored.tokens == answer.tokens
            assert delta(restored, answer) <= TOLERANCE
        from_ssd += metric(HIT_TOKENS, tier="ssd") - before
    log = (tmp_path / "server.log").read_text()
    stopped = log.count("has ended: the engine core stops now")
    assert stopped == rounds // 2, "engine cores notice the end of their parent themselves"
    assert answered > 0, "every kill came before any traffic: the test shows nothing"
    assert stored > 0
    assert from_ssd > 0


def test_sigterm_writes_everything_before_the_end(tmp_path: Path) -> None:
    first = PROMPTS[0]
    # Without it vLLM ends before its next step, in which a request's last boundary is saved.
    with server_at(tmp_path, shutdown_timeout=30) as server:
        group = server.group
        reply = server.complete(first, 150)
        server.stop()  # at once, while the last saves are in DRAM only
    assert_gone(group)
    assert verified(tmp_path) > 0
    second = first + reply.tokens
    with engine(MODEL, extra_at(tmp_path), disable_log_stats=False) as llm:
        before = metric(HIT_TOKENS, tier="ssd")
        restored = generate(llm, [*second, 1], MAX_TOKENS)
        assert metric(HIT_TOKENS, tier="ssd") - before == restored.num_cached_tokens
    # The last decoded token was never an input, so its state does not exist.
    assert restored.num_cached_tokens == (len(second) - 1) // 32 * 32
