"""Disks and journals that fail for a while, and what is written once they do not."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest

from hetero_connector.errors import StoreError, TransferError
from hetero_connector.store import io_thread
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Load
from hetero_connector.store.ssd import health, journal_rows
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.directory_lock import DirectoryLock
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.reader import SsdReadBatch, SsdReads
from hetero_connector.transfer.base import Direction, Extent
from tests.clock import Clock
from tests.store.filling import (
    SIZES,
    Bench,
    Beside,
    CountedFiles,
    Disk,
    assert_restored,
    begin,
    chain,
    ids_of,
    put,
    stored,
    wait,
)
from tests.transfer.memory_files import MemoryTransfer
from tests.waiting import until

CHUNKS = chain("a", 4)


def test_what_was_sealed_while_writing_paused_is_written_when_it_goes_on(
    bench: Bench, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nothing that continues it would ever be written either."""
    monkeypatch.setattr(health, "_PAUSE_S", 0.5)
    store = bench.open(dram_chunks=16)
    disk.files.fail_next(100)
    for i in range(6):
        put(store, chain(f"b{i}", 1))
        store.flush(60)
    assert not store.catalog.writes.is_writable
    put(store, CHUNKS[:2])
    disk.files._failures.clear()
    until(lambda: store.catalog.writes.is_writable)
    put(store, CHUNKS[2:])
    assert store.flush(60)
    store.close()
    store = bench.open()
    assert stored(store, CHUNKS) == 4
    assert stored(store, chain("b5", 1)) == 1
    store.close()


class BadDisk(Disk):
    """A disk that says of each write why it fails, and counts its artifacts."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = list[int]()

    def why(self, offsets: set[int]) -> TransferError | None:
        """Return the error of a write to these places; None if it succeeds."""
        raise NotImplementedError

    def __call__(self, memory: npt.NDArray[np.uint8], directory: SsdDirectory) -> CountedFiles:
        files = super().__call__(memory, directory)
        submit = files.submit

        def checked(direction: Direction, extents: Sequence[Extent]) -> MemoryTransfer:
            transfer = submit(direction, extents)
            if direction is Direction.WRITE:
                self.writes.append(len(extents))
                transfer.error = self.why({extent.file_offset for extent in extents})
            return transfer

        files.submit = checked  # type: ignore[method-assign]
        return files


class BadPlaces(BadDisk):
    """No write of the two places succeeds that are the first and the last of the first batch."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = set[int]()

    def why(self, offsets: set[int]) -> TransferError | None:
        self.bad = self.bad or {min(offsets), max(offsets)}
        is_good = self.bad.isdisjoint(offsets)
        return None if is_good else TransferError(errno.EIO, "a bad place")


class Outage(BadDisk):
    """Every write fails until so many have."""

    def __init__(self, error: TransferError, left: int) -> None:
        super().__init__()
        self.error = error
        self.left = left

    def why(self, offsets: set[int]) -> TransferError | None:
        self.left -= 1
        return self.error if self.left >= 0 else None


def write_all(store: ArtifactStore, clock: Clock) -> None:
    for _ in range(40):
        clock.passes(1.0)
        store.run_io_round()
    assert all(a.ssd is not None for a in store.catalog.tiers.index.artifacts())
    store.check_integrity()


def num_retired(store: ArtifactStore) -> int:
    assert store.catalog.tiers.ssd is not None
    return sum(region.num_retired for region in store.catalog.tiers.ssd._regions.values())


