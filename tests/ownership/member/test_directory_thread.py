"""The directory's thread on a real Redis that goes down and comes back empty."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future

import pytest

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.errors import DirectoryUnavailableError
from hetero_connector.metrics import COUNTERS, Recorder
from ownership.directory import Claim, Directory, Grant, GrantOutcome, Worker
from ownership.directory.identifiers import Epoch
from ownership.directory.memory import MemoryDirectory
from ownership.directory.redis import RedisDirectory
from ownership.member.directory_thread import DirectoryThread, ThreadHooks
from ownership.member.lease_keeper import LeaseKeeper
from tests.ownership.fleet_bench import KV, artifact, chain, claim_of, lookup
from tests.waiting import until

LEASE_S = 2.0
WAIT_S = 60.0
STORED = [claim_of(artifact("stored", index)) for index in range(600)]
STORED_CHAIN = [claim.artifact.chunk for claim in STORED]


class Member:
    """A worker of a fleet: its thread, its artifacts, its grants."""

    def __init__(self, directory: Directory, **limits: float) -> None:
        self.recorder = Recorder()
        self.stored: list[Claim] = []
        self.granted: list[tuple[Epoch, Claim, Grant]] = []
        self.keeper = LeaseKeeper(directory, lambda: Worker("ann"), LEASE_S, self.recorder)
        self.thread = DirectoryThread(
            directory,
            self.keeper,
            ThreadHooks(self.inventory, lambda *answer: self.note(*answer)),
            self.recorder,
            **limits,
        )

    def inventory(self) -> Iterator[Sequence[Claim]]:
        for first in range(0, len(self.stored), 256):
            yield self.stored[first : first + 256]

    def note(self, epoch: Epoch, claims: Sequence[Claim], grants: Sequence[Grant]) -> None:
        self.granted += [(epoch, c, g) for c, g in zip(claims, grants, strict=True)]

    def epoch(self) -> Epoch:
        lease = self.keeper.lease
        return Epoch(0) if lease is None or not lease.is_valid else lease.epoch

    def owned(self) -> set[ChunkKey]:
        """Return the chunks that it was granted in its present epoch."""
        now = self.epoch()
        return {claim.artifact.chunk for epoch, claim, _ in list(self.granted) if epoch == now}

    def counted(self, name: str) -> float:
        payload = self.recorder.drain() or {COUNTERS: {}}
        return sum(v for k, v in payload[COUNTERS].items() if k.startswith(name))


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as started:
        yield started


@pytest.fixture
def member(server: EmbeddedRedis) -> Iterator[Member]:
    made = Member(RedisDirectory(server.url, deadline_s=0.5))
    made.thread.start()
    yield made
    made.thread.close()


@pytest.fixture
def other(server: EmbeddedRedis) -> Iterator[RedisDirectory]:
    """Another client of the same directory."""
    opened = RedisDirectory(server.url, deadline_s=5.0)
    yield opened
    opened.close()


def owners(directory: RedisDirectory) -> set[Epoch]:
    """Return the owners of the member's artifacts; 0 for none."""
    try:
        view = directory.lookup(STORED_CHAIN)
    except DirectoryUnavailableError:
        return {Epoch(0)}
    return {found[KV].owner if KV in found else Epoch(0) for found in view.chunks}


def test_published_claims_are_owned_and_answered(member: Member, other: RedisDirectory) -> None:
    assert member.thread.publish(STORED) == len(STORED)
    until(lambda: owners(other) == {member.epoch()} != {0}, "all is owned")
    until(lambda: member.owned() == set(STORED_CHAIN), "all is answered")
    assert {grant.outcome for _, _, grant in member.granted} == {GrantOutcome.OWNED}
    found = lookup(member.thread, 5.0, STORED_CHAIN).result(WAIT_S)
    assert found.chunks[0][KV].owner == member.epoch()


def test_everything_is_claimed_again_after_redis_came_back_empty(
    server: EmbeddedRedis, member: Member, other: RedisDirectory
) -> None:
    member.stored = STORED
    member.thread.publish(STORED)
    until(lambda: owners(other) == {member.epoch()} != {0}, "all is owned")
    until(lambda: member.owned() == set(STORED_CHAIN), "all is answered")
    before, tokens = member.epoch(), [grant.token for _, _, grant in member.granted]
    server.kill()
    until(lambda: member.epoch() == 0, "the worker is alone")
    with pytest.raises(DirectoryUnavailableError):
        lookup(member.thread, 1.0, STORED_CHAIN).result(WAIT_S)
    server.start()
    until(lambda: owners(other) == {member.epoch()} != {0}, "all is owned again")
    until(lambda: member.owned() == set(STORED_CHAIN), "all is answered again")
    after = member.epoch()
    assert after > before
    assert min(g.token for epoch, _, g in member.granted if epoch == after) > max(tokens)
    assert member.counted("heterocache_directory_failures") > 0


