"""A store and its fleet's word: what is written to SSD, and what the fleet is told."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import StoreConfig
from hetero_connector.store.catalog import writes
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.peers.sharing import Sharing
from tests.store.filling import CHUNK, CHUNK_BYTES, FINGERPRINT, SIZES, Disk, chain, ids_of, put
from tests.store.under_way import snapshot
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

CHUNKS = chain("a", 3)
EPOCH = 9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ArtifactStore]:
    opened = open_store(tmp_path)
    yield opened
    opened.close()
    opened.check_integrity()


def open_store(folder: Path | None, dram_chunks: int = 8) -> ArtifactStore:
    network = MemoryNetwork()
    return ArtifactStore.open(
        SIZES,
        StoreConfig(
            dram_chunks * CHUNK_BYTES,
            ssd_dir=folder and folder / "ssd",
            ssd_bytes=32 * CHUNK_BYTES if folder else 0,
            spill_delay_s=0.0,
        ),
        Recorder(),
        chunk_tokens=CHUNK,
        fingerprint=FINGERPRINT,
        description={"model": "test"},
        open_transfer=Disk(),
        peers=PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions)),
    )


def sharing(store: ArtifactStore) -> Sharing:
    assert store.sharing is not None
    return store.sharing


def told(store: ArtifactStore, count: int) -> dict[ArtifactId, ExportChange]:
    """The latest of each artifact, once `count` have been told."""
    latest: dict[ArtifactId, ExportChange] = {}

    def take() -> bool:
        latest.update({c.id: c for c in sharing(store).take_exports()})
        return len(latest) >= count

    until(take)
    return latest


def on_ssd(store: ArtifactStore) -> set[ArtifactId]:
    with store.catalog.locked():
        return {a.id for a in store.catalog.tiers.index.artifacts() if a.ssd is not None}


def test_what_is_ours_is_written_and_what_is_anothers_is_not(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS)
    assert all(c.copy and not c.copy.on_ssd for c in told(store, 6).values())
    ours, theirs = ids_of(CHUNKS[:2]), ids_of(CHUNKS[2:])
    assert sharing(store).resolve_claims(dict.fromkeys(ours, 4), theirs) == []
    until(lambda: on_ssd(store) == set(ours))
    written = told(store, len(ours))
    assert all(c.copy and c.copy.on_ssd and c.token == 4 for c in written.values())
    assert store.flush(60), "nothing is left to be waited for"
    assert on_ssd(store) == set(ours)


def test_nothing_is_written_before_the_fleet_has_said_whose_it_is(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 0.3)
    sharing(store).serve_under(EPOCH)
    started_s = time.monotonic()
    put(store, CHUNKS)
    until(lambda: on_ssd(store) == set(ids_of(CHUNKS)))
    assert time.monotonic() - started_s >= 0.3


def test_without_a_lease_nobody_is_waited_for(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    put(store, CHUNKS[:1])
    until(lambda: on_ssd(store) == set(ids_of(CHUNKS[:1])))
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS[1:])
    told(store, 4)
    sharing(store).serve_under(0)
    until(lambda: on_ssd(store) == set(ids_of(CHUNKS)))


def test_a_flush_waits_for_nobody(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS)
    told(store, 6)
    assert store.flush(60)
    assert on_ssd(store) == set(ids_of(CHUNKS))


def test_a_child_that_is_ours_takes_its_parents_along(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS)
    told(store, 6)
    until(lambda: len(store.catalog.writes.claims._until_s) == 6)
    assert sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS[2:]), 4), []) == []
    until(lambda: on_ssd(store) == set(ids_of(CHUNKS)))


def test_a_child_waits_for_its_parents_also_when_everything_is_to_be_written(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS)
    waiting = store.catalog.writes.claims
    until(lambda: len(waiting._until_s) == 6)
    with store.catalog.locked():
        parents_last = sorted(waiting._until_s, key=lambda a: -a.node.chunk.end)
        first = waiting.sift(parents_last, at_once=True)
        assert {a.id for a in first} == set(ids_of(CHUNKS[:1]))
        for artifact in first:
            store.catalog.writes.offer(artifact)
    assert store.flush(60)
    assert on_ssd(store) == set(ids_of(CHUNKS))


def test_a_replica_that_becomes_ours_is_written(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writes, "_CLAIM_PATIENCE_S", 3600.0)
    sharing(store).serve_under(EPOCH)
    put(store, CHUNKS)
    told(store, 6)
    assert sharing(store).resolve_claims({}, ids_of(CHUNKS)) == []
    assert store.flush(60)
    assert on_ssd(store) == set()
    assert sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS), 5), []) == []
    until(lambda: on_ssd(store) == set(ids_of(CHUNKS)))


def test_a_verdict_on_what_is_gone_is_told_back(store: ArtifactStore) -> None:
    put(store, CHUNKS)
    told(store, 6)
    store.reset()
    gone = sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS[:1]), 4), ids_of(CHUNKS[1:]))
    assert set(gone) == set(ids_of(CHUNKS))


def test_what_is_gone_is_named(store: ArtifactStore) -> None:
    put(store, CHUNKS[:2])
    assert sharing(store).find_gone(ids_of(CHUNKS)) == ids_of(CHUNKS[2:])


def test_a_restarted_engine_has_its_ssd_to_tell(tmp_path: Path) -> None:
    disk = Disk()
    for _ in range(2):
        network = MemoryNetwork()
        store = ArtifactStore.open(
            SIZES,
            StoreConfig(8 * CHUNK_BYTES, tmp_path / "ssd", 32 * CHUNK_BYTES, spill_delay_s=0.0),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={"model": "test"},
            open_transfer=disk,
            peers=PeerAccess(KnownPeers(), lambda regions, n=network: MemoryPeers(n, regions)),
        )
        known = {c.id: c.copy for batch in sharing(store).inventory() for c in batch}
        if not known:
            put(store, CHUNKS)
        store.close()
    assert set(known) == set(ids_of(CHUNKS))
    assert all(copy and copy.on_ssd and copy.dram_offset == -1 for copy in known.values())


def test_what_leaves_dram_but_stays_on_ssd_is_told_as_moved(store: ArtifactStore) -> None:
    put(store, CHUNKS)
    assert store.flush(60)
    told(store, 6)
    store.leave_to_ssd()
    moved = told(store, 6)
    assert all(c.copy and c.copy.dram_offset == -1 and c.copy.on_ssd for c in moved.values())


def test_a_reader_is_told_with_the_ends_of_each_owners_part_of_its_chain(
    store: ArtifactStore,
) -> None:
    put(store, CHUNKS)
    sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS[2:]), 4), ids_of(CHUNKS[:2]))
    store.retention.protect_chain(b"\x0a", (CHUNKS[2].key,), 1e9)
    store.retention.protect_chain(7, (CHUNKS[1].key,), 1e9)
    assert sharing(store).take_changed_users() == {
        "0a": (CHUNKS[2].key, CHUNKS[1].key),
        "7": (CHUNKS[1].key,),
    }
    assert sharing(store).take_changed_users() == {}
    store.reset()
    assert sharing(store).take_changed_users() == {"0a": (), "7": ()}


def put_summed(store: ArtifactStore, chunks: list[ChunkRange]) -> None:
    """Save whole chunks, and wait for their checksums: while one is made its artifact is pinned."""
    put(store, chunks)
    until(lambda: (now := snapshot(store.catalog)).unsummed == now.pinned == 0)


def test_what_others_read_of_ours_is_asked_when_dram_is_full_and_then_leaves_last() -> None:
    store = open_store(None, dram_chunks=6)
    put_summed(store, CHUNKS)
    sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS), 4), ())
    assert sharing(store).next_victims(9) == [], "there is room"
    put_summed(store, chain("b", 3))
    assert {CHUNKS[2].key, chain("b", 3)[2].key} <= set(sharing(store).next_victims(9))
    sharing(store).set_foreign_users({CHUNKS[2].key: True, chain("b", 3)[2].key: False}, 60.0)
    assert CHUNKS[2].key in sharing(store).next_victims(9), "or nobody would hear that they left"
    put_summed(store, chain("c", 3))
    assert len(store.match(CHUNKS)) == 3
    assert store.match(chain("b", 3)) == []
    sharing(store).set_foreign_users({CHUNKS[2].key: False}, 0.0)
    put(store, chain("d", 3))
    assert store.match(CHUNKS) == []
    store.close()


def test_what_would_leave_next_is_asked_also_when_much_is_read_elsewhere() -> None:
    store = open_store(None, dram_chunks=14)
    trunks = [chain(f"t{i}", 1)[0] for i in range(10)]
    put_summed(store, trunks)
    sharing(store).set_foreign_users(dict.fromkeys([c.key for c in trunks], True), 60.0)
    put_summed(store, chain("b", 4))
    put_summed(store, chain("c", 1))  # sets aside what is read
    assert chain("c", 1)[0].key in sharing(store).next_victims(4)
    asked = sharing(store).next_victims(4)
    assert len(asked) == 8
    assert asked[:4] == [c.key for c in trunks[:4]], "those asked longest ago"
    store.close()


@pytest.mark.parametrize("has_ssd", [True, False])
def test_the_io_thread_of_an_idle_store_rests(tmp_path: Path, has_ssd: bool) -> None:
    store = open_store(tmp_path if has_ssd else None)
    put_summed(store, CHUNKS)
    sharing(store).resolve_claims(dict.fromkeys(ids_of(CHUNKS), 4), ())
    until(lambda: not snapshot(store.catalog).writes_queued)
    assert store.catalog.writes.next_due_s == math.inf
    with patch.object(store.io_thread, "step", return_value=False) as step:
        time.sleep(0.3)
    assert step.call_count < 10
    store.close()
