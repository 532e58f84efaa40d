"""Threads may switch between any two bytecodes: no answer without the lock is wrong there."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ChunkKey, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog import (
    artifact_queue,
    catalog,
    exports,
    index,
    loads,
    restore,
    tiers,
    writes,
)
from hetero_connector.store.catalog.exports import ExportFeed
from hetero_connector.store.catalog.nodes import Artifact, Node
from tests.interleaving import at_each_step, try_every_switch
from tests.store.filling import (
    SIZES,
    Bench,
    Clock,
    Disk,
    begin,
    chain,
    forget_all,
    ids_of,
    put,
)

CHUNKS = chain("a", 6)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, disk: Disk, clock: Clock) -> ArtifactStore:
    """A store whose I/O thread's rounds are done by hand."""
    return Bench(tmp_path / "ssd", disk, clock).open(run_io=False)


def rounds(store: ArtifactStore, count: int = 40) -> None:
    """Do so many rounds of the I/O thread: a few are enough for anything."""
    for _ in range(count):
        store.run_io_round()


@pytest.mark.parametrize("is_spoiled", [False, True], ids=["intact", "spoiled"])
def test_a_restore_is_done_only_when_its_outcome_can_be_read(
    store: ArtifactStore, disk: Disk, is_spoiled: bool
) -> None:
    put(store, CHUNKS[:1])
    rounds(store)
    store.leave_to_ssd()
    disk.slabs[1][100] ^= is_spoiled
    begun = begin(store, ids_of(CHUNKS[:1]))
    outcomes: list[int] = []

    def ask() -> None:
        if begun.poll():
            outcomes.append(len(begun.offsets) + len(begun.failed))

    with at_each_step(ask, catalog, restore, loads, tiers, index):
        rounds(store)
    assert set(begun.failed.values()) == ({Failure.CHECKSUM} if is_spoiled else set())
    assert set(outcomes) == {len(SIZES)}
    begun.release()


def test_what_is_stored_is_found_while_it_moves_between_tiers(store: ArtifactStore) -> None:
    found: list[int] = []

    def ask() -> None:
        found.append(len(store.match(CHUNKS[:1])))
        assert store.match(CHUNKS[:1]) == store.holdings(CHUNKS[:1])

    put(store, CHUNKS[:1])
    with at_each_step(ask, index):
        rounds(store)  # a copy on SSD
        store.leave_to_ssd()
        begin(store, ids_of(CHUNKS[:1])).release()
        rounds(store)
    assert set(found) == {1}


def test_tails_can_be_asked_for_while_one_is_added(store: ArtifactStore) -> None:
    parent = CHUNKS[0]
    tail, other = (
        ChunkRange(ChunkKey(bytes([n]) * 16), parent.key, parent.end, parent.end + n)
        for n in (64, 128)
    )

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        forget_all(store)
        put(store, [parent, tail])
        return ask, lambda: put(store, [other])

    def ask() -> None:
        assert 64 in store.tails(parent.key)

    assert try_every_switch(prepare, index) > 5
    forget_all(store)
    put(store, [parent, tail])
    with at_each_step(ask, index):
        put(store, [replace(tail, key=other.key)])  # of the same length


def test_the_io_thread_asks_for_an_overdue_write_while_it_is_forgotten(
    store: ArtifactStore, disk: Disk, clock: Clock
) -> None:
    put(store, CHUNKS[:1])
    rounds(store)
    store.leave_to_ssd()
    disk.files.hang_next()
    begun = begin(store, ids_of(CHUNKS[:1]))
    rounds(store, 1)  # a read is under way, to which writes yield
    assert store.io_thread is not None
    assert store.io_thread.ssd is not None
    device = store.io_thread.ssd.write_device

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        put(store, chain("b", 1))
        clock.passes(0.01)
        return lambda: device.may_begin([], []), lambda: forget_all(store)

    assert try_every_switch(prepare, catalog, writes, artifact_queue) > 5
    begun.release()


def test_a_loss_of_exports_is_always_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "_MAX_CHANGES", 1)
    artifact = Artifact(Node(CHUNKS[0], None), StateType.DENSE_KV, 1)
    artifact.checksum = b"x"
    noticed: list[bool] = []
    feed = ExportFeed()

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        nonlocal feed
        if noticed:
            assert noticed[-1] or feed.take_loss()
        feed = ExportFeed()
        feed.on_forgotten(artifact)
        return lambda: noticed.append(feed.take_loss()), lambda: feed.on_forgotten(artifact)

    assert try_every_switch(prepare, exports) > 3
