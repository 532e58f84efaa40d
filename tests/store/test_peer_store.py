"""Stores that read each other's DRAM, on a network within the process: every way it can end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier
from hetero_connector.errors import PeerError, StoreError
from hetero_connector.metrics import COUNTERS, Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, StoreConfig, Wanted
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.peers.card import PeerCard
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.peers.slot_table import SlotTable, table_bytes
from hetero_connector.transfer.peer_base import PeerExtent
from hetero_connector.transfer.shared_memory import SharedMemory
from tests.clock import Clock
from tests.store.filling import (
    CHUNK,
    CHUNK_BYTES,
    DENSE,
    FINGERPRINT,
    SIZES,
    WINDOW,
    Bench,
    begin,
    chain,
    ids_of,
    intact,
    put,
    stored,
    wait,
)
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

CHUNKS = chain("a", 4)
OWNER = 7


class Fleet:
    """Stores on one network, and what a directory would know of them."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.peers = KnownPeers()
        self.recorders: dict[ArtifactStore, Recorder] = {}

    def open(self, epoch: int, dram_chunks: int = 8, **config: object) -> ArtifactStore:
        recorder = Recorder()
        store = ArtifactStore.open(
            SIZES,
            StoreConfig(dram_chunks * CHUNK_BYTES, spill_delay_s=0.0, **config),  # type: ignore[arg-type]
            recorder,
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            peers=PeerAccess(self.peers, lambda regions: MemoryPeers(self.network, regions)),
        )
        assert store.sharing is not None
        self.peers.cards[epoch] = store.sharing.card
        store.sharing.serve_under(epoch)
        self.recorders[store] = recorder
        return store

    def failures(self, store: ArtifactStore) -> dict[str, float]:
        payload = self.recorders[store].drain() or {}
        name = "heterocache_failures{"
        return {
            key[len(name) : -1]: n
            for key, n in payload.get(COUNTERS, {}).items()
            if key.startswith(name)
        }


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.network.stopped.clear()
    for store in made.recorders:
        store.close()
        store.check_integrity()


@pytest.fixture
def owner(fleet: Fleet) -> ArtifactStore:
    store = fleet.open(OWNER)
    put(store, CHUNKS)
    return store


@pytest.fixture
def reader(fleet: Fleet) -> ArtifactStore:
    return fleet.open(8, dram_chunks=6, peer_deadline_s=0.2)


def exports(store: ArtifactStore, count: int, holder: int = OWNER) -> dict[ArtifactId, PeerCopy]:
    """Return the directory's answer: the copies of the next `count` artifacts exported."""
    copies: dict[ArtifactId, PeerCopy] = {}

    def take() -> bool:
        for change in store.sharing.take_exports():
            if change.copy is not None:
                copies[ArtifactId(change.chunk.key, change.state_type)] = PeerCopy(
                    holder,
                    change.copy.dram_offset,
                    change.copy.generation,
                    change.copy.size_bytes,
                    change.copy.checksum,
                )
        return len(copies) >= count

    until(take)
    return copies


def fetch(store: ArtifactStore, copies: Mapping[ArtifactId, PeerCopy]) -> Restore:
    """Restore CHUNKS, of which the store itself may know nothing."""
    found = store.match(CHUNKS)
    remote = [StoredChunk(c, dict.fromkeys(SIZES, Tier.PEER)) for c in CHUNKS[len(found) :]]
    return store.begin_restore([Wanted(kind, [*found, *remote]) for kind in SIZES], copies)