def test_artifacts_sealed_while_redis_is_down_are_claimed_afterwards(
    server: EmbeddedRedis, member: Member, other: RedisDirectory
) -> None:
    until(lambda: member.epoch() != 0, "it is registered")
    server.kill()
    member.thread.publish(STORED)
    server.start()
    until(lambda: owners(other) == {member.epoch()} != {0}, "all is owned")


def test_no_call_waits_for_a_paused_redis(server: EmbeddedRedis, member: Member) -> None:
    until(lambda: member.epoch() != 0, "it is registered")
    server.pause()
    started = time.monotonic()
    calls: list[Future[object]] = []
    for _ in range(50):
        calls.append(lookup(member.thread, 0.5, chain("a", 4)))  # type: ignore[arg-type]
        member.thread.publish(STORED[:1])
    assert time.monotonic() - started < 5.0, "asking waited: fifty deadlines are 25 s"
    for call in calls:
        with pytest.raises(DirectoryUnavailableError):
            call.result(WAIT_S)
    server.resume()

    def answers() -> bool:
        call = lookup(member.thread, 5.0, chain("a", 4))
        return call.exception(WAIT_S) is None and call.result().chunks[0] == {}

    until(answers, "calls are answered again")


class TestBounds:
    """Waiting calls and claims are bounded and counted."""

    def test_too_many_calls_and_claims_are_refused(self) -> None:
        member = Member(MemoryDirectory(), max_calls=2, max_claims=3)
        calls = [lookup(member.thread, 5.0, []) for _ in range(3)]
        assert member.thread.publish(STORED[:5]) == 3
        assert member.thread.publish(STORED[:5]) == 0
        with pytest.raises(DirectoryUnavailableError, match="2 calls wait"):
            calls[2].result(0)
        assert not calls[0].done()
        assert member.counted("heterocache_directory_claims_discarded") == 7

    def test_closing_fails_waiting_calls_and_ends_the_lease(self) -> None:
        directory = MemoryDirectory()
        member = Member(directory)
        member.thread.start()
        until(lambda: member.epoch() != 0, "it is registered")
        busy, done = threading.Event(), threading.Event()

        def job(_: Directory, epoch: Epoch) -> bool:
            busy.set()
            return done.wait(WAIT_S)

        running = member.thread.call(job, 5.0)
        assert busy.wait(WAIT_S)
        waiting = lookup(member.thread, 5.0, [])
        closer = threading.Thread(target=member.thread.close)
        closer.start()
        until(lambda: member.thread._is_closing, "it is closing")
        done.set()
        closer.join(WAIT_S)
        assert running.result(WAIT_S)
        with pytest.raises(DirectoryUnavailableError, match="closed"):
            waiting.result(WAIT_S)
        with pytest.raises(DirectoryUnavailableError, match="closed"):
            lookup(member.thread, 5.0, []).result(0)
        assert directory.workers() == {}

    def test_a_call_past_its_deadline_is_not_made(self) -> None:
        member = Member(MemoryDirectory())
        made: list[int] = []
        late = member.thread.call(lambda _, epoch: made.append(1), 0.0)
        member.thread.start()
        with pytest.raises(DirectoryUnavailableError, match="deadline"):
            late.result(WAIT_S)
        assert made == []
        member.thread.close()

    def test_a_callback_that_raises_does_not_end_the_heartbeat(self) -> None:
        member = Member(MemoryDirectory())
        member.note = lambda *_: 1 / 0  # type: ignore[assignment, method-assign]
        member.thread.start()
        member.thread.publish(STORED[:1])
        until(lambda: member.counted("heterocache_directory_failures") > 0, "it is counted")
        assert member.thread.call(lambda _, epoch: epoch, 5.0).result(WAIT_S) > 0
        with pytest.raises(ZeroDivisionError):
            member.thread.call(lambda _, epoch: 1 // 0, 5.0).result(WAIT_S)
        member.thread.close()
