"""A foreign program writes into a working fleet's keys: nothing ends or hangs, all is repaired."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import msgpack
import pytest

from tests.ownership.fleet_bench import LEASE_S
from tests.ownership.member.members import KV, change
from tests.ownership.stepped_members import CHAIN, IDS, NUMBERS, SteppedFleet

pytestmark = pytest.mark.long

EXTREMES = [0, 1, -1, 2**31, 2**52, 2**53 + 1, 2**63 - 1, -(2**63), 1e308, -1e308, 0.5, 1e18]
WORDS: list[Any] = [*EXTREMES, None, True, False, b"", b"x" * 300, [], [[]], {}, [b"a", 1]]


def flipped(value: bytes, seed: random.Random) -> bytes:
    bits = bytearray(value or b"\0")
    for _ in range(seed.randint(1, 4)):
        bits[seed.randrange(len(bits))] ^= 1 << seed.randrange(8)
    return bytes(bits)


def cut(value: bytes, seed: random.Random) -> bytes:
    return value[: seed.randint(0, len(value))]


def text(_: bytes, seed: random.Random) -> bytes:
    return str(seed.choice([*EXTREMES, "nan", "inf", "-inf", "", "x"])).encode()


def packed(_: bytes, seed: random.Random) -> bytes:
    return bytes(msgpack.packb(seed.choice(WORDS), use_bin_type=False))


def repacked(value: bytes, seed: random.Random) -> bytes:
    """Return the value with one of its parts replaced, at any depth."""
    prefix = value[:1] if value[:1] == b"\1" else b""
    try:
        parts = msgpack.unpackb(value[len(prefix) :], raw=True)
        at = parts
        while isinstance(at, list) and at:
            index = seed.randrange(len(at))
            if not isinstance(at[index], list) or seed.random() < 0.3:
                at[index] = seed.choice(WORDS)
                break
            at = at[index]
        return prefix + bytes(msgpack.packb(parts, use_bin_type=False))
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return packed(value, seed)


MUTATIONS: list[Callable[[bytes, random.Random], bytes]] = [flipped, cut, text, packed, repacked]


def mutate(fleet: SteppedFleet, seed: random.Random) -> None:
    """One field of one of the fleet's hashes, or a new one, or a key of another kind."""
    name = seed.choice(sorted(fleet.raw.keys(fleet.key("*"))))
    if seed.random() < 0.02:
        fleet.raw.set(name, b"of another kind")
        return
    if fleet.raw.type(name) == b"zset":
        fleet.raw.zadd(name, {seed.randbytes(16): seed.choice([-1e308, 0.0, 1e308])})
        return
    fields = sorted(fleet.raw.hkeys(name)) if fleet.raw.type(name) == b"hash" else []
    if not fields or seed.random() < 0.1:
        fields = [seed.choice([seed.randbytes(16), b"", b"x", b"-1", b"1e300", b"nan", CHAIN[0]])]
    field = seed.choice([x for x in fields if x != b"format"] or [b"x"])  # that is refused
    if fleet.raw.type(name) in (b"hash", b"none"):
        before = fleet.raw.hget(name, field) or b""
        fleet.raw.hset(name, field, seed.choice(MUTATIONS)(before, seed))


def work(fleet: SteppedFleet, seed: random.Random) -> None:
    """Let the fleet do one of its operations."""
    member = seed.choice(list(fleet.members.values()))
    number = seed.choice(NUMBERS)
    if change(number).id not in member.store.here or seed.random() < 0.3:
        member.store.put(change(number, 4096 * seed.randint(0, 9)))
    elif seed.random() < 0.4:
        member.store.drop(number)
    member.worker.wake()
    lookup = member.worker.find(CHAIN)
    fleet.run_s(seed.choice([0.05, 0.3, LEASE_S / 3]))
    assert lookup.poll()
    for what, copies in zip(IDS, lookup.found, strict=False):
        for copy in copies.get(KV, ()):  # used as the store does
            member.worker.peers.may_use(what, copy)
            member.worker.peers.may_adopt(what, copy)
            assert copy.size_bytes > 0
            assert copy.dram_offset >= -1


def restore_kinds(fleet: SteppedFleet) -> None:
    """A fleet may not delete a key of another kind; an operator has to."""
    for name in fleet.raw.keys(fleet.key("*")):
        if fleet.raw.type(name) == b"string":
            fleet.raw.delete(name)


@pytest.mark.parametrize(
    "number",
    [
        *range(25),
        3794104665,  # a record of a state type that does not exist, whose owner has ended
        4093524416,  # the same, and another worker has a replica of that chunk
        298566280,  # the name of a live epoch is not UTF-8
        914691435,  # the deadline of an ended epoch is farther off than a lease
    ],
)
def test_a_fleet_survives_foreign_values_in_its_keys(number: int) -> None:
    """Each number is other damage. A lease that is damaged into a long one lasts that long, so a
    fleet of such a number (3414428118) agrees later.
    """
    seed = random.Random(number)
    fleet = SteppedFleet()
    try:
        fleet.run_s(1.0)
        for _ in range(20):
            work(fleet, seed)
            for _ in range(seed.randint(1, 3)):
                mutate(fleet, seed)
        restore_kinds(fleet)
        for member in fleet.members.values():
            member.worker.find(CHAIN)  # found as ours and not here: released
        fleet.run_s(LEASE_S)
        fleet.agree_in_the_end(listings=False)
    finally:
        fleet.close()


@pytest.mark.parametrize("name", ["fleet", "epochs", "names", "peers", "chunks", "runs"])
def test_a_key_of_another_kind_is_reported_until_it_is_deleted(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    fleet = SteppedFleet()
    fleet.members["ann"].store.put(*map(change, NUMBERS))
    fleet.run_s(1.0)
    fleet.raw.set(fleet.key(name), b"of another kind")
    fleet.run_s(2 * LEASE_S)
    assert "not a directory's" in caplog.text
    assert len([r for r in caplog.records if r.levelname == "ERROR"]) <= 2
    fleet.raw.delete(fleet.key(name))
    fleet.run_s(1.0)
    fleet.agree_in_the_end()
    fleet.close()