def test_an_owners_chain_is_read_verified_and_then_stored_here(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    assert set(copies) == set(ids_of(CHUNKS))
    assert reader.match(CHUNKS) == []
    restore = wait(fetch(reader, copies))
    assert not restore.failed
    assert len(restore.offsets) == 8
    assert intact(reader, restore)
    restore.release()
    assert [x.tiers for x in reader.match(CHUNKS)] == [dict.fromkeys(SIZES, Tier.DRAM)] * 4
    again = begin(reader, ids_of(CHUNKS))
    assert again.poll()
    assert intact(reader, again)
    again.release()
    payload = fleet.recorders[reader].drain()
    assert payload is not None
    counters = payload[COUNTERS]
    read = {k: v for k, v in counters.items() if k.startswith("heterocache_read_bytes")}
    assert read["heterocache_read_bytes{state_type=dense_kv,tier=peer}"] == 4 * SIZES[DENSE]
    assert read["heterocache_read_bytes{state_type=window_swa,tier=peer}"] == 4 * SIZES[WINDOW]
    timings = reader.take_timings()
    assert {t.tier for t in timings} == {Tier.PEER}
    assert sum(sum(t.bytes_by_type.values()) for t in timings) == 4 * sum(SIZES.values())
    assert reader.reading_bytes == {}


def test_what_is_here_already_is_not_read_again(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    put(reader, CHUNKS[:2])
    restore = wait(fetch(reader, copies))
    assert not restore.failed
    assert intact(reader, restore)
    restore.release()
    assert sum(sum(t.bytes_by_type.values()) for t in reader.take_timings()) == 2 * sum(
        SIZES.values()
    )


def test_two_restores_share_one_read(fleet: Fleet, owner: ArtifactStore) -> None:
    reader = fleet.open(9, peer_deadline_s=60.0)
    copies = exports(owner, 8)
    fleet.network.stopped.add(PeerCard.decode(fleet.peers.cards[OWNER]).agent)
    first, second = fetch(reader, copies), fetch(reader, copies)
    assert not first.poll()
    fleet.network.stopped.clear()
    wait(first)
    wait(second)
    assert first.offsets == second.offsets
    assert intact(reader, first)
    first.release()
    second.release()
    assert sum(sum(t.bytes_by_type.values()) for t in reader.take_timings()) == 4 * sum(
        SIZES.values()
    )


def test_a_replica_is_told_as_one_and_leaves_as_one(fleet: Fleet, owner: ArtifactStore) -> None:
    small = fleet.open(9, dram_chunks=4)
    restore = wait(fetch(small, exports(owner, 8)))
    restore.release()
    told = {(c.chunk.key, c.state_type): c for c in small.sharing.take_exports()}
    assert len(told) == 8
    assert all(c.copy is not None and not c.token for c in told.values()), "another owns them"
    other = chain("b", 4)
    put(small, other)
    gone = {c.chunk.key for c in small.sharing.take_exports() if c.copy is None}
    assert gone == {c.key for c in CHUNKS}


def fails(
    fleet: Fleet, reader: ArtifactStore, copies: Mapping[ArtifactId, PeerCopy], cause: Failure
) -> None:
    """Nothing arrives, all for that cause; nothing is left behind, and a save can take over."""
    restore = wait(fetch(reader, copies))
    assert set(restore.failed.values()) == {cause}
    assert restore.offsets == {}
    restore.release()
    assert reader.match(CHUNKS) == []
    assert sum(n for k, n in fleet.failures(reader).items() if f"cause={cause.value}" in k) == 8
    put(reader, CHUNKS)
    assert stored(reader, CHUNKS) == 4
    restore = wait(begin(reader, ids_of(CHUNKS)))
    assert intact(reader, restore)
    restore.release()
    reader.check_integrity()


Change = Callable[[Fleet, ArtifactStore, dict[ArtifactId, PeerCopy]], object]


def reuse(fleet: Fleet, owner: ArtifactStore, copies: object) -> None:
    """Other artifacts take every slot."""
    put(owner, chain("b", 8))


def every(**fields: object) -> Change:
    def change(fleet: Fleet, owner: ArtifactStore, copies: dict[ArtifactId, PeerCopy]) -> None:
        for key, copy in copies.items():
            copies[key] = copy._replace(**fields)  # type: ignore[arg-type]

    return change


def die(fleet: Fleet, owner: ArtifactStore, copies: object) -> None:
    fleet.network.kill(PeerCard.decode(fleet.peers.cards[OWNER]).agent)


CHANGES: list[tuple[Failure, Change]] = [
    (Failure.REUSED, reuse),
    (Failure.REUSED, every(generation=99)),
    (Failure.CHECKSUM, every(checksum=bytes(16))),
    (Failure.CHECKSUM, every(size_bytes=100)),
    (Failure.FENCED, lambda fleet, owner, copies: owner.sharing.serve_under(0)),
    (Failure.FENCED, lambda fleet, owner, copies: owner.sharing.serve_under(OWNER + 1)),
    (Failure.FENCED, lambda fleet, owner, copies: fleet.peers.fenced.update(copies)),
    (Failure.UNREACHABLE, lambda fleet, owner, copies: fleet.peers.cards.pop(OWNER)),
    (Failure.UNREACHABLE, lambda fleet, owner, copies: fleet.peers.cards.update({OWNER: b"x"})),
    (Failure.IO_ERROR, die),
    (Failure.BAD_RECORD, every(dram_offset=1)),
    (Failure.BAD_RECORD, every(dram_offset=-4_096)),
    (Failure.BAD_RECORD, every(dram_offset=1 << 62)),
    (Failure.BAD_RECORD, every(size_bytes=0)),
    (Failure.BAD_RECORD, every(size_bytes=1 << 40)),
    (Failure.BAD_RECORD, every(size_bytes=-1)),
]


@pytest.mark.parametrize(("cause", "change"), CHANGES)
def test_whatever_is_wrong_is_a_counted_miss(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore, cause: Failure, change: Change
) -> None:
    copies = exports(owner, 8)
    change(fleet, owner, copies)
    fails(fleet, reader, copies, cause)


def test_a_record_of_another_artifact_of_the_same_owner_does_not_verify(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    ids = ids_of(CHUNKS, [DENSE])
    swapped = {**copies, ids[0]: copies[ids[1]], ids[1]: copies[ids[0]]}
    restore = wait(fetch(reader, swapped))
    assert restore.failed == {ids[0]: Failure.CHECKSUM, ids[1]: Failure.CHECKSUM}
    assert intact(reader, restore)
    restore.release()


def test_a_checkpoint_whose_chunk_did_not_arrive_is_not_kept(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    bad = ArtifactId(CHUNKS[3].key, DENSE)
    copies[bad] = copies[bad]._replace(checksum=bytes(16))
    restore = wait(fetch(reader, copies))
    assert restore.failed == {bad: Failure.CHECKSUM}
    restore.release()
    assert stored(reader, CHUNKS) == 3
    reader.check_integrity()


def test_without_a_copy_it_is_gone(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    fails(fleet, reader, {}, Failure.GONE)


def test_a_slot_rewritten_while_it_is_read_is_never_accepted(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    """The owner changes bytes between any two extents of a read: torn, or reused, or whole."""
    copies = exports(owner, 8)
    rng = np.random.default_rng(0)

    def tear(source: bytes, extent: PeerExtent) -> None:
        if extent.remote_region == 0 and rng.random() < 0.5:
            owner.arena.view[extent.remote_offset + int(rng.integers(extent.size))] ^= 0x40

    fleet.network.before_read = tear
    restore = wait(fetch(reader, copies))
    assert set(restore.failed.values()) <= {Failure.CHECKSUM}
    assert restore.failed, "nothing was torn: the test shows nothing"
    assert intact(reader, restore)
    restore.release()


def test_a_peer_that_stops_costs_one_deadline_and_its_slots_stay_in_quarantine(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    agent = PeerCard.decode(fleet.peers.cards[OWNER]).agent
    fleet.network.stopped.add(agent)
    pools = reader.catalog.tiers.dram
    restore = wait(fetch(reader, copies))
    assert set(restore.failed.values()) == {Failure.DEADLINE}
    restore.release()
    assert sum(pools.num_used(kind) for kind in SIZES) == 8, "a late read may still fill them"
    assert set(reader.catalog.loads.waiting_bytes.values()) == {0}, "nobody waits for it"
    at_once = fetch(reader, copies)
    wait(at_once)
    assert at_once.offsets == {}
    assert Failure.UNREACHABLE in at_once.failed.values(), "the peer is left alone"
    assert Failure.DEADLINE not in at_once.failed.values()
    at_once.release()
    # The rest of the tier goes on, and no slot that the late read knows is handed out.
    mine = chain("b", 2)
    put(reader, mine)
    fleet.network.stopped.discard(agent)
    until(lambda: sum(pools.num_used(kind) for kind in SIZES) == 4)
    check = wait(begin(reader, ids_of(mine)))
    assert intact(reader, check), "the late bytes went into a slot that was reused"
    check.release()
    assert reader.match(CHUNKS) == []
    assert set(reader.catalog.loads.waiting_bytes.values()) == {0}


def test_a_late_peer_does_not_keep_the_engine_from_ending(
    fleet: Fleet, owner: ArtifactStore
) -> None:
    reader = fleet.open(9, peer_deadline_s=0.05)
    fleet.network.stopped.add(PeerCard.decode(fleet.peers.cards[OWNER]).agent)
    restore = wait(fetch(reader, exports(owner, 8)))
    restore.release()
    arena = reader.arena
    reader.close(5)
    assert arena.view is not None, "memory that a late read may fill was unmapped"


def test_the_peer_process_has_time_to_unmap_the_memory(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[float] = []
    monkeypatch.setattr(MemoryPeers, "close", lambda _, timeout_s: closed.append(timeout_s) or True)
    fleet.open(9).close(0.1)
    assert closed == [5.0]


def test_a_reset_while_reading_ends_harmlessly(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    agent = PeerCard.decode(fleet.peers.cards[OWNER]).agent
    fleet.network.stopped.add(agent)
    restore = fetch(reader, exports(owner, 8))
    reader.reset()
    assert restore.poll()
    assert set(restore.failed.values()) == {Failure.GONE}
    fleet.network.stopped.discard(agent)
    restore.release()
    until(lambda: sum(reader.catalog.tiers.dram.num_used(kind) for kind in SIZES) == 0)
    assert reader.match(CHUNKS) == []


def test_a_replica_is_not_written_to_ssd_and_neither_is_what_continues_it(
    fleet: Fleet, owner: ArtifactStore, tmp_path: Path
) -> None:
    reader = fleet.open(9, ssd_dir=tmp_path, ssd_bytes=32 * CHUNK_BYTES)
    restore = wait(fetch(reader, exports(owner, 8)))
    assert not restore.failed
    restore.release()
    put(reader, chain("more", 2, CHUNKS[-1]))
    put(reader, chain("own", 2))
    assert reader.flush(60)
    reader.leave_to_ssd()
    assert {x.tiers[DENSE] for x in reader.match(CHUNKS)} == {Tier.DRAM}
    assert {x.tiers[DENSE] for x in reader.match(chain("own", 2))} == {Tier.SSD}
    assert fleet.failures(reader) == {}


def test_an_engine_that_peers_cannot_read_does_not_start() -> None:
    """It would claim state that the other engines cannot use, and they would compute it."""

    def missing(regions: object) -> MemoryPeers:
        raise StoreError("nixl cannot be imported: pip install it")

    with pytest.raises(StoreError, match=r"cannot join the fleet.*pip install it"):
        ArtifactStore.open(
            SIZES,
            StoreConfig(8 * CHUNK_BYTES),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
            peers=PeerAccess(KnownPeers(), missing),
        )


def test_a_slot_whose_bytes_another_type_has_is_known_by_its_generation(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    copies = exports(owner, 8)
    put(owner, chain("b", 10), {DENSE: SIZES[DENSE]})
    pool = owner.catalog.tiers.dram
    assert pool.num_used(DENSE) == 10, "every zone has dense state now"
    restore = wait(fetch(reader, copies))
    windows = ids_of(CHUNKS[2:], [WINDOW])  # two others are where dense state does not fit
    assert [restore.failed[x] for x in windows] == [Failure.REUSED] * 2
    restore.release()


GEOMETRY = SlotGeometry(5, {DENSE: 12_288, WINDOW: 4_096})
ZONES = SlotGeometry(1, {DENSE: 12_288, WINDOW: 4_096}, 12_288, 40_960)


def test_a_card_finds_a_slot_by_its_place() -> None:
    card = PeerCard(ZONES, b"agent")
    for kind, stride in ZONES.stride_bytes.items():
        for slot in range(ZONES.num_slots(kind)):
            copy = PeerCopy(OWNER, ZONES.offset(kind, slot), 1, stride, b"")
            assert card.slot_of(kind, copy) == slot
            for wrong in (copy._replace(size_bytes=stride + 1), copy._replace(size_bytes=0)):
                with pytest.raises(PeerError):
                    card.slot_of(kind, wrong)
        for at in (-4_096, 2_048, ZONES.size_bytes, 1 << 62):
            with pytest.raises(PeerError):
                card.slot_of(kind, PeerCopy(OWNER, at, 1, stride, b""))


@pytest.mark.parametrize("geometry", [GEOMETRY, ZONES])
def test_a_card_comes_back_as_it_was_and_nothing_else_is_one(geometry: SlotGeometry) -> None:
    card = PeerCard(geometry, b"agent")
    data = card.encode()
    assert PeerCard.decode(data) == card
    hostile = [b"", data[:5], data[:-5], b"XXXX" + data[4:], data[:4] + b"\1" + data[5:]]
    hostile += [PeerCard(SlotGeometry(n, {DENSE: 4_096}), b"a").encode() for n in (0, 1 << 60)]
    hostile += [PeerCard(SlotGeometry(1, {DENSE: n}), b"a").encode() for n in (0, 4_095)]
    strides = {DENSE: 12_288, WINDOW: 4_096}
    zones = [(0, 40_960), (8_192, 40_960), (12_289, 40_960), (12_288, 40_961), (12_288, 1 << 60)]
    hostile += [PeerCard(SlotGeometry(1, strides, *cut), b"a").encode() for cut in zones]
    for wrong in hostile:
        with pytest.raises(PeerError):
            PeerCard.decode(wrong)


def test_the_table_keeps_words_apart() -> None:
    table = SlotTable(GEOMETRY)
    words_seen_by_peers = table.shared.view.view(np.uint64)
    assert len(table.shared.view) == table_bytes(GEOMETRY)
    table.serve_under(2**63)
    for kind in (DENSE, WINDOW):
        words = table.generations(kind)
        assert len(words) == 5
        for slot in range(5):
            words[slot] = 10 * kind.position + slot
    assert words_seen_by_peers[0] == 2**63
    assert [table.generations(DENSE)[i] for i in range(5)] == [
        10 * DENSE.position + i for i in range(5)
    ]


def test_chunks_that_hang_on_nothing_are_not_read(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    """A copy of a later chunk alone: nobody could reach it."""
    copies = exports(owner, 8)
    late = [StoredChunk(CHUNKS[2], {DENSE: Tier.PEER})]
    restore = wait(reader.begin_restore([Wanted(DENSE, late)], copies))
    assert restore.failed == {ArtifactId(CHUNKS[2].key, DENSE): Failure.GONE}
    restore.release()


@pytest.mark.parametrize("who", ["owner", "reader"])
def test_what_was_stored_before_a_reset_is_not_read_after_it(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore, who: str
) -> None:
    """Neither from a peer that was not reset, nor by one, though keys were the same."""
    copies = exports(owner, 8)
    assert (reader if who == "reader" else owner).reset()
    restore = wait(fetch(reader, copies))
    assert len(restore.failed) == 8
    restore.release()
    assert fleet.failures(reader) == {"cause=fenced,tier=peer": 8}
    assert reader.match(CHUNKS) == []


def test_stores_that_follow_the_fleets_reset_read_from_each_other_again(
    fleet: Fleet, owner: ArtifactStore, reader: ArtifactStore
) -> None:
    exports(owner, 8)
    for store in (owner, reader):
        store._generations.note_fleet(5, store.generation)
        assert store.catch_up().fleet == 5
    put(owner, CHUNKS)
    restore = wait(fetch(reader, exports(owner, 8)))
    assert not restore.failed
    assert intact(reader, restore)
    restore.release()


def test_when_what_moves_the_bytes_ends_it_is_counted_and_its_next_life_is_told() -> None:
    told: list[bytes] = []
    clock, network = Clock(), MemoryNetwork()
    bench, transfers = Bench(None, clock=clock), list[MemoryPeers]()

    def opened(regions: Sequence[SharedMemory]) -> MemoryPeers:
        transfers.append(MemoryPeers(network, regions))
        return transfers[0]

    def changed() -> None:
        assert store.sharing is not None
        told.append(store.sharing.card)

    store = bench.open(peers=PeerAccess(KnownPeers(), opened, changed))
    assert store.sharing is not None
    before = store.sharing.card
    transfers[0].restart()
    clock.passes(1.0)
    until(lambda: bool(told))
    assert store.sharing.card == told[-1]
    assert told[-1] != before
    assert bench.counts("heterocache_peer_process_exits") == {"": 1.0}
    store.close()
