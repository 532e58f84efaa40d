"""An engine takes over a dead engine's SSD if it can read it: verified, never written."""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.errors import StoreInUseError
from hetero_connector.store.base import Failure
from hetero_connector.store.peers import adopter as adopting
from hetero_connector.store.peers.orphaned_storage import OrphanDirectory, open_orphans
from hetero_connector.store.ssd import directory as ssd_directory
from hetero_connector.store.ssd import journal
from hetero_connector.store.ssd.directory_lock import DirectoryLock, shared
from hetero_connector.store.ssd.journal_format import CorruptJournalError
from hetero_connector.store.ssd.space import model_directory
from tests.store.adoption import (
    CHUNKS,
    DEAD,
    PEER_DEADLINE_S,
    Bytes,
    Copies,
    Survivor,
    leave,
    records,
)
from tests.store.filling import FINGERPRINT, SIZES, Bench, ids_of, intact, put, stored, wait
from tests.waiting import until


@pytest.fixture
def left(tmp_path: Path) -> Copies:
    """An engine that wrote CHUNKS and ended; its records, as the directory has them."""
    return leave(tmp_path / "dead")


@pytest.fixture
def survivor(tmp_path: Path) -> Iterator[Survivor]:
    made = Survivor(tmp_path / "alive")
    yield made
    made.store.close()
    made.store.check_integrity()


def files_of(root: Path) -> dict[str, bytes]:
    """But for SQLite's shared memory, which any reader makes."""
    folder = model_directory(root, FINGERPRINT)
    return {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.endswith("-shm")}


def reading_takes(
    monkeypatch: pytest.MonkeyPatch, pause: Callable[[int], object]
) -> list[ArtifactId]:
    """Have `pause`, which is told how many reads have begun, before each; which have begun."""
    begun, read = list[ArtifactId](), OrphanDirectory.read

    def slowly(
        self: OrphanDirectory, artifact: ArtifactId, digest: bytes, size_bytes: int, into: Bytes
    ) -> Failure | None:
        begun.append(artifact)
        pause(len(begun))
        return read(self, artifact, digest, size_bytes, into)

    monkeypatch.setattr(OrphanDirectory, "read", slowly)
    return begun


def test_what_a_dead_engine_left_becomes_ours(
    left: Copies, survivor: Survivor, tmp_path: Path
) -> None:
    before = files_of(tmp_path / "dead")
    restore = survivor.adopt(left)
    assert not restore.failed
    assert set(restore.offsets) == set(ids_of(CHUNKS))
    assert intact(survivor.store, restore)
    restore.release()
    assert survivor.count("heterocache_adopted_bytes") == 3 * sum(SIZES.values())
    assert survivor.count("heterocache_read_bytes", Tier.SSD) == 3 * sum(SIZES.values())
    assert survivor.count("heterocache_read_bytes", Tier.PEER) == 0
    artifacts = list(survivor.store.catalog.tiers.index.artifacts())
    assert not any(a.replica for a in artifacts), "it is not somebody else's any more"
    assert survivor.store.sharing is not None
    told = {c.id for c in survivor.store.sharing.take_exports() if c.copy is not None}
    assert told == set(ids_of(CHUNKS)), "or it could not be claimed"
    assert survivor.store.flush(60)
    assert all(a.ssd is not None for a in artifacts)
    assert files_of(tmp_path / "dead") == before
    revived = Bench(tmp_path / "dead").open()
    assert stored(revived, CHUNKS) == 3, "its own engine finds all of it"
    revived.close()


def fails(survivor: Survivor, copies: Copies, cause: Failure) -> None:
    """Nothing arrives, all for that cause, counted; a save of the same chunks can take over."""
    restore = survivor.adopt(copies)
    assert set(restore.failed.values()) == {cause}
    restore.release()
    assert survivor.count("heterocache_failures", Tier.SSD) == len(restore.failed)
    assert survivor.count("heterocache_failures") == len(restore.failed)
    assert survivor.store.match(CHUNKS) == []
    put(survivor.store, CHUNKS)
    assert stored(survivor.store, CHUNKS) == 3


def test_an_engine_that_lives_keeps_its_directory_to_itself(
    survivor: Survivor, tmp_path: Path
) -> None:
    """Though its lease has ended: it was stopped, or the fleet's directory is wrong."""
    store = Bench(tmp_path / "dead").open()
    put(store, CHUNKS)
    assert store.flush(60)
    fails(survivor, records(store, tmp_path / "dead"), Failure.UNREACHABLE)
    store.close()