def test_places_that_cannot_be_written_stop_no_other_write(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(journal_rows, "in_background", Beside())
    disk = BadPlaces()
    bench = Bench(tmp_path, disk, clock)
    store = bench.open(dram_chunks=16, run_io=False)
    put(store, CHUNKS)
    write_all(store, clock)
    assert len(disk.bad) == 2
    assert store.catalog.writes.is_writable
    assert num_retired(store) == 2 * len(SIZES), "those of the two chunks that met them"
    lines = [x.getMessage() for x in caplog.records if "does not use them again" in x.getMessage()]
    assert len(lines) == 2
    close(store)
    store = bench.open()
    assert stored(store, CHUNKS) == 4
    assert_restored(store, CHUNKS)
    store.close()


@pytest.mark.parametrize(
    "error",
    [TransferError(errno.EIO, "gone"), TransferError("NIXL names no errno")],
    ids=["eio", "nixl"],
)
def test_a_disk_that_was_gone_for_long_has_all_its_slots_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, error: TransferError
) -> None:
    monkeypatch.setattr(journal_rows, "in_background", Beside())
    disk = Outage(error, left=10)
    store = Bench(tmp_path, disk, clock).open(dram_chunks=16, run_io=False)
    put(store, CHUNKS)
    for _ in range(100):
        clock.passes(20.0)
        store.run_io_round()
    assert disk.left < 0
    write_all(store, clock)
    assert num_retired(store) == 0
    assert store.catalog.tiers.ssd is not None
    for state_type in SIZES:
        assert store.catalog.tiers.ssd.num_used(state_type) == len(CHUNKS), "none is kept aside"
    close(store)


def test_chunks_of_a_batch_that_failed_are_written_one_by_one(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_rows, "in_background", Beside())
    disk = Outage(TransferError(errno.EIO, "gone"), left=3)
    store = Bench(tmp_path, disk, clock).open(dram_chunks=16, run_io=False)
    put(store, CHUNKS)
    for _ in range(10):
        clock.passes(20.0)
        store.run_io_round()
    write_all(store, clock)
    each = len(SIZES)
    assert disk.writes == [4 * each, each, each, each, each, each, each]
    put(store, chain("b", 2))
    write_all(store, clock)
    assert disk.writes[7:] == [2 * each], "no longer"
    close(store)


@pytest.mark.parametrize(
    ("code", "retired"), [(errno.EIO, len(SIZES)), (errno.ENOSPC, 0), (errno.EROFS, 0)]
)
def test_only_an_error_of_its_place_costs_a_slot(
    bench: Bench, disk: Disk, clock: Clock, monkeypatch: pytest.MonkeyPatch, code: int, retired: int
) -> None:
    monkeypatch.setattr(journal_rows, "in_background", Beside())
    bench.clock = clock
    store = bench.open(run_io=False)
    disk.files.fail_next(code=code)
    put(store, CHUNKS[:1])
    write_all(store, clock)
    assert num_retired(store) == retired
    sync = SsdDirectory.sync
    failures = [TransferError(errno.EIO, "a sync")]

    def fail_once(directory: SsdDirectory) -> None:
        if failures:
            raise failures.pop()
        sync(directory)

    with patch.object(SsdDirectory, "sync", fail_once):
        put(store, CHUNKS[1:2])
        write_all(store, clock)
    assert num_retired(store) == retired, "a sync is of no place"
    close(store)


def close(store: ArtifactStore) -> None:
    """Close a store whose I/O thread was not started."""
    assert store.io_thread is not None
    store.io_thread.start()
    store.close()


