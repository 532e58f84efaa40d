"""Redis is killed, restarted empty, paused, unreachable, full: errors in time, then recovery."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import redis

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.errors import (
    DirectoryError,
    DirectoryUnavailableError,
    RecordError,
    StaleEpochError,
)
from ownership.directory import DirectoryLimits, GrantOutcome, Lease
from ownership.directory.redis import RedisDirectory
from ownership.directory.redis.connection import RedisConnection, ServerFullError
from tests.ownership.fleet_bench import KV, artifact, chain, claim, claim_of, join
from tests.waiting import until

pytestmark = pytest.mark.long

DEADLINE_S = 0.5
SLACK_S = 30.0
"""A busy machine wakes a thread late. A hang takes minutes."""
OWNED = {GrantOutcome.OWNED}


@pytest.fixture
def directory(server: EmbeddedRedis) -> Iterator[RedisDirectory]:
    opened = RedisDirectory(server.url, deadline_s=DEADLINE_S)
    yield opened
    opened.close()


def seconds_of(call: Callable[[], object]) -> float:
    started = time.monotonic()
    with pytest.raises(DirectoryUnavailableError):
        call()
    return time.monotonic() - started


def until_back(call: Callable[[], Any], timeout_s: float = 30.0) -> Any:
    """Return the call's answer as soon as the directory is reachable again."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return call()
        except DirectoryUnavailableError:
            if time.monotonic() > deadline:
                raise