@pytest.mark.parametrize("who", ["the owner is back", "somebody has taken over"])
def test_the_fence_is_asked_when_the_bytes_are_there(
    left: Copies, survivor: Survivor, who: str
) -> None:
    if who == "the owner is back":
        survivor.peers.cards[DEAD] = b"card"
    else:
        survivor.peers.fenced.update(left)
    fails(survivor, left, Failure.FENCED)


def test_bytes_that_are_not_the_records_are_refused(
    left: Copies, survivor: Survivor, tmp_path: Path
) -> None:
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    for slab in folder.glob("*.slab"):
        data = bytearray(slab.read_bytes())
        for at in range(100, len(data), 4096):
            data[at] ^= 1
        slab.write_bytes(data)
    fails(survivor, left, Failure.CHECKSUM)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"checksum": bytes(16)}, Failure.GONE),
        ({"storage": "/nonexistent/0123456789abcdef"}, Failure.IO_ERROR),
        ({"storage": "nonsense \0"}, Failure.IO_ERROR),
        ({"size_bytes": 7}, Failure.GONE),
    ],
    ids=["other bytes", "no directory", "nonsense", "another size"],
)
def test_a_record_that_does_not_fit_is_a_counted_miss(
    left: Copies, survivor: Survivor, change: dict[str, object], cause: Failure
) -> None:
    wrong = {key: copy._replace(**change) for key, copy in left.items()}  # type: ignore[arg-type]
    fails(survivor, wrong, cause)


@pytest.mark.parametrize("what", ["journal", "slab"])
def test_a_damaged_directory_is_a_counted_miss(
    left: Copies, survivor: Survivor, tmp_path: Path, what: str
) -> None:
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    for path in folder.glob("journal.sqlite" if what == "journal" else "*.slab"):
        path.write_bytes(b"not what it was")
    fails(survivor, left, Failure.IO_ERROR)


def test_an_artifact_that_the_dead_engine_had_evicted_is_gone(
    left: Copies, survivor: Survivor, tmp_path: Path
) -> None:
    store = Bench(tmp_path / "dead").open()
    store.reset()
    store.close()
    fails(survivor, left, Failure.GONE)


def test_an_engine_that_starts_waits_for_those_who_read_there(
    left: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssd_directory, "_READERS_WAIT_S", 20.0)  # the machine may be busy
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    opened = threading.Event()

    def start() -> None:
        store = Bench(tmp_path / "dead").open()
        opened.set()
        store.close()

    starting = threading.Thread(target=start)
    with shared(folder / "lock") as is_shared, shared(folder / "lock") as by_another_too:
        assert is_shared
        assert by_another_too
        starting.start()
        assert not opened.wait(0.3)
    assert opened.wait(60)
    starting.join()


def test_those_who_read_let_an_engine_that_starts_go_first(left: Copies, tmp_path: Path) -> None:
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    opening = DirectoryLock.acquire(tmp_path / "dead" / ".lock")
    with pytest.raises(StoreInUseError, match="is opening"), open_orphans(folder, tmp_path):
        pass
    opening.release()
    with open_orphans(folder, tmp_path) as directory:
        with pytest.raises(StoreInUseError, match="read by peers"):  # not the dead one's pid
            DirectoryLock.acquire(folder / "lock")
        opening = DirectoryLock.acquire(tmp_path / "dead" / ".lock")
        with pytest.raises(StoreInUseError, match="is opening"):
            directory.read(next(iter(left)), b"", 1, np.empty(0, np.uint8))
        opening.release()
        assert DirectoryLock.try_acquire(folder / "lock") is None


