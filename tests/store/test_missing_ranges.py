"""Artifacts of this engine that continue another engine's chain: written, found and evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, ChunkRange, Tier
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog import writes
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd.space import model_directory
from hetero_connector.tools.inspection import inspect_model
from hetero_connector.tools.verification import verify_model
from tests.clock import Clock
from tests.store.filling import (
    DENSE,
    FINGERPRINT,
    SIZES,
    WINDOW,
    Bench,
    Disk,
    assert_restored,
    begin,
    chain,
    ids_of,
    put,
    room_for,
    stored,
)
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

EPOCH = 9
THEIRS = chain("preamble", 3)
OURS = chain("ours", 3, THEIRS[-1])
CHAIN = [*THEIRS, *OURS]


class Engines:
    """One engine of a fleet, opened again and again over one directory."""

    def __init__(self, root: Path) -> None:
        self.clock = Clock()
        self.bench = Bench(root, Disk(), self.clock)

    def open(self, **given: object) -> ArtifactStore:
        network = MemoryNetwork()
        peers = PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions))
        store = self.bench.open(peers=peers, **given)  # type: ignore[arg-type]
        assert store.sharing is not None
        store.sharing.serve_under(EPOCH)
        return store


@pytest.fixture
def engines(tmp_path: Path) -> Engines:
    return Engines(tmp_path / "ssd")


@pytest.fixture
def store(engines: Engines) -> Iterator[ArtifactStore]:
    opened = engines.open(dram_chunks=8)
    yield opened
    opened.close()
    opened.check_integrity()


def judge(store: ArtifactStore, ours: Sequence[ChunkRange], theirs: Sequence[ChunkRange]) -> None:
    assert store.sharing is not None
    store.sharing.resolve_claims(dict.fromkeys(ids_of(ours), 4), ids_of(theirs))


def hold(store: ArtifactStore, ours: Sequence[ChunkRange] = OURS) -> None:
    """Have the preamble as a replica and `ours` behind it, what is ours on SSD."""
    put(store, [*THEIRS, *ours])
    judge(store, ours, THEIRS)
    assert store.flush(60)
    assert on_ssd(store) == set(ids_of(ours))


def on_ssd(store: ArtifactStore) -> set[ArtifactId]:
    with store.catalog.locked():
        return {a.id for a in store.catalog.tiers.index.artifacts() if a.ssd is not None}


def held(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> list[bool]:
    return [bool(x.tiers) for x in store.holdings(chunks)]


def test_what_continues_a_replica_is_written_and_comes_back_without_it(
    engines: Engines, store: ArtifactStore
) -> None:
    hold(store)
    store.close()
    again = engines.open()
    again.check_integrity()
    assert stored(again, CHAIN) == 0
    assert held(again, CHAIN) == [False] * 3 + [True] * 3
    assert_restored(again, OURS)
    put(again, THEIRS)
    assert stored(again, CHAIN) == 6
    again.close()
    again.check_integrity()


def test_with_a_write_budget_too(engines: Engines) -> None:
    store = engines.open(ssd_write_bytes_per_day=1 << 30)
    hold(store)
    store.close()


def test_tools_accept_a_directory_with_missing_ranges(
    engines: Engines, store: ArtifactStore, tmp_path: Path
) -> None:
    real = Bench(tmp_path / "real").open(
        peers=PeerAccess(KnownPeers(), lambda regions: MemoryPeers(MemoryNetwork(), regions))
    )
    assert real.sharing is not None
    real.sharing.serve_under(EPOCH)
    hold(real)
    real.close()
    folder = model_directory(tmp_path / "real", FINGERPRINT)
    report = verify_model(folder)
    assert (report.artifacts, report.bad) == (len(ids_of(OURS)), [])
    told = inspect_model(folder)
    assert (told.artifacts, told.chains) == (len(ids_of(OURS)), 1)
    assert told.tokens == OURS[-1].end - OURS[0].start


def test_replicas_leave_a_full_dram_and_what_rests_on_them_stays(engines: Engines) -> None:
    store = engines.open(dram_chunks=room_for(9, 7))
    hold(store)
    store.leave_to_ssd()
    others = chain("others", 9)
    put(store, others[:7])
    put(store, others[7:], {DENSE: SIZES[DENSE]})
    assert stored(store, others) == 9, "no replica is kept in place"
    assert held(store, CHAIN) == [False] * 3 + [True] * 3
    assert on_ssd(store) >= set(ids_of(OURS))
    store.check_integrity()
    store.close()


def test_an_expired_replica_leaves_before_all_else_though_something_on_ssd_rests_on_it(
    engines: Engines,
) -> None:
    store = engines.open(dram_chunks=8, replica_ttl_s=60.0)
    hold(store)
    store.leave_to_ssd()
    put(store, chain("older", 2))
    judge(store, chain("older", 2), ())
    begin(store, ids_of(THEIRS)).release()  # used last
    engines.clock.passes(60.0)
    until(lambda: store.catalog.replicas.look_s > engines.clock())
    put(store, chain("new", 6))
    assert stored(store, chain("older", 2)) == 2
    assert held(store, CHAIN) == [False] * 3 + [True] * 3
    store.close()


def test_a_replica_stays_while_what_rests_on_it_is_in_dram_alone(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, [*THEIRS, *OURS])
    judge(store, (), THEIRS)  # nobody has said whose the rest is: it is not written yet
    put(store, chain("others", 2))
    put(store, chain("more", 3))
    index = store.catalog.tiers.index
    for chunk in CHAIN:
        below = [c for c in CHAIN if c.parent == chunk.key and c.key in index.nodes]
        assert chunk.key in index.nodes or not below
    assert index.num_missing == 0


def test_an_unreachable_artifact_ages_as_any_other(engines: Engines) -> None:
    store = engines.open(ssd_chunks=6)
    hold(store)
    store.close()
    store = engines.open(ssd_chunks=6)  # the preamble is gone for ever
    for name in "abc":
        put(store, chain(name, 2))
        judge(store, chain(name, 2), ())
        assert store.flush(60)
    assert held(store, CHAIN) in ([], [False] * 6), "the oldest on SSD"
    assert store.catalog.tiers.index.num_missing == 0
    assert all(stored(store, chain(name, 2)) == 2 for name in "abc")
    store.close()


def test_a_dead_owners_chunks_become_ours_above_what_is_ours(store: ArtifactStore) -> None:
    hold(store)
    judge(store, CHAIN, ())
    until(lambda: on_ssd(store) == set(ids_of(CHAIN)))
    store.leave_to_ssd()
    assert stored(store, CHAIN) == 6


def test_they_are_written_in_whatever_order_the_fleet_names_them(store: ArtifactStore) -> None:
    hold(store)
    judge(store, THEIRS[::-1], ())
    until(lambda: on_ssd(store) == set(ids_of(CHAIN)))


@pytest.mark.parametrize("batch_bytes", [1, 1 << 20])
@pytest.mark.parametrize("budget_bytes", [None, 1 << 30])
def test_what_is_queued_waits_for_what_it_continues_to_become_ours(
    engines: Engines, batch_bytes: int, budget_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued first: its parent was another's then. In batches of one chunk, and in one."""
    monkeypatch.setattr(writes, "_BATCH_BYTES", batch_bytes)
    store = engines.open(spill_delay_s=1.0, ssd_write_bytes_per_day=budget_bytes)
    put(store, THEIRS)
    judge(store, (), THEIRS)
    engines.clock.passes(2.0)
    until(lambda: not store.catalog.writes)
    put(store, OURS)
    judge(store, OURS, ())
    judge(store, THEIRS, ())
    engines.clock.passes(2.0)
    assert store.flush(60)
    assert on_ssd(store) == set(ids_of(CHAIN))
    store.close()