class TestKilled:
    def test_a_call_fails_and_later_ones_work_again(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        join(directory, "ann")
        server.kill()
        assert seconds_of(lambda: directory.lookup(chain("a", 3))) < DEADLINE_S + SLACK_S
        server.start()
        assert until_back(lambda: directory.lookup(chain("a", 3))).chunks[0] == {}

    def test_while_it_is_gone_calls_fail_at_once(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        server.kill()
        started = time.monotonic()
        failed = 0
        for _ in range(200):
            with pytest.raises(DirectoryUnavailableError):
                directory.lookup(chain("a", 3))
            failed += 1
        assert failed == 200
        assert time.monotonic() - started < DEADLINE_S + SLACK_S

    def test_a_server_restarted_empty_knows_no_epoch_and_continues_the_numbers(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        before = join(directory, "ann")
        token = claim(directory, before, artifact())[0].token
        server.kill()
        server.start()
        with pytest.raises(StaleEpochError):
            until_back(lambda: directory.renew_lease(before.epoch))
        with pytest.raises(StaleEpochError):
            claim(directory, before, artifact())
        after = join(directory, "ann")
        granted = claim(directory, after, artifact())[0]
        assert granted.outcome is GrantOutcome.OWNED
        assert before.epoch < token < after.epoch < granted.token

    def test_a_server_that_lost_the_last_numbers_does_not_repeat_them(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        """A replica that is promoted, or a snapshot, may be a moment behind."""
        client = redis.Redis.from_url(server.url)
        ann = join(directory, "ann")
        claim(directory, ann, artifact("a"))
        kept = {key: client.dump(key) for key in client.scan_iter()}
        bob = join(directory, "bob")
        token = claim(directory, bob, artifact("b"))[0].token
        client.flushall()
        for key, value in kept.items():
            client.restore(key, 0, value)
        client.close()
        eve = join(directory, "eve")
        granted = claim(directory, ann, artifact("b"))[0]
        assert granted.outcome is GrantOutcome.OWNED
        assert bob.epoch < token < eve.epoch < granted.token
        with pytest.raises(StaleEpochError):
            directory.renew_lease(bob.epoch)

    def test_a_failure_during_many_calls_brings_no_hang_and_no_wrong_answer(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        """Claims run in three threads while the server is killed and restarted five times."""
        stop = threading.Event()
        longest_s: list[float] = []
        wrong: list[BaseException] = []

        def work(name: str) -> None:
            lease: Lease | None = None
            slowest_s, number = 0.0, 0
            while not stop.is_set():
                started = time.monotonic()
                try:
                    if lease is None:
                        lease = join(directory, name, lease_s=3_600.0)
                    number += 1
                    what = artifact(f"{name}/{number}")
                    granted = directory.claim_owner(lease.epoch, [claim_of(what)])[0]
                    assert granted.owner == lease.epoch
                    assert granted.token > lease.epoch
                    found = directory.lookup([what.chunk]).chunks[0]
                    assert not found or found[KV].token == granted.token
                except StaleEpochError:
                    lease = None
                except DirectoryUnavailableError:
                    pass
                except BaseException as error:
                    wrong.append(error)
                    return
                slowest_s = max(slowest_s, time.monotonic() - started)
            longest_s.append(slowest_s)

        threads = [threading.Thread(target=work, args=(f"w{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(5):
            until_back(lambda: directory.lookup(chain("a", 1)))
            server.kill()
            server.start()
        until_back(lambda: directory.lookup(chain("a", 1)))
        stop.set()
        for thread in threads:
            thread.join(timeout=30.0)
        assert wrong == []
        assert len(longest_s) == 3
        assert max(longest_s) < 3 * DEADLINE_S + SLACK_S  # three calls a turn


class TestSlow:
    def test_a_paused_server_costs_a_deadline_and_no_answer_is_mixed_up(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        lease = join(directory, "ann", lease_s=600.0)
        claim(directory, lease, artifact("a"))
        server.pause()
        paused_s = time.monotonic()
        took_s = seconds_of(lambda: directory.lookup(chain("a", 1)))
        assert took_s < DEADLINE_S + SLACK_S
        while time.monotonic() - paused_s < 2.0:
            with pytest.raises(DirectoryUnavailableError):
                directory.count_users(chain("b", 2))
        server.resume()
        view = until_back(lambda: directory.lookup(chain("a", 1)))
        assert view.chunks[0][KV].owner == lease.epoch
        assert until_back(lambda: directory.lookup(chain("b", 2))).chunks[1] == {}

    def test_a_claim_whose_answer_was_lost_may_be_repeated(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        lease = join(directory, "ann", lease_s=600.0)
        claim(directory, lease, artifact("warm"))
        server.pause()
        seconds_of(lambda: claim(directory, lease, artifact("a")))
        server.resume()
        first = until_back(lambda: directory.lookup(chain("a", 1))).chunks[0]
        again = claim(directory, lease, artifact("a"))[0]
        assert again.outcome is GrantOutcome.OWNED
        assert not first or first[KV].token == again.token


class TestUnreachable:
    def test_a_call_asks_once_and_no_wait_is_longer_than_half_the_deadline(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Times on a busy machine say little, so this looks at what the socket was told."""
        timeouts: list[float | None] = []
        settimeout = socket.socket.settimeout

        def noted(connection: socket.socket, timeout_s: float | None) -> None:
            timeouts.append(timeout_s)
            settimeout(connection, timeout_s)

        monkeypatch.setattr(socket.socket, "settimeout", noted)
        with socket.create_server(("127.0.0.1", 0)) as silent:
            url = f"redis://:x@127.0.0.1:{silent.getsockname()[1]}"
            directory = RedisDirectory(url, deadline_s=DEADLINE_S)
            with pytest.raises(DirectoryUnavailableError):
                join(directory, "ann")
            directory.close()
            silent.setblocking(False)
            silent.accept()[0].close()
            with pytest.raises(BlockingIOError):
                silent.accept()
        assert set(timeouts) == {DEADLINE_S / 2}

    def test_a_port_without_a_server_is_unavailable(self) -> None:
        with socket.socket() as closed:
            closed.bind(("127.0.0.1", 0))
            url = f"redis://127.0.0.1:{closed.getsockname()[1]}"
        directory = RedisDirectory(url, deadline_s=DEADLINE_S)
        assert seconds_of(lambda: join(directory, "ann")) < DEADLINE_S + SLACK_S

    def test_a_server_that_never_answers_is_unavailable(self) -> None:
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            url = f"redis://:x@127.0.0.1:{silent.getsockname()[1]}"
            directory = RedisDirectory(url, deadline_s=DEADLINE_S)
            assert seconds_of(lambda: join(directory, "ann")) < DEADLINE_S + SLACK_S

    def test_a_server_that_is_not_redis_is_unavailable(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as other:

            def greet() -> None:
                connection, _ = other.accept()
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    connection.recv(1 << 16)

            thread = threading.Thread(target=greet)
            thread.start()
            directory = RedisDirectory(
                f"redis://127.0.0.1:{other.getsockname()[1]}", deadline_s=DEADLINE_S
            )
            with pytest.raises(DirectoryError):
                join(directory, "ann")
            directory.close()
            thread.join(timeout=10.0)
            assert not thread.is_alive()


class TestServerTroubles:
    def test_scripts_that_were_flushed_are_sent_again(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        lease = join(directory, "ann", lease_s=600.0)
        client = redis.Redis.from_url(server.url)
        for count in (1, 600):  # one script, and several sent together
            client.script_flush()
            claims = [claim_of(artifact(f"{count}/{i}")) for i in range(count)]
            grants = directory.claim_owner(lease.epoch, claims)
            assert {grant.outcome for grant in grants} == {GrantOutcome.OWNED}

    def test_a_full_server_lists_nothing_new_and_does_all_else(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        ann, gone = (join(directory, name, lease_s=600.0) for name in ("ann", "gone"))
        orphans = [claim_of(artifact("orphans", index)) for index in range(3)]
        assert {g.outcome for g in directory.claim_owner(gone.epoch, orphans)} == OWNED
        [kept] = claim(directory, ann, artifact())
        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory", 1)
        assert claim(directory, ann, artifact("new"))[0].outcome is GrantOutcome.FULL
        copies = [claim_of(artifact("orphans"))]
        [listed] = directory.replicate_readonly(ann.epoch, copies, 60.0)
        assert listed.outcome is GrantOutcome.FULL
        new = join(directory, "new", lease_s=600.0)
        with pytest.raises(DirectoryUnavailableError):
            directory.add_chain_user(ann.epoch, "s", chain("a", 1))
        # None of these waits for a pause of the circuit breaker.
        directory.renew_lease(ann.epoch)
        assert directory.workers().keys() == {ann.epoch, gone.epoch, new.epoch}
        assert directory.remove_chain_user(ann.epoch, "s", chain("a", 1)) == chain("a", 1)
        assert directory.report_generation(ann.epoch, 0, 0) == 0
        assert directory.lookup(chain("a", 1)).chunks[0][KV].token == kept.token
        directory.release(ann.epoch, {artifact(): kept.token})
        assert directory.lookup(chain("a", 1)).chunks[0] == {}
        directory.end_lease(gone.epoch)
        assert directory.sweep(1_000) == len(orphans)
        client.config_set("maxmemory", 0)
        assert claim(directory, ann, artifact())[0].outcome is GrantOutcome.OWNED
        client.close()

    def test_a_full_server_lets_a_fleet_whose_leases_have_all_ended_join_and_forgets_its_records(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        orphans = [claim_of(artifact("orphans", index)) for index in range(3)]
        before = join(directory, "ann", lease_s=600.0)
        directory.claim_owner(before.epoch, orphans)
        directory.end_lease(before.epoch)
        client = redis.Redis.from_url(server.url)
        client.config_set("maxmemory", 1)
        after = join(directory, "ann", lease_s=600.0)
        assert directory.sweep(1_000) == 0, "it does not know yet"
        assert claim(directory, after, artifact())[0].outcome is GrantOutcome.FULL
        assert directory.sweep(1_000) == len(orphans)
        client.config_set("maxmemory", 0)
        assert {g.outcome for g in directory.claim_owner(after.epoch, orphans)} == OWNED
        directory.end_lease(after.epoch)
        assert directory.sweep(1_000) == 0, "orphans are kept for a successor again"
        client.close()

    def test_a_full_server_that_refuses_transactions_is_looked_up_without_one(
        self, server: EmbeddedRedis, directory: RedisDirectory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Redis 7 does; Redis 8 does not."""

        def refuse(*_: object) -> Any:
            raise ServerFullError("OOM")

        lease = join(directory, "ann", lease_s=600.0)
        claim(directory, lease, artifact())
        monkeypatch.setattr(RedisConnection, "run_and_fetch", refuse)
        assert directory.lookup(chain("a", 1)).chunks[0][KV].owner == lease.epoch

    def test_a_server_that_a_script_keeps_busy_is_unavailable(self) -> None:
        """redis-py puts the command before an error in a transaction."""
        with EmbeddedRedis(["lua-time-limit 1"]) as server:
            directory = RedisDirectory(server.url, deadline_s=2 * SLACK_S)
            assert directory.lookup(chain("a", 1)).chunks[0] == {}
            client = redis.Redis.from_url(server.url)

            def run_for_ever() -> None:
                with redis.Redis.from_url(server.url) as other, suppress(redis.ResponseError):
                    other.eval("while true do end", 0)

            def is_busy() -> bool:
                try:
                    client.get("x")
                except redis.ResponseError as error:
                    return str(error).startswith("BUSY")
                return False

            thread = threading.Thread(target=run_for_ever, daemon=True)
            thread.start()
            try:
                until(is_busy)
                with pytest.raises(DirectoryUnavailableError, match="BUSY"):
                    directory.lookup(chain("a", 1))
                assert directory._connection._breaker.is_open
            finally:
                client.script_kill()
                thread.join(SLACK_S)
                client.close()
            assert until_back(lambda: directory.lookup(chain("a", 1))).chunks[0] == {}
            directory.close()

    def test_a_replica_too_many_writes_nothing_but_the_time(self, server: EmbeddedRedis) -> None:
        directory = RedisDirectory(server.url, DirectoryLimits(max_replicas=0), DEADLINE_S)
        ann, bob = (join(directory, name, lease_s=600.0) for name in ("ann", "bob"))
        claim(directory, ann, artifact())
        client = redis.Redis.from_url(server.url)
        client.config_resetstat()
        [grant] = directory.replicate_readonly(bob.epoch, [claim_of(artifact())], 60.0)
        assert grant.outcome is GrantOutcome.FULL
        assert client.info("commandstats")["cmdstat_hset"]["calls"] == 1
        client.close()
        directory.close()

    def test_a_replica_that_lost_its_primary_is_unavailable(self) -> None:
        with EmbeddedRedis(["replicaof 127.0.0.1 1"]) as replica:
            directory = RedisDirectory(replica.url, deadline_s=DEADLINE_S)
            with pytest.raises(DirectoryUnavailableError):
                join(directory, "ann")

    def test_a_key_of_another_kind_is_an_error_that_says_so(
        self, server: EmbeddedRedis, directory: RedisDirectory
    ) -> None:
        lease = join(directory, "ann")
        client = redis.Redis.from_url(server.url)
        client.set("{heterocache:default}:chunks", "not a hash")
        with pytest.raises(RecordError, match="WRONGTYPE"):
            claim(directory, lease, artifact())
