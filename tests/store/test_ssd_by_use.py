"""The SSD tier's space goes to the state types that are used, and a restart finds it there."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.slots import SlotPool
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.ssd.journal_format import RowValues
from hetero_connector.store.ssd.tier import adopt_rows
from tests.store.filling import (
    CHUNK,
    DENSE,
    SIZES,
    SLOTS,
    WINDOW,
    Bench,
    Disk,
    begin,
    chain,
    ids_of,
    intact,
    put,
    room_for,
    stored,
    wait,
)

CUT = SlotGeometry(1, SLOTS, 12_288, 8 * 12_288)
"""A slot of each type and eight zones, each for one artifact of dense state or three windows."""


@pytest.fixture
def bench(tmp_path: Path, disk: Disk) -> Bench:
    return Bench(tmp_path / "ssd", disk)


def opened(bench: Bench) -> ArtifactStore:
    return bench.open(dram_chunks=24, ssd_chunks=room_for(24, 8))


def used(store: ArtifactStore) -> tuple[int, int]:
    pool = store.catalog.tiers.ssd
    assert pool is not None
    return pool.num_used(DENSE), pool.num_used(WINDOW)


def restarted(bench: Bench, store: ArtifactStore) -> ArtifactStore:
    store.check_integrity()
    store.close()
    store = opened(bench)
    store.check_integrity()
    return store


def serve_all(store: ArtifactStore) -> int:
    """Restore everything on SSD, a chunk at a time; return how many artifacts came, all exact."""
    nodes = [n for n in store.catalog.tiers.index.nodes.values() if n.stored is not None]
    count = 0
    for node in nodes:
        assert node.stored is not None
        wanted = [i for i in ids_of([node.chunk]) if i.state_type in node.stored.tiers]
        restore = wait(begin(store, wanted))
        assert not restore.failed
        assert intact(store, restore)
        count += len(restore.offsets)
        restore.release()
    return count


def test_a_long_chain_with_one_checkpoint_takes_nearly_all_of_it(bench: Bench) -> None:
    store, chunks = opened(bench), chain("long", 26)
    for at in range(0, 26, 2):
        sizes = SIZES if at == 24 else {DENSE: SIZES[DENSE]}
        put(store, chunks[at : at + 1], {DENSE: SIZES[DENSE]})
        put(store, chunks[at + 1 : at + 2], sizes)
        assert store.flush(60)
    assert used(store) == (26, 1)
    store = restarted(bench, store)
    assert stored(store, chunks) == 26
    assert serve_all(store) == 27
    store.close()


def test_a_change_of_traffic_moves_the_space_and_restarts_find_it(bench: Bench) -> None:
    store = opened(bench)
    for number in range(3):
        for i in range(12):
            put(store, chain(f"long {number} {i}", 4), {DENSE: SIZES[DENSE]})
            assert store.flush(60)
        dense, _ = used(store)
        assert dense >= 22
        store = restarted(bench, store)
        assert used(store) == (dense, used(store)[1])
        assert serve_all(store) == sum(used(store))
        for i in range(40):
            put(store, chain(f"short {number} {i}", 1))
            assert store.flush(60)
        dense, windows = used(store)
        assert windows >= 12
        # The journal keeps no checkpoint whose chunk has left the SSD and was in DRAM only.
        nodes = store.catalog.tiers.index.nodes.values()
        kept = sum(all(a.ssd for a in n.artifacts.values()) for n in nodes if WINDOW in n.artifacts)
        store = restarted(bench, store)
        assert used(store) == (dense, kept)
        assert windows - 2 <= kept <= windows
        assert serve_all(store) == dense + kept
    store.close()


def test_a_checkpoint_is_not_written_without_its_chunk(bench: Bench) -> None:
    """All dense state there is in use, so a new chunk's has no slot; its checkpoint has one."""
    store = opened(bench)
    chunks = chain("used", 26)
    put(store, chunks[:20], {DENSE: SIZES[DENSE]})
    assert store.flush(60)
    store.leave_to_ssd()
    put(store, chunks[20:], {DENSE: SIZES[DENSE]})
    assert store.flush(60)
    dense, _ = used(store)
    held = begin(store, ids_of(chunks[:dense], [DENSE]))
    before = used(store)
    with store.catalog.locked():
        pool = store.catalog.tiers.ssd
        assert pool is not None
        while pool.take(DENSE) is not None:
            pass
    put(store, chain("new", 1))
    assert store.flush(60)
    assert used(store)[1] == before[1]
    assert bench.counts("heterocache_failures")["cause=no_slot,tier=ssd"] == 2
    held.release()
    store.close()


def row(number: int, kind: str, slot: int) -> RowValues:
    state_type = {"dense": DENSE, "window": WINDOW}[kind]
    key, parent = number.to_bytes(16, "little"), bytes(16)
    return key, parent, 0, CHUNK, state_type, slot, 1, 3_000, bytes(16), float(number), 0


@pytest.mark.parametrize(
    ("second", "is_refused"),
    [
        (row(2, "dense", 1), True),
        (row(2, "dense", 2), False),
        (row(2, "window", 1), True),
        (row(2, "window", 3), True),
        (row(2, "window", 4), False),
        (row(2, "window", 0), False),
        (row(2, "dense", 9), True),
    ],
    ids=["same slot", "next zone", "zone's first", "zone's last", "next zone's", "own", "beyond"],
)
def test_a_row_of_bytes_that_are_another_s_is_refused(second: RowValues, is_refused: bool) -> None:
    """The first one has the first zone."""
    tiers = Tiers(CHUNK, CUT, CUT, Recorder())
    extra = [row(2, "dense", 8)] if second[4] is WINDOW else []
    refused = adopt_rows([row(1, "dense", 1), *extra, second], tiers)
    assert [i.state_type for i in refused] == [second[4]] * is_refused
    tiers.check_integrity()


def test_adopted_slots_and_new_ones_never_overlap() -> None:
    pool = SlotPool(Tier.SSD, CUT)
    assert pool.adopt(SlotRef(Tier.SSD, WINDOW, 5, 7))
    assert not pool.adopt(SlotRef(Tier.SSD, DENSE, 2, 1)), "the zone is the windows'"
    assert pool.adopt(SlotRef(Tier.SSD, DENSE, 8, 1))
    spans = [(pool.offset(ref), SLOTS[ref.state_type]) for ref in [SlotRef(Tier.SSD, WINDOW, 5, 7)]]
    for kind in (DENSE, WINDOW):
        while (ref := pool.take(kind)) is not None:
            spans.append((pool.offset(ref), SLOTS[kind]))
    spans.sort()
    assert all(at + size <= after for (at, size), (after, _) in itertools.pairwise(spans))
    pool.release(SlotRef(Tier.SSD, WINDOW, 5, 7))
    assert pool.take(WINDOW) == SlotRef(Tier.SSD, WINDOW, 5, 8)
    pool.check_integrity()
