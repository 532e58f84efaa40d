"""Three stock servers that share a cache, and faults of them and of their Redis.

`tests/ownership/test_fleet_soak.py` has many rounds on the same code without a model. Here each
kind of fault happens once, to show that no answer changes.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from examples.disaggregated_prefill.fleet import value
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Reply, Server
from hetero_connector.tools.verification import verify_model
from tests.engine.fleets import LEASE_S, MAX_TOKENS, computed, same, server_of, until
from tests.engine.harness import prompt_tokens

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1_800)]

MODEL = "gemma3"
NAMES = ("ann", "bob", "cay")


class Faults:
    """In each round one server computes a prompt, something fails, and the others answer it."""

    def __init__(self, folder: Path, redis: EmbeddedRedis, rng: random.Random) -> None:
        self.folder = folder
        self.redis = redis
        self.rng = rng
        self.servers = {name: self.server(name) for name in NAMES}
        self.prompt: list[int] = []
        self.answer: Reply
        """The answer of the server that computed the prompt, from its own prefix cache."""
        self.from_peers = self.adopted = 0.0
        self.kinds: dict[str, Callable[[Server, Server, Server], None]] = {
            "none": self.nothing,
            "owner killed before": self.owner_killed_before,
            "owner killed during": self.owner_killed_during,
            "owner stopped": self.owner_stopped,
            "redis gone": self.redis_gone,
            "redis slow": self.redis_slow,
        }

    def server(self, name: str) -> Server:
        ssd = {"ssd_dir": str(self.folder / name), "ssd_gib": 0.1}
        return server_of(MODEL, self.folder, name, self.redis.url, **ssd)

    def start(self, *servers: Server) -> None:
        for server in servers:
            server.launch()
        for server in servers:
            server.start()
            until(lambda s=server: value(s, "directory_joined") == 1, "it has joined")  # type: ignore[misc]

    def round(self, kind: str, seed: int) -> None:
        owner, reader, other = self.rng.sample(list(self.servers.values()), 3)
        self.prompt = prompt_tokens(1_100, seed)
        self.answer = computed(owner, self.prompt)
        time.sleep(0.5)  # time to write to its SSD and to report that to the fleet
        self.kinds[kind](owner, reader, other)
        for server in self.servers.values():
            until(lambda s=server: value(s, "directory_joined") == 1, "all are back")  # type: ignore[misc]
            self.ask(server)

    def ask(self, server: Server) -> None:
        peers = value(server, "hit_tokens", tier="peer")
        adopted = value(server, "adopted_bytes")
        same(server.complete(self.prompt, MAX_TOKENS), self.answer)
        self.from_peers += value(server, "hit_tokens", tier="peer") - peers
        self.adopted += value(server, "adopted_bytes") - adopted

    def nothing(self, owner: Server, reader: Server, other: Server) -> None:
        self.ask(reader)

    def owner_killed_before(self, owner: Server, reader: Server, other: Server) -> None:
        owner.kill()
        time.sleep(1.3 * LEASE_S)
        self.ask(reader)
        self.ask(other)
        self.start(owner)

    def owner_killed_during(self, owner: Server, reader: Server, other: Server) -> None:
        replies: list[Reply] = []
        asking = threading.Thread(
            target=lambda: replies.append(reader.complete(self.prompt, MAX_TOKENS))
        )
        asking.start()
        time.sleep(self.rng.random() * 0.05)
        owner.kill()
        asking.join(60)
        assert replies, "it hangs, or failed"
        same(replies[0], self.answer)
        self.ask(other)
        self.start(owner)

    def owner_stopped(self, owner: Server, reader: Server, other: Server) -> None:
        os.killpg(owner.group, signal.SIGSTOP)
        self.ask(reader)
        time.sleep(1.5 * LEASE_S)
        self.ask(other)
        os.killpg(owner.group, signal.SIGCONT)

    def redis_gone(self, owner: Server, reader: Server, other: Server) -> None:
        self.redis.kill()
        self.ask(reader)
        self.redis.start()

    def redis_slow(self, owner: Server, reader: Server, other: Server) -> None:
        self.redis.pause()
        self.ask(reader)
        time.sleep(2.0)
        self.redis.resume()


def test_no_answer_changes_whatever_fails(tmp_path: Path) -> None:
    with EmbeddedRedis() as redis, ExitStack() as stack:
        faults = Faults(tmp_path, redis, random.Random(24))
        for server in faults.servers.values():
            stack.callback(server.kill)
        faults.start(*faults.servers.values())
        for number, kind in enumerate(faults.kinds):
            print(f"round {number}: {kind}")
            faults.round(kind, seed=700 + number)
    intact = 0
    for name in NAMES:
        for path in (tmp_path / name).iterdir():
            if path.is_dir():
                report = verify_model(path)
                assert not report.bad
                intact += report.artifacts
    print(f"{faults.from_peers:.0f} tokens from peers, {faults.adopted:.0f} bytes adopted")
    print(f"{intact} artifacts intact")
    assert faults.from_peers > 0
    assert faults.adopted > 0
    assert intact > 0
