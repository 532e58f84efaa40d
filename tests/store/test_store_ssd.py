"""The store with an SSD tier: spill, restore, restart, and everything that can fail."""

import fcntl
import gc
import logging
import os
import sqlite3
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.errors import StoreError, StoreInUseError
from hetero_connector.store import io_thread
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure
from hetero_connector.store.ssd import journal_rows
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.private_files import create_private
from hetero_connector.transfer.base import Direction, Extent
from hetero_connector.transfer.pread_files import PreadFiles
from tests.clock import Clock
from tests.store.filling import (
    DENSE,
    SIZES,
    WINDOW,
    Bench,
    Disk,
    assert_restored,
    begin,
    chain,
    fill,
    ids_of,
    intact,
    put,
    slab_offset,
    stored,
    wait,
)
from tests.store.under_way import snapshot
from tests.transfer.memory_files import MemoryFiles, MemoryTransfer
from tests.waiting import until

CHUNKS = chain("a", 6)


def arenas() -> int:
    """Return the number of arenas that this process has mapped."""
    return Path("/proc/self/maps").read_text().count("heterocache-arena")


def test_a_running_engine_notes_that_its_directory_is_in_use(bench: Bench) -> None:
    """A killed one cannot, and who makes room would take its state for the oldest."""
    store = bench.open(run_io=False)
    assert store.folder is not None
    assert store.io_thread is not None
    lock = store.folder / "lock"
    os.utime(lock, (0, 0))
    store.io_thread.housekeep()
    until(lambda: lock.stat().st_mtime > 0)
    store.io_thread.start()
    store.close()


def test_closing_gives_the_memory_back_without_a_garbage_collection(tmp_path: Path) -> None:
    # Its first opening in a process imports NIXL and torch, whose garbage keeps frames alive.
    Bench(tmp_path / "first").open().close()
    gc.collect()
    before = arenas()
    gc.disable()
    try:
        for name in ("a", "b"):
            store = Bench(tmp_path).open()
            put(store, chain(name, 3))
            assert arenas() == before + 1
            store.close()
            assert arenas() == before
    finally:
        gc.enable()


def restarted(bench: Bench, store: ArtifactStore, **options: object) -> ArtifactStore:
    store.check_integrity()
    store.close()
    return bench.open(**options)  # type: ignore[arg-type]


def on_ssd_only(bench: Bench, count: int = 6, **options: object) -> ArtifactStore:
    """A store whose first `count` chunks are on SSD and not in DRAM."""
    store = bench.open()
    put(store, CHUNKS[:count])
    return restarted(bench, store, **options)


@pytest.mark.parametrize("real_files", [False, True])
def test_saved_restarted_restored(tmp_path: Path, disk: Disk, real_files: bool) -> None:
    bench = Bench(tmp_path / "ssd", None if real_files else disk)
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    spilled = bench.counts("heterocache_ssd_written_bytes")
    assert spilled == {"state_type=dense_kv": 54_000, "state_type=window_swa": 18_000}
    assert store.match(CHUNKS)[0].tiers == {DENSE: Tier.DRAM, WINDOW: Tier.DRAM}
    store = restarted(bench, store)
    assert [x.tiers for x in store.match(CHUNKS)] == [{DENSE: Tier.SSD, WINDOW: Tier.SSD}] * 6
    restore = wait(begin(store, ids_of(CHUNKS)))
    assert not restore.failed
    assert len(restore.offsets) == 12
    assert intact(store, restore)
    restore.release()
    assert store.match(CHUNKS)[5].tiers == {DENSE: Tier.DRAM, WINDOW: Tier.DRAM}
    again = begin(store, ids_of(CHUNKS))
    assert again.poll(), "now it is in DRAM"
    again.release()
    counts = bench.counts("heterocache_read_bytes")
    assert counts["state_type=dense_kv,tier=ssd"] == counts["state_type=dense_kv,tier=dram"]
    store.check_integrity()
    store.close()


