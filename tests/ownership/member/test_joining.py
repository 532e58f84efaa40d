"""A worker as an engine's configuration opens it."""

from __future__ import annotations

import threading
import time

from examples.embedded_redis import EmbeddedRedis
from hetero_connector.metrics import Recorder
from ownership.directory.identifiers import NO_TOKEN
from ownership.directory.redis import RedisDirectory
from ownership.member.joining import open_worker
from tests.ownership.member.members import KV, ListedStore, change, owned_by_bob, record_of
from tests.waiting import until

LEASE_S = 1.0
SLACK_S = 15.0
"""The machine may be busy. With listings of a minute it would take 20 s."""


def test_an_artifact_that_a_live_owner_releases_is_owned_again_within_two_leases() -> None:
    with EmbeddedRedis() as redis:
        directory, store = RedisDirectory(redis.url, deadline_s=10.0), ListedStore()
        bob = owned_by_bob(directory, 1)
        worker = open_worker(redis.url, "ann", LEASE_S, 10.0, Recorder())
        worker.start(store)
        try:
            store.put(change(1))
            worker.wake()
            until(lambda: change(1).id in store.replicas)
            held = record_of(directory, 1)
            assert held is not None
            released_s = time.monotonic()
            directory.release(bob, {change(1).id: held.token})
            until(lambda: store.tokens.get(change(1).id, NO_TOKEN) > held.token)
            assert time.monotonic() - released_s <= 2 * LEASE_S + SLACK_S
        finally:
            worker.close()
            directory.close()


def test_an_answer_is_waited_for_as_long_as_a_lookup_may_take() -> None:
    """A Redis that is slow must not fail its calls before the time that the user has given."""
    with EmbeddedRedis() as redis:
        directory = RedisDirectory(redis.url, deadline_s=10.0)
        owned_by_bob(directory, 1)
        worker = open_worker(redis.url, "ann", 600.0, 2000.0, Recorder())
        worker.start(ListedStore())
        try:
            until(lambda: worker.accepts_claims)
            redis.pause()
            threading.Timer(1.0, redis.resume).start()
            lookup = worker.find([change(1).chunk.key])
            until(lookup.poll)
            assert [set(chunk) for chunk in lookup.found] == [{KV}]
        finally:
            worker.close()
            directory.close()
