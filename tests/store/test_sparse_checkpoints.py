"""Stores of which most chunks have no checkpoint: a full tier must still make room."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, Tier
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.peers.ports import PeerAccess
from tests.store.filling import DENSE, SIZES, WINDOW, Bench, Disk, chain, ids_of, put
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers

BARE = {DENSE: SIZES[DENSE]}


def fleet() -> PeerAccess:
    network = MemoryNetwork()
    return PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions))


def turn(store: ArtifactStore, chunks: list[ChunkRange]) -> None:
    """Only the last chunk gets a checkpoint."""
    put(store, chunks[:-1], BARE)
    put(store, chunks[-1:])


@pytest.mark.parametrize("eviction", ["leaf_lru", "value"])
def test_a_full_dram_tier_goes_on_taking_new_sessions(eviction: str) -> None:
    store = Bench(None).open(dram_chunks=8, eviction=eviction)
    for number in range(10):
        chunks = chain(f"s{number}", 4)
        turn(store, chunks)
        assert len(store.match(chunks)) == 4
        store.check_integrity()
    assert store.match(chain("s0", 4)) == [], "the oldest made room"
    store.close()


@pytest.mark.parametrize("is_fleet", [False, True], ids=["alone", "fleet"])
@pytest.mark.parametrize("eviction", ["leaf_lru", "value"])
def test_a_full_ssd_tier_goes_on_taking_new_sessions(
    eviction: str, tmp_path: Path, is_fleet: bool
) -> None:
    bench = Bench(tmp_path / "ssd", Disk())
    peers = fleet() if is_fleet else None
    store = bench.open(dram_chunks=8, ssd_chunks=12, eviction=eviction, peers=peers)
    for number in range(10):
        turn(store, chain(f"s{number}", 4))
        assert store.flush(60)
        store.check_integrity()
    store.close()
    peers = fleet() if is_fleet else None
    store = bench.open(dram_chunks=8, ssd_chunks=12, eviction=eviction, peers=peers)
    last = store.match(chain("s9", 4))
    assert len(last) == 4
    assert set(last[-1].tiers) == set(SIZES)
    store.check_integrity()
    store.close()


def test_in_a_fleet_a_checkpoint_stays_without_the_peers_chunks_until_its_turn_comes(
    tmp_path: Path,
) -> None:
    """At the peer who owns the chunks there is no checkpoint as deep."""
    bench, chunks = Bench(tmp_path / "ssd", Disk()), chain("theirs", 3)
    store = bench.open(dram_chunks=5, ssd_chunks=8, peers=fleet(), run_io=False)
    turn(store, chunks)
    assert store.sharing is not None
    assert store.io_thread is not None
    checkpoint = ArtifactId(chunks[-1].key, WINDOW)
    store.sharing.resolve_claims({checkpoint: 4}, ids_of(chunks, [DENSE]))
    store.io_thread.start()
    assert store.flush(60)

    def found(store: ArtifactStore) -> list[dict[object, Tier]]:
        return [dict(x.tiers) for x in store.holdings(chunks)]

    store.leave_to_ssd()
    for number in range(2):
        put(store, chain(f"ours{number}", 4), BARE)
    assert found(store) == [{}, {}, {WINDOW: Tier.SSD}]
    store.close()
    store = bench.open(dram_chunks=5, ssd_chunks=8, peers=fleet())
    assert found(store) == [{}, {}, {WINDOW: Tier.SSD}]
    for number in range(4):
        turn(store, chain(f"new{number}", 4))
        assert store.flush(60)
        store.check_integrity()
    assert found(store) == []
    assert store.catalog.tiers.index.num_missing == 0
    store.close()