def test_a_file_system_that_hangs_costs_a_deadline_and_its_slots_stay_in_quarantine(
    left: Copies, survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    begun = reading_takes(monkeypatch, lambda _: hangs.wait(60))
    pool = survivor.store.catalog.tiers.dram
    restore = survivor.begin(left)
    until(lambda: len(begun) == 1)
    assert survivor.store.reading_bytes == {Tier.SSD: 3 * sum(SIZES.values())}, "no peer is read"
    assert set(survivor.store.bytes_ahead_of([]).values()) == {0}, "it is not our own SSD"
    survivor.store.catalog.loads.read_pace.most_bytes = 1
    assert not survivor.store.catalog.loads.is_congested
    assert not restore.poll()
    survivor.clock.passes(PEER_DEADLINE_S)
    wait(restore)
    assert set(restore.failed.values()) == {Failure.DEADLINE}
    assert survivor.count("heterocache_failures", Tier.SSD) == 6
    restore.release()
    assert sum(map(pool.num_used, SIZES)) == 6, "slots that a late read may fill are free"
    second = survivor.adopt(left)
    assert set(second.failed.values()) == {Failure.UNREACHABLE}, "nobody waits for it twice"
    second.release()
    put(survivor.store, CHUNKS[:2])
    assert len(begun) == 1
    reading = [x for x in threading.enumerate() if x.name == "heterocache-adopt"]
    assert reading
    assert all(thread.daemon for thread in reading)
    hangs.set()
    until(lambda: sum(map(pool.num_used, SIZES)) == 4)
    assert stored(survivor.store, CHUNKS) == 2
    assert len(begun) == 1, "nobody waits for the others"
    lock = DirectoryLock.try_acquire(Path(next(iter(left.values())).storage) / "lock")
    assert lock is not None
    lock.release()


def test_a_long_prefix_may_take_longer_than_a_batch(
    left: Copies, survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adopting, "_BATCH_BYTES", 1)
    begun = reading_takes(monkeypatch, lambda _: survivor.clock.passes(PEER_DEADLINE_S / 5))
    restore = survivor.adopt(left)
    assert survivor.clock() > 1_000.0 + PEER_DEADLINE_S
    assert not restore.failed
    assert intact(survivor.store, restore)
    restore.release()
    assert len(begun) == 6
    assert not survivor.store.take_timings(), "files tell nothing of peers' DRAM"


def test_what_was_read_by_the_deadline_counts(
    left: Copies, survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()
    begun = reading_takes(monkeypatch, lambda n: n < 3 or hangs.wait(60))
    restore = survivor.begin(left)
    until(lambda: len(begun) == 3)
    survivor.clock.passes(PEER_DEADLINE_S)
    wait(restore)
    assert len(restore.offsets) == 2
    assert list(restore.failed.values()) == [Failure.DEADLINE] * 4
    assert intact(survivor.store, restore)
    restore.release()
    hangs.set()
    pool = survivor.store.catalog.tiers.dram
    until(lambda: sum(map(pool.num_used, SIZES)) == 2)


def test_a_miss_is_counted_once_though_its_read_fails_after_it_was_given_up(
    left: Copies, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = threading.Event()

    def breaks(_: int) -> None:
        hangs.wait(60)
        raise OSError("the file system has gone")

    begun = reading_takes(monkeypatch, breaks)
    survivor = Survivor(tmp_path / "alive", load_deadline_s=PEER_DEADLINE_S / 2)
    restore = survivor.begin(left)
    until(lambda: len(begun) == 1)
    survivor.clock.passes(PEER_DEADLINE_S / 2)
    assert restore.poll()
    assert set(restore.failed.values()) == {Failure.DEADLINE}
    restore.release()
    hangs.set()
    pool = survivor.store.catalog.tiers.dram
    until(lambda: sum(map(pool.num_used, SIZES)) == 0)
    assert survivor.count("heterocache_failures") == len(restore.failed) == 6
    survivor.store.close()
    survivor.store.check_integrity()


def test_the_journal_is_not_read_as_a_whole(
    left: Copies, survivor: Survivor, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*_: object) -> None:
        raise CorruptJournalError(Path("journal.sqlite"), "reads all of it")

    monkeypatch.setattr(journal, "_check", check)
    assert not survivor.adopt(left).failed


def test_a_slab_that_is_cut_off_misses_what_lay_there_alone(
    left: Copies, survivor: Survivor, tmp_path: Path
) -> None:
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    found = journal.Journal.open_copy(folder / "journal.sqlite")
    places = {row.id: found.meta.geometry.offset(row.state_type, row.slot) for row in found.load()}
    found.close()
    last = max(places, key=places.__getitem__)
    os.truncate(folder / "slots.slab", places[last])
    restore = survivor.adopt(left)
    assert restore.failed == {last: Failure.IO_ERROR}
    assert len(restore.offsets) == 3 * len(SIZES) - 1
    restore.release()


def test_a_directory_of_the_format_before_is_a_counted_miss(
    left: Copies, survivor: Survivor, tmp_path: Path
) -> None:
    folder = model_directory(tmp_path / "dead", FINGERPRINT)
    with sqlite3.connect(folder / "journal.sqlite") as connection:
        connection.execute("UPDATE meta SET value = '1' WHERE key = 'format_version'")
        connection.execute("DELETE FROM meta WHERE key = 'digest'")
    connection.close()
    fails(survivor, left, Failure.IO_ERROR)


def test_a_restore_that_was_given_up_leaves_nothing_behind(
    left: Copies, survivor: Survivor
) -> None:
    survivor.begin(left).release()
    survivor.store.reset()
    pool = survivor.store.catalog.tiers.dram
    until(lambda: sum(map(pool.num_used, SIZES)) == 0)
    assert not survivor.adopt(left).failed
