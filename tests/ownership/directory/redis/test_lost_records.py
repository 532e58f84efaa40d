"""Records are lost under live epochs: directory and stores agree again within two leases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import redis

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.errors import DirectoryUnavailableError
from ownership.directory import Claim, Copy, GrantOutcome, Worker
from ownership.directory.identifiers import NO_EPOCH
from ownership.directory.redis import RedisDirectory
from ownership.directory.redis.scripts import fleet_key
from ownership.member.fleet_worker import FleetWorker
from ownership.member.held_lease import lease_clock
from tests.ownership.member.members import KV, RunningWorker, change, record_of
from tests.waiting import until

pytestmark = pytest.mark.long

LEASE_S = 2.0
NUMBERS = range(1, 601)
IDS = [change(number).id for number in NUMBERS]


class Fleet:
    """Ann has all artifacts, on a Redis that can lose records; bob only looks."""

    def __init__(self, server: EmbeddedRedis, url: str = "") -> None:
        self.server = server
        self.raw = redis.Redis.from_url(server.url)
        self.bob = RedisDirectory(url or server.url, deadline_s=5.0)
        self.ann = RunningWorker(
            RedisDirectory(url or server.url, deadline_s=0.15), lease_s=LEASE_S
        )
        self.ann.put(*map(change, NUMBERS))
        until(self.agrees)

    @property
    def worker(self) -> FleetWorker:
        return self.ann.worker

    def agrees(self) -> bool:
        """Return True if directory and store agree that ann owns each artifact."""
        view = self.bob.lookup([what.chunk for what in IDS])
        found = [chunk.get(KV) for chunk in view.chunks]
        epoch = self.ann.store.epochs[-1] if self.ann.store.epochs else 0
        return bool(epoch) and all(
            held is not None
            and (held.owner, held.token) == (epoch, self.ann.store.tokens.get(what))
            for what, held in zip(IDS, found, strict=True)
        )

    def has_renewed_since(self, asked_s: float) -> Callable[[], bool]:
        """Return a condition: ann has asked for her lease after this time of its clock, and has it.

        A renewal, or a registration if the directory had forgotten her.
        """

        def has_renewed() -> bool:
            lease = self.worker._keeper.lease
            assert lease is not None
            return lease._renewed_s > asked_s and self.ann.store.epochs[-1] == lease.epoch

        return has_renewed

    def is_own(self, changes: Sequence[ExportChange]) -> Callable[[], bool]:
        """Return whether ann's latest epoch owns them."""

        def is_own() -> bool:
            try:
                view = self.bob.lookup([made.id.chunk for made in changes])
            except DirectoryUnavailableError:
                return False
            owners = {chunk[KV].owner if KV in chunk else NO_EPOCH for chunk in view.chunks}
            return owners == {self.ann.store.epochs[-1]}

        return is_own

    def is_free(self, number: int) -> Callable[[], bool]:
        """Return a condition: the artifact has no owner."""

        def is_free() -> bool:
            held = record_of(self.bob, number)
            return held is None or held.owner == NO_EPOCH

        return is_free

    def close(self) -> None:
        self.ann.worker.close()
        self.bob.close()
        self.raw.close()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with EmbeddedRedis() as server:
        made = Fleet(server)
        yield made
        made.close()


def some(fleet: Fleet) -> None:
    """Delete a few chunks."""
    heads = fleet.raw.hkeys(fleet_key("default", "runs"))
    fleet.raw.hdel(fleet_key("default", "runs"), *heads[:1])
    fleet.raw.hdel(fleet_key("default", "chunks"), *(what.chunk for what in IDS[100:110]))


def evicted(*names: str) -> Callable[[Fleet], None]:
    """Delete whole keys, as Redis evicts them."""

    def lose(fleet: Fleet) -> None:
        for name in names:
            fleet.raw.delete(fleet_key("default", name))

    return lose


LOSSES = {
    "some": some,
    "runs": evicted("runs"),
    "chunks and runs": evicted("chunks", "runs"),
    "the fleet's own": evicted("fleet"),
    "epochs": evicted("epochs"),
    "names": evicted("names"),
    "cards": evicted("peers"),
    "all but epochs": evicted("chunks", "runs", "fleet", "names", "peers"),
    "everything": lambda fleet: fleet.raw.flushall(),
}


