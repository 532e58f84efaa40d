"""An attacker writes the directory of two stock servers: garbage, and wrong records.

`tests/ownership/directory/redis` tests the records alone; here engines read each kind once. No
answer changes, no exception leaves a hook, and when the attacker stops they share again.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from examples.disaggregated_prefill.fleet import value
from examples.embedded_redis import EmbeddedRedis
from examples.serving import Server
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from ownership.directory import ArtifactRecord, Claim, Copy, Worker
from ownership.directory.redis import RedisDirectory
from ownership.directory.redis.scripts import fleet_key
from tests.engine.fleets import MAX_TOKENS, computed, same, server_of, until
from tests.engine.harness import prompt_tokens
from tests.ownership.directory.redis.test_hostile_fleet import MUTATIONS

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(1_200)]

NAMES = ("ann", "bob")
HASHES = ("chunks", "runs", "epochs", "names", "peers")
RECORDS = ("chunks", "runs")
HUGE = 4 << 20
SLOT = 4096
TRIES = 20


class Stranger:
    """An attacker who has the password of the fleet's Redis."""

    def __init__(self, server: EmbeddedRedis) -> None:
        self.raw = redis.Redis.from_url(server.url)
        self.directory = RedisDirectory(server.url, deadline_s=10.0)
        self._rng = random.Random(25)

    def overwrite(self, *names: str, by: Callable[[bytes], bytes]) -> None:
        """Return every field of these hashes."""
        for name in names:
            key = fleet_key("default", name)
            for field, found in self.raw.hgetall(key).items():
                self.raw.hset(key, field, by(found))

    def mutate(self, kind: Callable[[bytes, random.Random], bytes], *names: str) -> None:
        self.overwrite(*names, by=lambda found: kind(found, self._rng))

    def replace_keys(self) -> None:
        """Replace keys by those of another type."""
        for name in RECORDS:
            self.raw.delete(fleet_key("default", name))
            self.raw.set(fleet_key("default", name), b"of another kind")

    def records(self) -> dict[ArtifactId, ArtifactRecord]:
        keys = [ChunkKey(bytes(key)) for key in self.raw.hkeys(fleet_key("default", "chunks"))]
        return {
            ArtifactId(key, kind): record
            for key in keys
            for kind, record in self.directory.lookup([key]).chunks[0].items()
        }

    def workers(self) -> dict[str, Worker]:
        """Return the workers that live, by name."""
        return {worker.name: worker for worker in self.directory.workers().values()}

    def lie(self, change: Callable[[Copy], Copy]) -> None:
        """Change every copy's record, as its owner."""
        for artifact, record in self.records().items():
            self.directory.claim_owner(record.owner, [Claim(artifact, change(record.copy))])

    def shuffle(self) -> None:
        """Give each copy the place of another one."""
        found = self.records()
        for kind in {artifact.state_type for artifact in found}:
            of_kind = [artifact for artifact in found if artifact.state_type is kind]
            others = [*of_kind[1:], of_kind[0]]
            for artifact, other in zip(of_kind, others, strict=True):
                claim = Claim(artifact, found[other].copy)
                self.directory.claim_owner(found[artifact].owner, [claim])

    def impersonate(self) -> None:
        """Own everything under another epoch, with another worker's card."""
        found = self.records()
        card = self.workers()["ann"].peer
        epoch = self.directory.register(Worker("eve", card), 600.0).epoch
        self.raw.delete(*(fleet_key("default", name) for name in RECORDS))
        for artifact, record in found.items():
            self.directory.claim_owner(epoch, [Claim(artifact, record.copy)])

    def leave(self) -> None:
        """Delete everything: the engines have to register again."""
        self.raw.flushall()

    def close(self) -> None:
        self.raw.close()
        self.directory.close()


GARBAGE: dict[str, Callable[[Stranger], None]] = {
    **{
        f"{kind.__name__} {' '.join(names)}": lambda x, k=kind, n=names: x.mutate(k, *n)  # type: ignore[misc]
        for kind in MUTATIONS
        for names in (RECORDS, HASHES)
    },
    "huge": lambda x: x.overwrite(*RECORDS, by=lambda found: found + b"\xdd" * HUGE),
    "of another kind": Stranger.replace_keys,
}
"""Changes after which most records cannot be read."""
LIES: dict[str, Callable[[Stranger], None]] = {
    "another slot": lambda x: x.lie(lambda c: c._replace(dram_offset=c.dram_offset + SLOT)),
    "no slot there is": lambda x: x.lie(lambda c: c._replace(dram_offset=1 << 50)),
    "another checksum": lambda x: x.lie(lambda c: c._replace(checksum=bytes(16))),
    "another generation": lambda x: x.lie(lambda c: c._replace(generation=c.generation + 1)),
    "another size": lambda x: x.lie(lambda c: c._replace(size_bytes=c.size_bytes + SLOT)),
    "another artifact": Stranger.shuffle,
    "another epoch": Stranger.impersonate,
}
"""Changes after which records can be read but are wrong."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[tuple[Server, Server, Stranger]]:
    with EmbeddedRedis() as server, ExitStack() as undo:
        ann, bob = (server_of("gemma3", tmp_path, name, server.url) for name in NAMES)
        for one in (ann, bob):
            undo.callback(one.kill)
            one.launch()
        for one in (ann, bob):
            one.start()
        stranger = Stranger(server)
        undo.callback(stranger.close)
        yield ann, bob, stranger


def from_peers(server: Server) -> float:
    return value(server, "hit_tokens", tier="peer")


def test_no_answer_changes_whatever_is_written_into_the_directory(
    fleet: tuple[Server, Server, Stranger],
) -> None:
    ann, bob, _ = fleet
    seeds = itertools.count(800)
    for name, deed in GARBAGE.items():
        met(name, deed, fleet, next(seeds))
    for name, deed in LIES.items():
        # The owner checks its records each second, so a wrong one may be gone before it is read.
        attempts = (met(name, deed, fleet, next(seeds)) for _ in range(TRIES))
        assert any(attempts), f"{name}: not counted"
    for server in (ann, bob):
        until(lambda s=server: value(s, "directory_joined") == 1, "it has joined")  # type: ignore[misc]
        assert value(server, "hook_errors") == 0
    for _ in range(TRIES):  # a peer that failed is left alone for a second
        prompt = prompt_tokens(1_100, next(seeds))
        taken = from_peers(bob)
        answer = computed(ann, prompt)
        same(bob.complete(prompt, MAX_TOKENS), answer)
        if from_peers(bob) > taken:
            return
    raise AssertionError("nothing is shared any more, though the stranger is gone")


def met(
    name: str, deed: Callable[[Stranger], None], fleet: tuple[Server, Server, Stranger], seed: int
) -> bool:
    """Let the attacker write after ann has stored a prompt that bob is then asked for.

    Return whether bob has counted a failure at a peer.
    """
    ann, bob, stranger = fleet
    until(lambda: set(stranger.workers()) == set(NAMES), f"they have joined: {name}")
    before = set(stranger.records())
    prompt = prompt_tokens(1_100, seed)
    answer = computed(ann, prompt)
    until(lambda: bool(set(stranger.records()) - before), f"it is known: {name}")
    failures = value(bob, "failures", tier="peer")
    deed(stranger)
    for server in (bob, ann):
        same(server.complete(prompt, MAX_TOKENS), answer)
    stranger.leave()
    return value(bob, "failures", tier="peer") > failures