def test_a_checkpoint_of_our_own_on_anothers_chunk_stays_while_something_continues_it(
    engines: Engines, store: ArtifactStore
) -> None:
    put(store, THEIRS, {DENSE: SIZES[DENSE]})
    put(store, THEIRS[-1:], {WINDOW: SIZES[WINDOW]})
    put(store, OURS)
    checkpoint = ArtifactId(THEIRS[-1].key, WINDOW)
    assert store.sharing is not None
    store.sharing.resolve_claims(
        dict.fromkeys([checkpoint, *ids_of(OURS)], 4), [ArtifactId(c.key, DENSE) for c in THEIRS]
    )
    assert store.flush(60)
    assert on_ssd(store) == {checkpoint, *ids_of(OURS)}
    store.close()
    again = engines.open()
    told = again.holdings(CHAIN)
    assert [dict(x.tiers) for x in told[:3]] == [{}, {}, {WINDOW: Tier.SSD}]
    again.close()


def test_an_expected_session_is_staged_from_after_its_missing_range(
    engines: Engines, store: ArtifactStore
) -> None:
    hold(store)
    store.close()
    again = engines.open()
    now_s = engines.clock()
    leaves = tuple(c.key for c in reversed(CHAIN))
    again.expect(ExpectedReturn("s", leaves, now_s, now_s + 60.0, 1.0))

    def staged() -> bool:
        tiers = [dict(x.tiers) for x in again.holdings(CHAIN)]
        return [x.get(DENSE) for x in tiers[3:]] == [Tier.DRAM] * 3

    until(staged)
    again.close()