def test_a_batch_whose_slots_the_journal_does_not_free_is_written_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_rows, "_RETRY_S", 0.05)
    store = bench.open(ssd_chunks=2, dram_chunks=4)
    put(store, CHUNKS[:2])
    assert store.flush(60)
    forget, calls = Journal.forget, []

    def fail_once(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 1:
            raise StoreError("database is locked")
        forget(*args)

    monkeypatch.setattr(Journal, "forget", fail_once)
    put(store, chain("b", 1))
    assert store.flush(60)
    assert len(calls) > 1
    assert "cause=no_slot,tier=ssd" not in bench.counts("heterocache_failures")
    store.close()
    store = bench.open(ssd_chunks=2, dram_chunks=4)
    assert stored(store, chain("b", 1)) == 1
    store.close()


def test_a_journal_that_never_forgets_costs_no_checksums_and_no_core(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_rows, "_RETRY_S", 0.2)
    store = bench.open(ssd_chunks=2, dram_chunks=8, verify="all")
    put(store, CHUNKS[:2])
    assert store.flush(60)
    waits, wait_once = [0], Catalog.wait

    def counted(catalog: Catalog, *given: Any) -> None:
        waits[0] += 1
        wait_once(catalog, *given)

    with (
        patch.object(Journal, "clear", side_effect=StoreError("disk I/O error")) as clear,
        patch.object(Catalog, "wait", counted),
    ):
        began_s = time.monotonic()
        store.reset()
        put(store, CHUNKS)
        until(lambda: not store.catalog.writes.is_writable)
        put(store, chain("b", 1))
        artifacts = list(store.catalog.tiers.index.artifacts())
        assert len(artifacts) == 5 * len(SIZES)
        until(lambda: all(a.checksum is not None for a in artifacts))
        seconds = time.monotonic() - began_s
        assert clear.call_count <= 1 + seconds / 0.2, "it tries again after a pause"
        assert waits[0] < 100 * (1 + seconds), "it waits meanwhile"
    store.close()


def test_files_that_cannot_be_reached_any_more_do_not_end_the_thread(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(io_thread, "_HOUSEKEEPING_S", 0.02)
    store = bench.open()
    put(store, CHUNKS[:1])
    assert store.flush(60)
    stale = OSError(errno.ESTALE, "Stale file handle")
    with caplog.at_level(logging.ERROR), patch.object(os, "fstat", side_effect=stale):
        until(lambda: not store.catalog.writes.is_writable)
    assert "its files cannot be reached any more" in caplog.text
    assert store.catalog.io_alive
    restore = wait(begin(store, ids_of(CHUNKS[:1])))
    assert not restore.failed
    restore.release()
    store.close()


def test_one_failed_look_at_the_files_does_not_end_writing(bench: Bench) -> None:
    store = bench.open()
    look = store.io_thread.ssd.rows.directory.why_lost  # type: ignore[union-attr]

    def fail() -> str | None:
        with patch.object(os, "fstat", side_effect=OSError(errno.ESTALE, "Stale file handle")):
            return look()

    assert [fail(), look(), fail()] == [None] * 3
    assert "its files cannot be reached any more" in str(fail())
    with patch.object(os, "stat", side_effect=FileNotFoundError()):
        assert look() == "its files were deleted under this engine"
    store.close()


def test_a_reset_between_taking_a_read_and_beginning_it(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS[:2])
    assert store.flush(60)
    store.leave_to_ssd()
    begun, resets = SsdReads.batch, [store.reset]

    def late(device: SsdReads, loads: list[Load]) -> SsdReadBatch:
        if resets:
            assert resets.pop()()
        return begun(device, loads)

    with patch.object(SsdReads, "batch", late):
        restore = wait(begin(store, ids_of(CHUNKS[:2])))
    assert len(restore.failed) == 2 * len(SIZES)
    restore.release()
    assert store.catalog.io_alive
    put(store, CHUNKS[:2])
    assert store.flush(60)
    until(lambda: not store.catalog.loads.by_artifact)
    store.check_integrity()
    store.close()


def test_a_sync_that_hangs_does_not_keep_the_process(bench: Bench) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def sync(_: SsdDirectory) -> None:
        hangs.set()
        goes_on.wait(60)

    store = bench.open()
    with patch.object(SsdDirectory, "sync", sync):
        put(store, CHUNKS[:1])
        assert hangs.wait(60)
        syncing = [t for t in threading.enumerate() if t.name == "heterocache-sync"]
        assert syncing
        assert all(thread.daemon for thread in syncing)
        goes_on.set()
        assert store.flush(60)
    store.close()


def test_a_lock_is_let_go_on_a_file_system_that_became_read_only(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path / "lock")
    with patch.object(os, "utime", side_effect=OSError(errno.EROFS, "Read-only file system")):
        lock.release()
    again = DirectoryLock.try_acquire(tmp_path / "lock")
    assert again is not None
    again.release()
