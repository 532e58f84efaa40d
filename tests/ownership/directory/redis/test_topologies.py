"""Sentinel and Cluster, with real servers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import redis

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.errors import (
    DirectoryRefusedError,
    DirectoryUnavailableError,
    StaleEpochError,
)
from ownership.directory import Directory, GrantOutcome, Lease
from ownership.directory.redis import RedisDirectory, RedisMessageLog
from ownership.directory.redis.message_log import BEGIN
from tests.ownership.directory.redis.sentinel_fleet import PASSWORD, SentinelFleet, until
from tests.ownership.fleet_bench import KV, artifact, claim, claim_of, join
from tests.ownership.member.members import RunningWorker, change, record_of

pytestmark = pytest.mark.long

DEADLINE_S = 10.0


class TestSentinel:
    @pytest.fixture
    def fleet(self) -> Iterator[SentinelFleet]:
        """A primary, its replica, and a Sentinel that fails over by itself."""
        with SentinelFleet() as fleet:
            yield fleet

    def test_a_failover_is_followed(self, fleet: SentinelFleet) -> None:
        primary, replica, url = fleet.primary, fleet.replica, fleet.url
        directory = RedisDirectory(url, deadline_s=DEADLINE_S)
        before = join(directory, "ann", lease_s=600.0)
        token = claim(directory, before, artifact())[0].token
        copied = redis.Redis.from_url(replica.url)
        until(lambda: copied.exists("{heterocache:default}:chunks"), "the claim is replicated")
        primary.kill()
        found: list[object] = []

        def is_back() -> bool:
            try:
                found[:] = [directory.lookup([artifact().chunk]).chunks[0][KV]]
            except DirectoryUnavailableError:
                return False
            return True

        until(is_back, "the replica has taken over")
        assert found[0].token == token  # type: ignore[attr-defined]
        assert claim(directory, before, artifact())[0].token == token
        directory.close()

    def test_routers_messages_follow_a_failover(self, fleet: SentinelFleet) -> None:
        primary, replica = fleet.primary, fleet.replica
        log = RedisMessageLog(fleet.url, DEADLINE_S)
        cursor = log.exchange(b"before", BEGIN).cursor
        copied = redis.Redis.from_url(replica.url)
        until(lambda: copied.exists("{heterocache:default}:messages"), "it is replicated")
        primary.kill()
        found: list[bytes] = []

        def is_back() -> bool:
            try:
                found.extend(x.content for x in log.exchange(b"after", cursor).messages)
            except DirectoryUnavailableError:
                return False
            return bool(found)

        until(is_back, "the replica has taken over")
        assert found[-1] == b"after"
        assert b"before" not in found
        log.close()

    def test_a_failover_to_a_replica_that_lagged_loses_nothing_for_good(
        self, fleet: SentinelFleet
    ) -> None:
        primary, replica, url = fleet.primary, fleet.replica, fleet.url
        ann = RunningWorker(RedisDirectory(url, deadline_s=0.15), lease_s=2.0)
        bob = RedisDirectory(url, deadline_s=DEADLINE_S)

        def owns(number: int) -> bool:
            """Return True if ann's latest epoch owns it."""
            try:
                held = record_of(bob, number)
            except DirectoryUnavailableError:
                return False
            return held is not None and held.owner == ann.store.epochs[-1]

        early, late = range(1, 40), range(100, 140)
        ann.put(*map(change, early))
        until(lambda: all(map(owns, early)), "ann owns what she has")
        copied = redis.Redis.from_url(replica.url)
        until(lambda: copied.exists("{heterocache:default}:chunks"), "that is replicated")
        copied.config_set("masterauth", "another")
        redis.Redis.from_url(primary.url).client_kill_filter(_type="replica")
        until(
            lambda: copied.info("replication")["master_link_status"] == "down",
            "the replica hears nothing more",
        )
        ann.drop(1)
        ann.put(*map(change, late))
        until(lambda: all(map(owns, late)) and not owns(1), "ann owns more")
        primary.kill()
        until(lambda: all(map(owns, late)), "what was not replicated is told again")
        until(lambda: not owns(1) and owns(2), "what was released stays so")
        assert copied.info("replication")["role"] == "master", "else nothing was lost"
        ann.worker.close()
        bob.close()

    def test_a_service_that_no_sentinel_watches_is_unavailable(self, fleet: SentinelFleet) -> None:
        sentinel = fleet.sentinel
        hosts = f"127.0.0.1:{sentinel.port}"
        directory = RedisDirectory(
            f"redis+sentinel://{hosts}/other?sentinel_password={sentinel.password}",
            deadline_s=DEADLINE_S,
        )
        with pytest.raises(DirectoryUnavailableError, match="other"):
            join(directory, "ann")


