"""Pinned chains stay where they are until their time is over, within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ChunkRange, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Pinned, PinRefusal
from tests.store.filling import CHUNK, SIZES, SLOTS, ClockedStore, chain, put, stored
from tests.waiting import until

BYTES = sum(SLOTS.values())


class Clocked(ClockedStore):
    def pin(
        self,
        chunks: list[ChunkRange],
        seconds: float = 100.0,
        tenant: bytes = b"",
        name: str = "",
        *,
        is_bounded: bool | None = None,
    ) -> Pinned | PinRefusal:
        """Pin a chain: without a tenant as an operator does, unless `is_bounded` says otherwise."""
        return self.store.retention.pin_chain(
            name or str(chunks[-1].key),
            (chunks[-1].key,),
            seconds,
            tenant,
            is_bounded=bool(tenant) if is_bounded is None else is_bounded,
        )

    def press(self, name: str) -> None:
        """Store more than DRAM holds."""
        for number in range(8):
            put(self.store, chain(f"{name}{number}", 2))


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked(dram_chunks=8)
    yield made
    made.store.check_integrity()
    made.store.close()


def test_a_pin_keeps_its_chain_under_pressure_until_its_time_is_over(clocked: Clocked) -> None:
    one, two = chain("one", 2), chain("two", 2)
    put(clocked.store, [*one, *two])
    assert clocked.pin(one) == Pinned(2 * CHUNK, 2 * BYTES)
    clocked.press("x")
    assert (stored(clocked.store, one), stored(clocked.store, two)) == (2, 0)
    clocked.clock.passes(101.0)
    clocked.press("y")
    assert stored(clocked.store, one) == 0


def test_forks_share_what_is_pinned_and_the_last_pin_counts(clocked: Clocked) -> None:
    trunk = chain("trunk", 2)
    left, right = chain("left", 1, trunk[-1]), chain("right", 1, trunk[-1])
    put(clocked.store, [*trunk, *left, *right])
    clocked.pin(left, name="left")
    clocked.pin(right, name="right")
    assert clocked.store.catalog.tiers.timed_pins.size_bytes == 4 * BYTES
    assert clocked.store.retention.unpin_chain("left") == 3 * CHUNK
    clocked.press("x")
    assert stored(clocked.store, [*trunk, *right]) == 3
    assert stored(clocked.store, [*trunk, *left]) == 2
    assert clocked.store.retention.unpin_chain("right") == 3 * CHUNK
    assert clocked.store.retention.unpin_chain("right") == 0
    clocked.press("y")
    assert stored(clocked.store, trunk) == 0


def test_a_tenant_pins_a_quarter_and_all_of_them_a_half(clocked: Clocked) -> None:
    chains = {name: chain(name, 2) for name in ("a", "b", "c", "d")}
    for chunks in chains.values():
        put(clocked.store, chunks)
    assert isinstance(clocked.pin(chains["a"], tenant=b"t"), Pinned)
    assert clocked.pin(chains["b"], tenant=b"t") is PinRefusal.TENANT_FULL
    assert isinstance(clocked.pin(chains["a"], tenant=b"t"), Pinned), "it is pinned already"
    assert isinstance(clocked.pin(chains["b"], tenant=b"u"), Pinned)
    assert clocked.pin(chains["c"], tenant=b"v") is PinRefusal.STORE_FULL
    assert clocked.pin(chains["c"]) is PinRefusal.STORE_FULL
    assert clocked.pin(chain("unknown", 1)) is PinRefusal.NOT_STORED
    clocked.store.retention.release(lambda _, tenant: tenant == b"t")
    assert isinstance(clocked.pin(chains["c"]), Pinned), "an operator's is bounded by the half"


def test_state_that_is_stored_later_is_pinned_within_the_bounds(clocked: Clocked) -> None:
    kv, window = StateType.DENSE_KV, StateType.WINDOW_SWA
    one = chain("one", 2)
    pins = clocked.store.catalog.tiers.timed_pins
    put(clocked.store, one, {kv: SIZES[kv]})
    assert isinstance(clocked.pin(one, tenant=b"t"), Pinned)
    before = pins.size_bytes
    put(clocked.store, one, {window: SIZES[window]})
    clocked.press("x")
    assert [x.tiers.keys() for x in clocked.store.match(one)] == [{kv, window}] * 2
    assert pins.size_bytes == before + 2 * SLOTS[window] == 2 * BYTES


def test_state_that_is_stored_later_is_evicted_where_pins_have_no_room() -> None:
    kv, window = StateType.DENSE_KV, StateType.WINDOW_SWA
    clocked = Clocked(dram_chunks=7)
    whole, bare = chain("whole", 2), chain("bare", 2)
    pins = clocked.store.catalog.tiers.timed_pins
    put(clocked.store, whole)
    put(clocked.store, bare, {kv: SIZES[kv]})
    assert isinstance(clocked.pin(whole), Pinned)
    assert isinstance(clocked.pin(bare), Pinned)
    full = pins.size_bytes
    assert full == 7 * BYTES / 2
    put(clocked.store, bare, {window: SIZES[window]})
    clocked.press("x")
    assert [x.tiers.keys() for x in clocked.store.match(bare)] == [{kv}] * 2
    assert pins.size_bytes == full
    clocked.store.check_integrity()
    clocked.store.close()


def test_a_chunk_that_was_lost_is_pinned_when_it_is_stored_again(clocked: Clocked) -> None:
    store, one = clocked.store, chain("one", 2)
    put(store, one)
    assert clocked.pin(one) == Pinned(2 * CHUNK, 2 * BYTES)
    with store.catalog.locked():
        for artifact in list(store.catalog.tiers.index.nodes[one[1].key].artifacts.values()):
            store.catalog.tiers.forget(artifact)
    assert stored(store, one) == 1
    put(store, one[1:])
    clocked.press("x")
    assert stored(store, one) == 2
    store.retention.unpin_chain(str(one[-1].key))
    clocked.press("y")
    assert stored(store, one) == 0


def test_a_pin_that_is_refused_leaves_the_one_of_that_name(clocked: Clocked) -> None:
    one, long = chain("one", 2), chain("long", 4)
    put(clocked.store, [*one, *long])
    clocked.pin(one, tenant=b"t", name="s")
    assert clocked.pin(long, tenant=b"t", name="s") is PinRefusal.TENANT_FULL
    clocked.press("x")
    assert stored(clocked.store, one) == 2


def test_many_pins_of_one_chain_are_bounded_in_number(clocked: Clocked) -> None:
    one = chain("one", 1)
    put(clocked.store, one)
    for number in range(5_000):
        clocked.pin(one, tenant=b"t", name=f"s{number}")
    assert len(clocked.store.catalog.tiers.timed_pins) == 4_096
    assert clocked.store.retention.unpin_chain("s0") == 0
    assert clocked.store.retention.unpin_chain("s4999") == CHUNK


def test_pins_of_clients_push_out_no_operators_pin(clocked: Clocked) -> None:
    one = chain("one", 1)
    put(clocked.store, one)
    clocked.pin(one, name="operator")
    for number in range(5_000):
        clocked.pin(one, tenant=b"t" if number % 2 else b"", name=f"s{number}", is_bounded=True)
    assert clocked.store.retention.unpin_chain("operator") == CHUNK


def test_a_reset_ends_pins_and_their_slots_are_free_again(clocked: Clocked) -> None:
    one = chain("one", 4)
    put(clocked.store, one)
    clocked.pin(one)
    clocked.store.reset()
    assert clocked.store.catalog.tiers.timed_pins.size_bytes == 0
    put(clocked.store, chain("new", 8))
    assert stored(clocked.store, chain("new", 8)) == 8


def test_forgetting_a_session_ends_its_pin_and_respects_that_of_another(clocked: Clocked) -> None:
    one = chain("one", 2)
    put(clocked.store, one)
    clocked.pin(one, name="s")
    clocked.pin(one[:1], name="other")
    assert clocked.store.forget_session("s", [one[-1].key]) == 1
    assert stored(clocked.store, one) == 1


def test_a_pinned_chain_stays_in_both_tiers(tmp_path: Path) -> None:
    clocked = Clocked(dram_chunks=8, root=tmp_path)
    store, one = clocked.store, chain("one", 2)
    put(store, one)
    clocked.pin(one)
    until(lambda: all(a.ssd is not None for a in store.catalog.tiers.index.artifacts()))
    for number in range(12):
        clocked.press(f"x{number}")
    found = store.match(one)
    assert [set(x.tiers.values()) for x in found] == [{Tier.DRAM}] * 2
    assert all(
        a.ssd for x in one for a in store.catalog.tiers.index.nodes[x.key].artifacts.values()
    )
    store.check_integrity()
    store.close()
