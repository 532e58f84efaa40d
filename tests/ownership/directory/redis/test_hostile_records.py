"""Foreign values in the database are a counted miss or a clear error."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import nullcontext

import msgpack
import pytest
import redis
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetero_connector.errors import RecordError, StaleEpochError
from hetero_connector.spec.state_types import StateType
from ownership.directory import EpochStatus, GrantOutcome, Lease
from ownership.directory.identifiers import LAST_NUMBER
from ownership.directory.redis import RedisDirectory, encoding
from ownership.directory.redis.scripts import fleet_key
from tests.ownership.fleet_bench import (
    KV,
    artifact,
    chain,
    claim,
    claim_of,
    copies_at,
    copy_of,
    join,
)
from tests.ownership.redis_bench import new_fleet, shared_server

CHAIN = chain("hostile", 4)
COPY = encoding.pack_copy(copy_of(artifact()))


class Hostile:
    """A fleet, and a foreign client that writes into its keys."""

    def __init__(self) -> None:
        self.fleet = new_fleet()
        self.client = redis.Redis.from_url(shared_server().url)
        self.directory = RedisDirectory(
            f"{shared_server().url}?fleet={self.fleet}", deadline_s=20.0
        )
        self.lease: Lease = join(self.directory, "ann", lease_s=3_600.0)

    def write(self, key: str, field: bytes, value: bytes) -> None:
        self.client.hset(fleet_key(self.fleet, key), field, value)

    def close(self) -> None:
        self.directory.close()
        self.client.close()


@pytest.fixture(scope="module")
def hostile() -> Iterator[Hostile]:
    made = Hostile()
    yield made
    made.close()


def run_of(*entries: bytes) -> bytes:
    return b"\1" + bytes(msgpack.packb(list(entries), use_bin_type=False))


def record_of(*fields: object) -> bytes:
    return bytes(msgpack.packb([list(fields)], use_bin_type=False))


INDEX_VALUES = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=16).map(lambda tail: b"\2" + tail),
    st.sampled_from(CHAIN).map(lambda head: b"\2" + head),
    st.lists(st.sampled_from(CHAIN), max_size=6).map(b"".join),
    st.integers(1, 4).map(lambda count: b"".join(CHAIN[:count])),
)
RUNS = st.one_of(
    st.binary(max_size=200),
    st.binary(max_size=200).map(lambda tail: b"\1" + tail),
    st.lists(st.binary(max_size=60), max_size=4).map(lambda entries: run_of(*entries)),
    st.recursive(
        st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(),
        lambda inner: st.lists(inner, max_size=6),
        max_leaves=12,
    ).map(lambda value: run_of(msgpack.packb(value, use_bin_type=False))),
)


@example(index=[CHAIN[0] + CHAIN[1], b"", b"", b""], runs=[run_of(b"", b""), b"", b"", b""])
@settings(max_examples=150)
@given(
    index=st.lists(INDEX_VALUES, min_size=4, max_size=4),
    runs=st.lists(RUNS, min_size=4, max_size=4),
)
def test_any_value_for_a_chunk_counts_as_absent_and_a_claim_repairs_it(
    hostile: Hostile, index: list[bytes], runs: list[bytes]
) -> None:
    for key, value, run in zip(CHAIN, index, runs, strict=True):
        hostile.write("chunks", key, value)
        hostile.write("runs", key, run)
    view = hostile.directory.lookup(CHAIN)
    for at in range(len(CHAIN)):
        assert all(isinstance(kind, StateType) for kind in view.chunks[at])
        copies_at(view, at)
    hostile.directory.sweep(1_000)
    claims = [claim_of(artifact("hostile", at)) for at in range(len(CHAIN))]
    grants = hostile.directory.claim_owner(hostile.lease.epoch, claims)
    found = hostile.directory.lookup(CHAIN).chunks
    for at, grant in enumerate(grants):
        # A readable run of another chunk that says it holds this one is believed.
        is_disputed = any(CHAIN[at] in value for i, value in enumerate(index) if i != at)
        if grant.outcome is GrantOutcome.OWNED and not is_disputed:
            assert found[at][KV].owner == hostile.lease.epoch


@pytest.mark.parametrize(
    "entry",
    [
        record_of(0, 5, 6),
        record_of(99, 5, 6, COPY),
        record_of(-1, 5, 6, COPY),
        record_of(True, 5, 6, COPY),
        record_of(0, -5, 6, COPY),
        record_of(0, 2**60, 6, COPY),
        record_of(0, 5, b"6", COPY),
        record_of(0, 5, 6, COPY + b"x"),
        record_of(0, 5, 6, [1, 2]),
        record_of(0, 5, 6, struct.pack("<Q16sqQ?", 0, bytes(16), 0, 0, False)),
        record_of(0, 5, 6, struct.pack("<Q16sqQ?", 9, bytes(16), -2, 0, False)),
        record_of(0, 5, 6, COPY, [1, COPY]),
        record_of(0, 5, 6, COPY, 7),
        record_of(0, 5, 6, COPY, [1, COPY, True]),
        record_of(0, 5, 6, COPY, [1, COPY, b"12"]),
        b"\xdd\xff\xff\xff\xff",  # an array of four billion
        b"\xc6\xff\xff\xff\xff",  # four billion bytes
        b"\x91" * 2_000,
    ],
)
def test_a_bad_entry_is_a_counted_miss(hostile: Hostile, entry: bytes) -> None:
    before = hostile.directory.num_bad_records
    hostile.client.hdel(fleet_key(hostile.fleet, "chunks"), *CHAIN[1:])
    hostile.write("chunks", CHAIN[0], CHAIN[0])
    hostile.write("runs", CHAIN[0], run_of(entry))
    assert hostile.directory.lookup(CHAIN).chunks[0] == {}
    assert hostile.directory.num_bad_records == before + 1
    with pytest.raises(RecordError):
        encoding.chunk_records(entry)


@pytest.mark.parametrize(
    ("others", "replicas"),
    [
        ([[len(StateType), 5, 6, COPY]], []),
        ([[1, 5, 6, COPY + b"x"]], []),
        ([], [[7, b"", 1e9]]),
    ],
)
def test_a_record_that_no_worker_can_read_hides_no_claim(
    hostile: Hostile, others: list[object], replicas: list[object]
) -> None:
    what, epoch = artifact("hostile"), hostile.lease.epoch
    own = [0, epoch, 6, encoding.pack_copy(copy_of(what)), *replicas]
    hostile.client.hdel(fleet_key(hostile.fleet, "chunks"), *CHAIN[1:])
    hostile.write("chunks", CHAIN[0], CHAIN[0])
    hostile.write("runs", CHAIN[0], run_of(msgpack.packb([*others, own], use_bin_type=False)))
    assert hostile.directory.lookup(CHAIN).chunks[0] == {}
    assert claim(hostile.directory, hostile.lease, what)[0].outcome is GrantOutcome.OWNED
    assert hostile.directory.lookup(CHAIN).chunks[0][KV].owner == epoch


@pytest.mark.parametrize("kind", StateType)
def test_the_scripts_know_every_state_type(hostile: Hostile, kind: StateType) -> None:
    what = artifact("kinds", state_type=kind)
    first = claim(hostile.directory, hostile.lease, what)
    assert claim(hostile.directory, hostile.lease, what) == first


def test_an_unreadable_epoch_has_ended(hostile: Hostile) -> None:
    what = artifact("epochs")
    bob = join(hostile.directory, "bob", lease_s=3_600.0)
    claim(hostile.directory, bob, what)
    hostile.write("epochs", b"%d" % bob.epoch, b"\xc1")
    view = hostile.directory.lookup([what.chunk])
    assert view.status(bob.epoch) is EpochStatus.ENDED
    assert copies_at(view) == []
    with pytest.raises(StaleEpochError):  # so its worker registers again
        hostile.directory.renew_lease(bob.epoch)
    hostile.client.hdel(fleet_key(hostile.fleet, "epochs"), b"%d" % bob.epoch)


@pytest.mark.parametrize(
    ("name", "lease_s", "left_s", "status"),
    [
        (b"bo\xe2", 10, 5.0, EpochStatus.LIVE),
        (b"bob", 10, 500.0, EpochStatus.ENDED),
        (b"bob", 10, float("nan"), EpochStatus.ENDED),
        (b"bob", b"10", 5.0, EpochStatus.ENDED),
    ],
)
def test_scripts_and_workers_agree_which_epochs_are_live(
    hostile: Hostile, name: bytes, lease_s: object, left_s: float, status: EpochStatus
) -> None:
    bob = join(hostile.directory, "bob", lease_s=3_600.0)
    until_s = hostile.directory.lookup(CHAIN).now_s + left_s
    entry = msgpack.packb([name, b"", lease_s, until_s, False], use_bin_type=False)
    hostile.write("epochs", b"%d" % bob.epoch, entry)
    assert hostile.directory.lookup(CHAIN).status(bob.epoch) is status
    with nullcontext() if status is EpochStatus.LIVE else pytest.raises(StaleEpochError):
        hostile.directory.renew_lease(bob.epoch)
    hostile.client.hdel(fleet_key(hostile.fleet, "epochs"), b"%d" % bob.epoch)


@given(packed=st.binary(max_size=120))
def test_no_bytes_break_the_decoders(packed: bytes) -> None:
    for decode in (encoding.run_entries, encoding.chunk_records):
        try:
            decode(packed)
        except RecordError:
            continue


@settings(max_examples=100)
@example(value=b"nan", adopted=b"x")
@example(value=b"1e300", adopted=b"-1")
@example(value=b"9007199254740992", adopted=b"9007199254740993")
@example(value=b"9007199254740991", adopted=b"9007199254740990")
@example(value=b"4503599627370495", adopted=b"1")
@given(
    value=st.one_of(st.binary(max_size=20), st.integers(-(2**64), 2**64).map(lambda x: b"%d" % x)),
    adopted=st.binary(max_size=20),
)
def test_an_impossible_generation_is_ignored_or_refused(
    hostile: Hostile, value: bytes, adopted: bytes
) -> None:
    """It is ignored, but no reset follows the last number."""
    directory, epoch = hostile.directory, hostile.lease.epoch
    hostile.write("fleet", b"generation", value)
    assert 7 <= directory.report_generation(epoch, 7, 7) < LAST_NUMBER
    hostile.write("adopted", b"%d" % epoch, adopted)
    assert all(0 <= n < LAST_NUMBER for n in directory.generation().adopted.values())
    hostile.write("fleet", b"generation", value)
    before = directory.generation().number
    if value.isdigit():
        assert before == (int(value) if int(value) < LAST_NUMBER else 0)
    if before + 1 == LAST_NUMBER:
        with pytest.raises(RecordError, match="greater than any may be"):
            directory.reset_generation()
    else:
        assert before < directory.reset_generation() < LAST_NUMBER