class TestCluster:
    @pytest.fixture(scope="class")
    def nodes(self) -> Iterator[list[EmbeddedRedis]]:
        """Two nodes that share the slots."""
        with ExitStack() as stack:
            options = ["cluster-enabled yes", "cluster-node-timeout 2000"]
            started = [
                stack.enter_context(EmbeddedRedis(options, password=PASSWORD)) for _ in range(2)
            ]
            clients = [redis.Redis.from_url(node.url) for node in started]
            clients[0].execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 8191)
            clients[1].execute_command("CLUSTER", "ADDSLOTSRANGE", 8192, 16383)
            clients[0].execute_command("CLUSTER", "MEET", "127.0.0.1", started[1].port)
            for client in clients:
                until(
                    lambda c=client: b"cluster_state:ok" in c.execute_command("CLUSTER", "INFO"),
                    "the Cluster is up",
                )
            yield started

    @pytest.fixture(params=["a", "b", "c", "d"])
    def directory(
        self, nodes: list[EmbeddedRedis], request: pytest.FixtureRequest
    ) -> Iterator[Directory]:
        """Fleets in different slots, so on either node."""
        hosts = f"127.0.0.1:{nodes[0].port}"
        url = f"redis+cluster://:{PASSWORD}@{hosts}?fleet={request.param}"
        opened = RedisDirectory(url, deadline_s=DEADLINE_S)
        yield opened
        opened.close()

    def test_every_script_runs_in_one_slot(self, directory: Directory) -> None:
        ann, bob = (join(directory, name, lease_s=600.0) for name in ("ann", "bob"))
        what = [artifact(index=i) for i in range(300)]  # more than one script's
        claims = [claim_of(a) for a in what]
        assert {g.outcome for g in directory.claim_owner(ann.epoch, claims)} == {GrantOutcome.OWNED}
        assert {g.outcome for g in directory.claim_owner(bob.epoch, claims)} == {
            GrantOutcome.FOREIGN
        }
        replicas = directory.replicate_readonly(bob.epoch, claims, 60.0)
        assert {g.outcome for g in replicas} == {GrantOutcome.REPLICA}
        directory.end_lease(ann.epoch)
        assert {g.outcome for g in directory.claim_owner(bob.epoch, claims)} == {GrantOutcome.OWNED}
        view = directory.lookup([a.chunk for a in what])
        assert {c[KV].owner for c in view.chunks} == {bob.epoch}
        use_everything_else(directory, bob)
        with pytest.raises(StaleEpochError):
            directory.renew_lease(ann.epoch)

    def test_a_cluster_needs_its_own_scheme_and_the_reverse(
        self, nodes: list[EmbeddedRedis], server: EmbeddedRedis
    ) -> None:
        told = []
        for fleet in ("a", "b", "c", "d"):
            url = f"redis://:{PASSWORD}@127.0.0.1:{nodes[0].port}?fleet={fleet}"
            try:
                join(RedisDirectory(url, deadline_s=DEADLINE_S), "ann")
            except DirectoryRefusedError as error:
                told.append(str(error))
        assert told
        assert all("use redis+cluster://" in message for message in told)
        url = f"redis+cluster://:{server.password}@127.0.0.1:{server.port}"
        with pytest.raises(DirectoryRefusedError, match="use redis://"):
            join(RedisDirectory(url, deadline_s=DEADLINE_S), "ann")


def use_everything_else(directory: Directory, lease: Lease) -> None:
    chunk = artifact().chunk
    directory.renew_lease(lease.epoch)
    directory.add_chain_user(lease.epoch, "r", [chunk])
    assert directory.count_users([chunk])[0] == 1
    assert directory.remove_chain_user(lease.epoch, "r", [chunk]) == [chunk]
    assert lease.epoch in directory.workers()
    token = directory.lookup([chunk]).chunks[0][KV].token
    directory.release(lease.epoch, {artifact(): token})
    assert directory.sweep(1_000) == 0
