"""Disks and journals that fail for a while, and what is written once they do not."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from hetero_connector.errors import StoreError
from hetero_connector.store import io_thread
from hetero_connector.store.catalog.loads import Load
from hetero_connector.store.io_thread import IoThread
from hetero_connector.store.ssd import health, journal_rows
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.directory_lock import DirectoryLock
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.reader import SsdReadBatch, SsdReads
from tests.store.filling import SIZES, Bench, Disk, begin, chain, ids_of, put, stored, until, wait

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
    rounds, step = [0], IoThread.step

    def counted(thread: IoThread) -> bool:
        rounds[0] += 1
        return step(thread)

    with (
        patch.object(Journal, "clear", side_effect=StoreError("disk I/O error")),
        patch.object(IoThread, "step", counted),
    ):
        store.reset()
        put(store, CHUNKS)
        until(lambda: not store.catalog.writes.is_writable)
        put(store, chain("b", 1))
        artifacts = list(store.catalog.tiers.index.artifacts())
        assert len(artifacts) == 5 * len(SIZES)
        until(lambda: all(a.checksum is not None for a in artifacts))
        assert rounds[0] < 200, "it waits between two tries"
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
