"""Numbers stay valid whatever the server's clock says and whatever is written in their place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from ownership.directory import EpochStatus, GrantOutcome, Worker
from ownership.directory.identifiers import LAST_NUMBER
from ownership.directory.redis.scripts import fleet_key
from tests.ownership.fleet_bench import KV, LEASE_S, LIMITS, artifact, claim, join
from tests.ownership.redis_bench import RedisBench, shared_server

CENTURIES_S = 3e10
WHAT = artifact("far")


@pytest.fixture
def bench() -> Iterator[RedisBench]:
    made = RedisBench(LIMITS)
    yield made
    made.close()


def is_served(bench: RedisBench, name: str) -> int:
    """Check that a worker can join, own and be read from; return its epoch."""
    directory = bench.open()
    lease = join(directory, name)
    assert lease.epoch < LAST_NUMBER
    [grant] = claim(directory, lease, WHAT)
    assert grant.outcome is GrantOutcome.OWNED
    assert grant.token < LAST_NUMBER
    view = directory.lookup([WHAT.chunk])
    assert view.chunks[0][KV].token == grant.token
    assert view.status(lease.epoch) is EpochStatus.LIVE
    directory.end_lease(lease.epoch)
    return lease.epoch


def test_a_clock_centuries_ahead_spoils_nothing_for_good(bench: RedisBench) -> None:
    first = is_served(bench, "ann")
    bench.advance(CENTURIES_S)
    second = is_served(bench, "bob")
    bench.advance(-CENTURIES_S)
    third = is_served(bench, "cay")
    assert first < second < third
    bench.advance(LEASE_S)
    assert is_served(bench, "dan") > third


@pytest.mark.parametrize("number", [2**53, 2**60, 2**63 - 1, -5, "1e300", "nan", "many", ""])
def test_a_sequence_that_no_script_wrote_is_replaced(bench: RedisBench, number: int | str) -> None:
    is_served(bench, "ann")
    client = redis.Redis.from_url(shared_server().url)
    client.hset(fleet_key(bench.fleet, "fleet"), "sequence", number)
    first = is_served(bench, "bob")
    assert is_served(bench, "cay") > first
    client.close()


@pytest.mark.parametrize("field", ["raw_s", "now_s", "artifacts", "fields", "memory"])
@pytest.mark.parametrize("value", ["", "nan", "inf", "-1e308", "1e308", "x", "-1", "1.5"])
def test_foreign_values_in_the_fleets_fields_are_repaired(
    bench: RedisBench, field: str, value: str
) -> None:
    is_served(bench, "ann")
    client = redis.Redis.from_url(shared_server().url)
    client.hset(fleet_key(bench.fleet, "fleet"), field, value)
    client.close()
    directory = bench.open()
    directory.renew_lease(join(directory, "bob").epoch)
    is_served(bench, "cay")


def test_a_floor_beyond_all_numbers_is_ignored(bench: RedisBench) -> None:
    directory = bench.open()
    lease = directory.register(Worker("ann", b"card"), LEASE_S, 2**60)
    assert lease.epoch < LAST_NUMBER