@pytest.mark.parametrize("what", LOSSES)
def test_lost_records_are_claimed_again(fleet: Fleet, what: str) -> None:
    LOSSES[what](fleet)
    until(fleet.has_renewed_since(lease_clock()))
    until(fleet.agrees)
    until(lambda: fleet.worker.accepts_claims)
    until(lambda: [worker.peer for worker in fleet.bob.workers().values()] == [b"card"])
    epoch = fleet.bob.register(Worker("bob", b"bob's card"), 60.0).epoch
    grants = fleet.bob.claim_owner(epoch, [Claim(i, Copy(64, bytes(16), 0, 1)) for i in IDS])
    assert {grant.outcome for grant in grants} == {GrantOutcome.FOREIGN}, "it has one owner"


def test_the_count_of_artifacts_shrinks_with_the_loss(fleet: Fleet) -> None:
    """Otherwise a directory that lost records repeatedly would be full without records."""
    key, records = fleet_key("default", "fleet"), ("chunks", "runs")
    for _ in range(4):
        fleet.raw.delete(*(fleet_key("default", name) for name in records))
        until(fleet.agrees)
        # In proportion: what is claimed before a renewal has seen the loss is rounded.
        until(lambda: abs(int(fleet.raw.hget(key, "artifacts")) - len(IDS)) <= len(IDS) // 20)


def test_an_older_snapshot_brings_no_released_artifact_back(fleet: Fleet) -> None:
    """A release is lost, too: the artifact must not stay owned for ever."""
    keys = {key: fleet.raw.dump(key) for key in fleet.raw.keys("*")}
    fleet.ann.drop(1)
    fleet.ann.put(change(1_000))
    until(fleet.is_free(1))
    until(lambda: change(1_000).id in fleet.ann.store.tokens)
    back = fleet.raw.pipeline(transaction=True).flushall()
    for key, value in keys.items():
        back.restore(key, 0, value)
    back.hset(fleet_key("default", "fleet"), "memory", "another")  # as another server says
    back.execute()
    until(fleet.is_own([change(1_000)]))
    until(fleet.is_free(1))


class Follower:
    """A Redis replica that stops replicating and is then promoted."""

    def __init__(self, primary: EmbeddedRedis) -> None:
        self.primary = primary
        self.server = EmbeddedRedis(
            [f"replicaof 127.0.0.1 {primary.port}", f"masterauth {primary.password}"],
            password=primary.password,
        ).start()
        self.raw = redis.Redis.from_url(self.server.url)
        until(lambda: self.raw.info("replication")["master_link_status"] == "up")

    def lags(self) -> None:
        """Stop replicating."""
        self.raw.execute_command("REPLICAOF", "NO", "ONE")

    def takes_over(self) -> EmbeddedRedis:
        """Serve under the primary's address: what was not replicated is lost."""
        self.primary.kill()
        snapshot = {key: self.raw.dump(key) for key in self.raw.keys("*")}
        self.server.stop()
        self.primary.start()
        raw = redis.Redis.from_url(self.primary.url)
        for key, value in snapshot.items():
            raw.restore(key, 0, value, replace=True)
        raw.close()
        return self.primary


def replicated(raw: redis.Redis) -> int:
    """Return how far a replica has followed its primary, in bytes; -1 before it has begun."""
    return int(raw.info("replication").get("slave_repl_offset", -1))


def test_a_promoted_replica_that_lagged_gets_what_it_missed(fleet: Fleet) -> None:
    follower = Follower(fleet.server)
    written = int(fleet.raw.info("replication")["master_repl_offset"])
    until(lambda: follower.raw.exists(fleet_key("default", "epochs")) == 1)
    until(lambda: replicated(follower.raw) >= written)
    follower.lags()
    fleet.ann.drop(1)
    later = [change(number) for number in range(2_000, 2_300)]
    fleet.ann.put(*later)
    until(lambda: all(made.id in fleet.ann.store.tokens for made in later))
    follower.takes_over()
    until(fleet.is_own(later))
    until(fleet.is_free(1))