def test_a_start_says_what_it_found(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    store = bench.open()
    put(store, CHUNKS)
    tokens = CHUNKS[-1].end
    with caplog.at_level(logging.INFO):
        restarted(bench, store).close()
    found = [r.getMessage() for r in caplog.records if "recovered" in r.getMessage()]
    assert len(found) == 1
    assert f"recovered {len(CHUNKS) * len(SIZES)} artifacts, {tokens:,} tokens, " in found[0]


def test_write_back_begins_by_itself(bench: Bench) -> None:
    store = bench.open(spill_delay_s=0.01)
    put(store, CHUNKS)
    until(lambda: "state_type=dense_kv" in bench.counts("heterocache_ssd_written_bytes"))
    store.close()


def test_dram_smaller_than_the_chain_still_serves_it_from_ssd(bench: Bench) -> None:
    store = bench.open(dram_chunks=3)
    for chunk in CHUNKS:
        put(store, [chunk])
        assert store.flush(60)
    assert stored(store, CHUNKS) == 6
    for part in (CHUNKS[:3], CHUNKS[3:]):
        restore = wait(begin(store, ids_of(part)))
        assert not restore.failed
        assert intact(store, restore)
        restore.release()
    too_much = wait(begin(store, ids_of(CHUNKS)))
    assert set(too_much.failed.values()) == {Failure.NO_SLOT}
    assert len(too_much.offsets) == 6
    assert intact(store, too_much)
    too_much.release()
    store.check_integrity()
    store.close()


def test_full_ssd_evicts_leaves_and_the_journal_forgets_before_a_slot_is_written(
    tmp_path: Path,
) -> None:
    class Watched(MemoryFiles):
        directory: SsdDirectory

        def submit(self, direction: Direction, extents: Sequence[Extent]) -> MemoryTransfer:
            if direction is Direction.WRITE:
                cut = self.directory.geometry
                rows = [
                    (cut.offset(r.state_type, r.slot), cut.stride_bytes[r.state_type])
                    for r in self.directory.journal.load()
                ]
                for e in extents:
                    start, end = e.file_offset, e.file_offset + e.size
                    overwritten.extend(x for x in rows if x[0] < end and start < sum(x))
                    writes.append(start)
            return super().submit(direction, extents)

    def watch(memory: np.ndarray, directory: SsdDirectory) -> Watched:
        files = Watched(memory, [np.zeros(f.size_bytes, np.uint8) for f in directory.files])
        files.directory = directory
        return files

    overwritten: list[object] = []
    writes: list[int] = []
    bench = Bench(tmp_path / "ssd", watch)  # type: ignore[arg-type]
    store = bench.open(dram_chunks=4, ssd_chunks=6)
    for i in range(8):
        put(store, chain(f"c{i}", 2))
        assert store.flush(60)
    assert len(writes) > len(set(writes)), "slots were reused"
    assert overwritten == []
    assert bench.counts("heterocache_evictions")["state_type=dense_kv,tier=ssd"] > 0
    for i in (6, 7):
        assert stored(store, chain(f"c{i}", 2)) == 2
    store.check_integrity()
    store.close()


def test_a_chain_longer_than_the_ssd_keeps_its_beginning_there(bench: Bench) -> None:
    store = bench.open(dram_chunks=8, ssd_chunks=3)
    for chunk in CHUNKS:
        put(store, [chunk])
        assert store.flush(60)
    assert bench.counts("heterocache_evictions") == {}
    assert stored(store, CHUNKS) == 6
    store = restarted(bench, store, ssd_chunks=3)
    assert stored(store, CHUNKS) == 3
    store.close()


def test_an_ssd_smaller_than_dram_follows_what_is_new(bench: Bench) -> None:
    store = bench.open(dram_chunks=12, ssd_chunks=4)
    for name in "pqr":
        put(store, chain(name, 3))
        assert store.flush(60)
    assert all(stored(store, chain(name, 3)) == 3 for name in "pqr")
    store = restarted(bench, store, ssd_chunks=4)
    assert [stored(store, chain(name, 3)) for name in "pqr"] == [0, 0, 3]
    store.close()


def test_one_bad_artifact_is_dropped_and_the_rest_of_its_batch_arrives(
    tmp_path: Path, disk: Disk
) -> None:
    clock = Clock()
    bench = Bench(tmp_path / "ssd", disk, clock)
    store = on_ssd_only(bench)
    disk.files.fail_next(2)  # the batch, then its first artifact alone
    restore = wait(begin(store, ids_of(CHUNKS)))
    bad = ArtifactId(CHUNKS[0].key, DENSE)
    assert restore.failed == {bad: Failure.IO_ERROR}
    assert len(restore.offsets) == 11
    assert intact(store, restore)
    restore.release()
    assert bench.counts("heterocache_failures") == {"cause=io_error,tier=ssd": 1}
    assert store.match(CHUNKS)[0].tiers == {DENSE: Tier.SSD, WINDOW: Tier.DRAM}
    disk.files.fail_next(1)
    wait(begin(store, [bad])).release()
    assert store.match(CHUNKS)[0].tiers[DENSE] is Tier.SSD, "the same bad moment of the disk"
    clock.passes(1.0)
    disk.files.fail_next(1)
    wait(begin(store, [bad])).release()
    assert store.match(CHUNKS)[0].tiers == {WINDOW: Tier.DRAM}
    assert bench.counts("heterocache_failures") == {"cause=io_error,tier=ssd": 2}
    store = restarted(bench, store)
    assert store.match(CHUNKS)[0].tiers == {WINDOW: Tier.SSD}, "the journal forgot it, too"
    store.close()


def test_a_flipped_bit_on_disk_is_a_miss(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench)
    disk.slab[slab_offset(store, ArtifactId(CHUNKS[2].key, WINDOW)) + 100] ^= 1
    restore = wait(begin(store, ids_of(CHUNKS)))
    assert set(restore.failed.values()) == {Failure.CHECKSUM}
    assert len(restore.failed) == 1
    assert intact(store, restore)
    restore.release()
    assert bench.counts("heterocache_failures") == {"cause=checksum,tier=ssd": 1}
    store.close()


@pytest.mark.parametrize("failure", [Failure.CHECKSUM, Failure.IO_ERROR])
def test_a_leaf_that_lost_its_state_keeps_nothing_of_its_chain_in_place(
    tmp_path: Path, disk: Disk, failure: Failure
) -> None:
    clock = Clock()
    bench = Bench(tmp_path / "ssd", disk, clock)
    store = on_ssd_only(bench, dram_chunks=8)
    bad = ArtifactId(CHUNKS[5].key, DENSE)
    if failure is Failure.CHECKSUM:
        disk.slab[slab_offset(store, bad)] ^= 1
    else:
        disk.files.fail_next(1)
        wait(begin(store, [bad])).release()
        assert stored(store, CHUNKS) == 6, "it is read again once before it is lost"
        clock.passes(1.0)
        disk.files.fail_next(1)
    restore = wait(begin(store, [bad]))
    assert restore.failed == {bad: failure}
    restore.release()
    assert stored(store, CHUNKS) == 5, "nobody can use the checkpoint that was left"
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 5, "nor is it in the journal"
    store.close()


def test_swapped_slots_are_misses(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench)
    one, other = (slab_offset(store, i) for i in ids_of(CHUNKS[:2], [DENSE]))
    slots = [[*range(one, one + 12_288)], [*range(other, other + 12_288)]]
    disk.slab[slots] = disk.slab[slots[::-1]]
    restore = wait(begin(store, ids_of(CHUNKS)))
    assert list(restore.failed.values()) == [Failure.CHECKSUM] * 2
    assert intact(store, restore)
    restore.release()
    store.close()


def test_a_truncated_slab_is_a_miss(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench)
    at = {i: slab_offset(store, i) + SIZES[i.state_type] for i in ids_of(CHUNKS)}
    end = sorted(at.values())[8]
    disk.files.files[0] = disk.files.files[0][: -(-end // 4096) * 4096]
    restore = wait(begin(store, ids_of(CHUNKS)))
    lost = {key for key, failure in restore.failed.items() if failure is Failure.IO_ERROR}
    assert lost <= {i for i in at if at[i] > end}
    assert lost
    assert {i.chunk for i in restore.failed} <= {i.chunk for i in lost}, "with their chunks"
    assert set(restore.offsets) | set(restore.failed) == set(ids_of(CHUNKS))
    assert intact(store, restore)
    restore.release()
    store.close()


def test_a_late_read_is_a_miss_at_the_deadline_and_its_slot_stays_in_quarantine(
    tmp_path: Path, disk: Disk
) -> None:
    clock = Clock()
    bench = Bench(tmp_path / "ssd", disk, clock)
    store = on_ssd_only(bench, dram_chunks=6, load_deadline_s=10.0)
    disk.files.hang_next()
    late = begin(store, ids_of(CHUNKS))
    until(lambda: disk.files.in_flight == 1)
    clock.passes(11.0)
    assert late.poll()
    assert set(late.failed.values()) == {Failure.DEADLINE}
    late.release()
    assert store.begin_save(chain("b", 1)[0], SIZES) is None, "every slot awaits the late read"
    disk.files.resume()
    until(lambda: store.match(CHUNKS)[5].tiers == {DENSE: Tier.DRAM, WINDOW: Tier.DRAM})
    again = begin(store, ids_of(CHUNKS))
    assert again.poll(), "what came late is kept"
    assert intact(store, again)
    again.release()
    put(store, chain("b", 1))
    assert bench.counts("heterocache_failures")["cause=deadline,tier=ssd"] == 12
    store.check_integrity()
    store.close()


def test_a_hung_read_does_not_block_later_ones_for_ever(tmp_path: Path, disk: Disk) -> None:
    clock = Clock()
    store = on_ssd_only(Bench(tmp_path / "ssd", disk, clock), load_deadline_s=10.0)
    disk.files.hang_next()
    hung = begin(store, ids_of(CHUNKS[:1]))
    until(lambda: disk.files.in_flight == 1)
    clock.passes(11.0)
    assert hung.poll()
    assert set(hung.failed.values()) == {Failure.DEADLINE}
    other = wait(begin(store, ids_of(CHUNKS[1:])))
    assert not other.failed
    assert intact(store, other)
    disk.files.resume()
    hung.release()
    other.release()
    store.close()


def test_concurrent_restores_share_one_read(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench)
    disk.files.hang_next()
    first = begin(store, ids_of(CHUNKS))
    until(lambda: disk.files.in_flight == 1)
    second = begin(store, ids_of(CHUNKS[:2]))
    abandoned = begin(store, ids_of(CHUNKS[:1]))
    abandoned.release()
    disk.files.resume()
    wait(first)
    wait(second)
    assert first.offsets.items() >= second.offsets.items()
    assert len(second.offsets) == 4
    first.release()
    assert intact(store, second)
    second.release()
    sizes = bench.counts("heterocache_read_bytes")
    assert sizes["state_type=dense_kv,tier=ssd"] == 6 * SIZES[DENSE], "each was read once"
    store.check_integrity()
    store.close()


def test_a_write_that_fails_once_is_tried_again(bench: Bench, disk: Disk) -> None:
    store = bench.open()
    disk.files.fail_next(2)
    put(store, CHUNKS)
    assert store.flush(60)
    assert bench.counts("heterocache_failures") == {"cause=io_error,tier=ssd": 2}
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 6
    store.close()


def test_rows_below_a_lost_one_are_reached_again_when_it_was_computed_anew(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    directory = store.io_thread.ssd.rows.directory  # type: ignore[union-attr]
    directory.journal.forget(ids_of(CHUNKS[2:3]))
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 2
    assert [bool(x.tiers) for x in store.holdings(CHUNKS)] == [True, True, False, True, True, True]
    assert store.catalog.tiers.ssd.num_used(DENSE) == 5  # type: ignore[union-attr]
    put(store, CHUNKS[2:3])
    assert store.flush(60)
    assert stored(store, CHUNKS) == 6
    assert_restored(store, CHUNKS)
    store.check_integrity()
    store.close()


def test_nothing_is_written_below_a_chunk_that_is_not_on_ssd(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS[:2])
    assert store.flush(60)
    with store.catalog.locked():
        lost = store.catalog.tiers.index.find(ArtifactId(CHUNKS[1].key, DENSE))
        assert lost is not None
        store.catalog.tiers.drop(lost, Tier.SSD)
    put(store, CHUNKS[2:])
    assert store.flush(60)
    assert store.catalog.tiers.ssd.num_used(DENSE) == 1  # type: ignore[union-attr]
    assert store.catalog.tiers.ssd.num_used(WINDOW) == 2, "no checkpoint without its chunk"  # type: ignore[union-attr]
    store.check_integrity()
    store.close()


def test_a_disk_that_cannot_be_written_is_given_up_with_one_line(
    bench: Bench, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store = on_ssd_only(bench, count=2)
    disk.files.fail_next(100)
    with caplog.at_level(logging.ERROR):
        for i in range(6):
            put(store, chain(f"b{i}", 1))
            store.flush(60)
    assert not store.flush(60)
    assert len([r for r in caplog.records if r.levelno >= logging.ERROR]) == 1
    assert "writing is tried again" in caplog.text
    assert stored(store, chain("b5", 1)) == 1
    disk.files._failures.clear()
    restore = wait(begin(store, ids_of(CHUNKS[:2])))
    assert not restore.failed, "what is on the disk is still read"
    restore.release()
    store.check_integrity()
    store.close()


@pytest.mark.parametrize("step", ["sync", "record"])
def test_bytes_that_are_not_durable_are_never_journaled(bench: Bench, step: str) -> None:
    store = bench.open()
    owner, name = (SsdDirectory, "sync") if step == "sync" else (Journal, "record")
    with patch.object(owner, name, side_effect=StoreError("disk I/O error")):
        put(store, CHUNKS[:3])
        store.flush(60)
        store.close()
    store = bench.open()
    assert stored(store, CHUNKS) == 0
    store.close()


def test_a_journal_that_cannot_forget_keeps_the_slots(bench: Bench) -> None:
    store = bench.open(ssd_chunks=2, dram_chunks=4)
    put(store, CHUNKS[:2])
    assert store.flush(60)
    with patch.object(Journal, "clear", side_effect=StoreError("database is locked")):
        store.reset()
        until(lambda: "cause=io_error,tier=ssd" in bench.counts("heterocache_failures"))
        put(store, chain("b", 2))
        assert not store.flush(0.1), "nothing is written while old rows are still there"
        assert bench.counts("heterocache_ssd_written_bytes") == {}
    assert store.flush(60)
    put(store, chain("c", 2))
    assert store.flush(60)
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 0
    assert stored(store, chain("c", 2)) == 2
    store.close()


def test_reset_during_a_read(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench, dram_chunks=6)
    disk.files.hang_next()
    restore = begin(store, ids_of(CHUNKS))
    until(lambda: disk.files.in_flight == 1)
    store.reset()
    assert restore.poll()
    assert set(restore.failed.values()) == {Failure.GONE}
    restore.release()
    assert store.begin_save(CHUNKS[0], SIZES) is None, "the read still owns every slot"
    disk.files.resume()
    until(lambda: disk.files.in_flight == 0)
    until(lambda: store.catalog.tiers.dram.num_used(DENSE) == 0)
    put(store, CHUNKS)
    assert store.flush(60)
    restore = begin(store, ids_of(CHUNKS))
    assert intact(store, restore)
    restore.release()
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 6
    store.close()


def test_reset_during_a_write_and_the_same_ids_again(bench: Bench, disk: Disk) -> None:
    store = bench.open()
    disk.files.hang_next()
    put(store, CHUNKS[:2])
    until(lambda: disk.files.in_flight == 1)
    store.reset()
    put(store, CHUNKS[:1])
    disk.files.resume()
    assert store.flush(60)
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 1
    assert_restored(store, CHUNKS[:1])
    store.check_integrity()
    store.close()


def test_reset_survives_a_restart(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    store.reset()
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 0
    store.close()


def test_close_writes_what_is_pending(bench: Bench) -> None:
    store = bench.open(spill_delay_s=1000.0)
    put(store, CHUNKS)
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 6
    store.close()


def test_close_with_a_read_that_never_ends_keeps_the_memory(bench: Bench, disk: Disk) -> None:
    store = on_ssd_only(bench)
    disk.files.hang_next()
    restore = begin(store, ids_of(CHUNKS))
    until(lambda: disk.files.in_flight == 1)
    view = store.arena.view
    started = time.monotonic()
    store.close(deadline_s=0.2)
    assert time.monotonic() - started < 10
    assert restore.poll()
    assert set(restore.failed.values()) == {Failure.CLOSED}
    assert store.arena.view is view, "a device may still write there"
    store.arena.close()


def test_a_second_engine_is_told_and_harms_nothing(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    with pytest.raises(StoreInUseError):
        Bench(bench.root, bench.disk).open()
    assert store.flush(60)
    store.close()


def test_a_deleted_journal_is_an_empty_store(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    path = next(bench.root.glob("*/journal.sqlite"))  # type: ignore[union-attr]
    store.close()
    for part in path.parent.glob("journal.sqlite*"):
        part.unlink()
    store = bench.open()
    assert stored(store, CHUNKS) == 0
    put(store, CHUNKS)
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 6
    store.close()


def test_recency_survives_a_restart(bench: Bench) -> None:
    old, used = chain("old", 2), chain("used", 2)
    store = bench.open()
    put(store, used)
    assert store.flush(60)
    put(store, old)
    assert store.flush(60)
    begin(store, ids_of(used)).release()
    store = restarted(bench, store, ssd_chunks=16)
    tiers = store.catalog.tiers
    with store.catalog.locked():
        while tiers.ssd.take(DENSE):  # type: ignore[union-attr]
            pass
        assert tiers.take_ssd(tiers.index.add(CHUNKS[0], DENSE, SIZES[DENSE]), None)
    assert len(store.match(old)) == 1, "its window went with it"
    assert store.match(used)[1].tiers == {DENSE: Tier.SSD, WINDOW: Tier.SSD}
    store.close()


def test_the_order_of_use_survives_a_clock_that_was_set_back(bench: Bench) -> None:
    """Across restarts, too: what was stored and used last leaves last."""
    first, used, last = chain("first", 1), chain("used", 1), chain("last", 1)
    with patch.object(journal_rows.time, "time", clock := Clock(2e9)):
        store = bench.open()
        for chunks in (used, first):
            put(store, chunks)
            assert store.flush(60)
        clock.passes(-86_400)
        store = restarted(bench, store)
        wait(begin(store, ids_of(used))).release()
        clock.passes(-86_400)
        store = restarted(bench, store)
        put(store, last)
        assert store.flush(60)
        store = restarted(bench, store)
    nodes = store.catalog.tiers.index.nodes
    order = [nodes[x[0].key].artifacts[DENSE].last_used for x in (first, used, last)]
    assert order == sorted(order)
    store.close()


def journal_rows_of(store: ArtifactStore) -> int:
    assert store.folder is not None
    journal = Journal.open_copy(store.folder / "journal.sqlite")
    try:
        return journal.count()
    finally:
        journal.close()


def test_a_session_is_forgotten_for_good_when_the_wait_for_it_ends(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(io_thread, "_IDLE_S", 3600.0)  # it is woken, or it would not come in time
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    until(lambda: snapshot(store.catalog).unsummed == 0)
    assert journal_rows_of(store) == 12
    assert store.forget_session("s", [CHUNKS[5].key]) == 6
    assert store.wait_forgotten(60)
    assert journal_rows_of(store) == 0
    store.close()


def test_a_session_whose_rows_are_being_written_is_not_forgotten_before_they_are(
    bench: Bench,
) -> None:
    entered, go_on, record = threading.Event(), threading.Event(), Journal.record

    def late(journal: Journal, rows: Sequence[JournalRow]) -> None:
        entered.set()
        assert go_on.wait(60)
        record(journal, rows)

    store = bench.open()
    with patch.object(Journal, "record", late):
        put(store, CHUNKS)
        flushing = threading.Thread(target=store.flush, args=(60,))
        flushing.start()
        assert entered.wait(60)
        assert store.forget_session("s", [CHUNKS[5].key]) == 6
        assert not store.wait_forgotten(0.05)
        go_on.set()
        assert store.wait_forgotten(60)
    assert journal_rows_of(store) == 0
    flushing.join()
    store.close()


def test_a_session_that_the_journal_cannot_forget_is_tried_again(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    with patch.object(Journal, "forget", side_effect=StoreError("database or disk is full")):
        store.forget_session("s", [CHUNKS[5].key])
        assert not store.wait_forgotten(0.1)
        until(lambda: "cause=io_error,tier=ssd" in bench.counts("heterocache_failures"))
        assert not store.wait_forgotten(0.0)
    assert store.wait_forgotten(60)
    assert journal_rows_of(store) == 0
    store.close()


def test_verify_all_with_ssd(bench: Bench) -> None:
    store = bench.open(verify="all")
    put(store, CHUNKS)
    assert store.flush(60)
    restore = wait(begin(store, ids_of(CHUNKS)))
    assert len(restore.offsets) == 12
    at = restore.offsets[ArtifactId(CHUNKS[2].key, WINDOW)]
    restore.release()
    store.arena.view[at] ^= 0x80
    restore = wait(begin(store, ids_of(CHUNKS)))
    assert restore.failed == {ArtifactId(CHUNKS[2].key, WINDOW): Failure.CHECKSUM}
    restore.release()
    store.check_integrity()
    store.close()


def test_an_artifact_found_bad_while_it_is_written_is_not_on_ssd_afterwards(
    bench: Bench, disk: Disk
) -> None:
    store = bench.open(verify="all")
    bad = ArtifactId(CHUNKS[0].key, DENSE)
    disk.files.hang_next()
    put(store, CHUNKS[:1])
    until(lambda: disk.files.in_flight == 1)
    store.arena.view[store.catalog.tiers.index.find(bad).dram_offset] ^= 1  # type: ignore[union-attr]
    restore = wait(begin(store, ids_of(CHUNKS[:1])))
    assert restore.failed[bad] is Failure.CHECKSUM
    restore.release()
    disk.files.resume()
    assert store.flush(60)
    store = restarted(bench, store)
    assert store.match(CHUNKS) == [], "a window alone is of no use"
    assert store.catalog.tiers.ssd.num_used(DENSE) == 0  # type: ignore[union-attr]
    store.close()


def test_a_dead_io_thread_is_a_miss_not_a_hang(
    bench: Bench, disk: Disk, caplog: pytest.LogCaptureFixture
) -> None:
    store = on_ssd_only(bench)
    with patch.object(MemoryFiles, "submit", side_effect=RuntimeError("a bug")):
        restore = wait(begin(store, ids_of(CHUNKS)))
        assert set(restore.failed.values()) == {Failure.IO_ERROR}
        restore.release()
        again = begin(store, ids_of(CHUNKS))
        assert again.poll()
        assert set(again.failed.values()) == {Failure.IO_ERROR}
    put(store, chain("b", 1))
    assert stored(store, chain("b", 1)) == 1
    assert "I/O thread ended" in caplog.text
    store.close()


def test_a_save_under_way_is_not_written_back(bench: Bench) -> None:
    store = bench.open()
    save = store.begin_save(CHUNKS[0], SIZES)
    assert save is not None
    assert store.flush(60)
    assert bench.counts("heterocache_ssd_written_bytes") == {}
    fill(store, save)
    store.complete_save(save)
    assert store.flush(60)
    assert bench.counts("heterocache_ssd_written_bytes") == {
        "state_type=dense_kv": SIZES[DENSE],
        "state_type=window_swa": SIZES[WINDOW],
    }
    store.close()


def test_pread_serves_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ssd", lambda memory, d: PreadFiles(memory, d.files))  # type: ignore[arg-type]
    store = bench.open()
    put(store, CHUNKS)
    store = restarted(bench, store)
    assert_restored(store, CHUNKS)
    store.close()


def test_reads_are_timed_for_the_cost_model(bench: Bench) -> None:
    store = on_ssd_only(bench)
    assert store.take_timings() == []
    wait(begin(store, ids_of(CHUNKS))).release()
    timings = store.take_timings()
    for kind, size in SIZES.items():
        assert sum(x.bytes_by_type.get(kind, 0) for x in timings) == len(CHUNKS) * size
    assert {x.tier for x in timings} == {Tier.SSD}
    assert all(x.seconds > 0 for x in timings)
    assert timings[0].ahead_bytes == 0
    assert store.take_timings() == []
    store.close()


def test_a_restore_that_is_given_up_teaches_the_cost_model(tmp_path: Path, disk: Disk) -> None:
    clock = Clock()
    store = on_ssd_only(Bench(tmp_path / "ssd", disk, clock), load_deadline_s=10.0)
    disk.files.hang_next()
    late = begin(store, ids_of(CHUNKS))
    until(lambda: disk.files.in_flight == 1)
    clock.passes(11.0)
    assert late.poll()
    (told,) = store.take_timings()
    assert told.bytes_by_type == {kind: len(CHUNKS) * size for kind, size in SIZES.items()}
    assert not told.whole
    assert told.seconds == 22.0, "nothing came in 11 s"
    disk.files.resume()
    late.release()
    store.close()


def test_one_stall_teaches_once_however_many_wait_for_it(tmp_path: Path, disk: Disk) -> None:
    clock = Clock()
    bench = Bench(tmp_path / "ssd", disk, clock)
    store = on_ssd_only(bench, load_deadline_s=10.0)
    disk.files.hang_next(100)
    waiting = [begin(store, ids_of(CHUNKS[i : i + 1])) for i in range(3)]
    clock.passes(11.0)
    assert all(restore.poll() for restore in waiting)
    (told,) = store.take_timings()
    assert told.seconds == 22.0
    clock.passes(1.0)
    later = begin(store, ids_of(CHUNKS[3:4]))
    clock.passes(11.0)
    assert later.poll()
    assert len(store.take_timings()) == 1, "it is as slow for one that began afterwards"
    disk.files.resume()
    for restore in [*waiting, later]:
        restore.release()
    store.close()


def no_locks(path: Path, mode: str) -> sqlite3.Connection:
    """Connect as on such a file system, where SQLite's own locks do not reach either."""
    create_private(path)
    uri = f"{path.absolute().as_uri()}?mode={mode}&vfs=unix-none"
    return sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)


def test_where_locks_do_not_reach_the_older_engine_stops_writing_and_nothing_wrong_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    older, newer = Bench(tmp_path, connect=no_locks), Bench(tmp_path, connect=no_locks)
    first, second = older.open(dram_chunks=4), newer.open(dram_chunks=4)
    assert second.catalog.tiers.ssd is not None
    put(first, chain("x", 3))
    assert first.flush(60) is False
    put(second, chain("y", 3))
    assert second.flush(60) is True
    put(first, chain("z", 1))
    assert first.flush(60) is False
    second.leave_to_ssd()
    for store, name in ((first, "x"), (second, "y")):
        restore = wait(begin(store, ids_of(chain(name, 3))))
        assert len(restore.offsets) == 6
        assert intact(store, restore)
        restore.release()
    first.close()
    put(second, chain("w", 2))
    assert second.flush(60) is True
    second.close()
    told = [r.getMessage() for r in caplog.records if "locks do not work" in r.getMessage()]
    assert len(told) == 2, "one line each"
    assert "SSD writes are disabled until restart" in told[0]
    assert "was still using" in told[1]
    again = Bench(tmp_path).open()
    assert stored(again, chain("y", 3)) == 3, "what the newer one wrote is whole"
    assert stored(again, chain("x", 3)) == 0
    again.close()


def test_after_a_power_cut_that_lost_a_deletion_the_row_fails_its_checksum(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    store = bench.open(ssd_chunks=2, dram_chunks=4)
    put(store, chain("a", 2))
    assert store.flush(60)
    model = next(path for path in tmp_path.iterdir() if path.is_dir())
    durable = {path: path.read_bytes() for path in model.glob("journal.sqlite*")}
    put(store, chain("b", 2))  # takes the slots of the first, whose rows are deleted
    assert store.flush(60)
    store.close()
    for path in model.glob("journal.sqlite*"):
        path.unlink()
    for path, content in durable.items():
        path.write_bytes(content)
    store = Bench(tmp_path).open(ssd_chunks=2, dram_chunks=4)
    assert stored(store, chain("a", 2)) == 2, "the rows are back"
    restore = wait(begin(store, ids_of(chain("a", 2))))
    assert set(restore.failed.values()) == {Failure.CHECKSUM}
    assert not restore.offsets
    restore.release()
    store.close()


def test_a_journal_row_of_another_size_than_its_artifact_has_is_a_miss(
    bench: Bench, disk: Disk
) -> None:
    """Its checksum may be right for the bytes that it names; those behind would be anybody's."""
    store = bench.open()
    put(store, CHUNKS[:2])
    save = store.begin_save(CHUNKS[2], {DENSE: 4_000, WINDOW: SIZES[WINDOW]})
    assert save is not None
    fill(store, save)
    store.complete_save(save)
    store.close()
    bench.size_of = lambda state_type, start, end: SIZES[state_type]
    store = bench.open()
    restore = wait(begin(store, ids_of(CHUNKS[:3])))
    assert restore.failed[ArtifactId(CHUNKS[2].key, DENSE)] is Failure.BAD_RECORD
    assert set(restore.failed) <= set(ids_of(CHUNKS[2:3])), "its checkpoint may go with it"
    assert intact(store, restore)
    restore.release()
    assert bench.counts("heterocache_failures")["cause=bad_record,tier=ssd"] == 1
    store = restarted(bench, store)
    assert stored(store, CHUNKS) == 2, "it is gone for good"
    store.close()


def test_what_is_read_for_others_is_ahead_and_is_looked_through_only_for_what_is_not_in_dram(
    bench: Bench,
) -> None:
    store = on_ssd_only(bench, run_io=False)
    put(store, others := chain("b", 2))
    assert store.bytes_ahead_of(store.match(CHUNKS)) == {}, "nothing is read"
    restore = begin(store, ids_of(CHUNKS[:2]))
    loads = store.catalog.loads
    with patch.object(loads, "ahead_of", wraps=loads.ahead_of) as looked:
        chunk = sum(SIZES.values())
        assert store.bytes_ahead_of(store.match(others)) == {Tier.SSD: 2 * chunk, Tier.PEER: 0}
        assert not looked.called
        found = [*store.match(others), *store.match(CHUNKS)[:1]]
        assert store.bytes_ahead_of(found) == {Tier.SSD: chunk, Tier.PEER: 0}
        assert [set(x.args[0]) for x in looked.call_args_list] == [{CHUNKS[0].key}]
    restore.abandon()
