"""A disk, a journal or a thread that never answers costs what it was asked for, nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.errors import StoreError
from hetero_connector.metrics import GAUGES
from hetero_connector.store import io_thread
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, Wanted
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.io_thread import SsdIo
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd import health, journal_rows, reader
from hetero_connector.store.ssd import writer as spilling
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.transfer.base import TransferState
from tests.clock import Clock
from tests.store.filling import (
    DENSE,
    SIZES,
    Bench,
    Beside,
    Disk,
    begin,
    chain,
    ids_of,
    put,
    stored,
    wait,
)
from tests.store.under_way import snapshot
from tests.transfer.memory_files import MemoryFiles, MemoryTransfer
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

CHUNKS = chain("a", 8)


class Driven:
    """A store whose I/O thread runs step by step, on a clock that a test moves."""

    def __init__(self, root: Path, **options: object) -> None:
        self.disk, self.clock, self.beside = Disk(), Clock(), Beside()
        self.bench = Bench(root, self.disk, self.clock)
        self.store = self.bench.open(run_io=False, **options)  # type: ignore[arg-type]
        self.catalog = self.store.catalog
        assert self.store.io_thread is not None
        self.io_thread = self.store.io_thread

    def rounds(self, count: int = 50) -> None:
        for _ in range(count):
            self.io_thread.step()

    def on_ssd_only(self, chunks: list[ChunkRange]) -> None:
        for chunk in chunks:
            put(self.store, [chunk])
            self.rounds()
        self.store.leave_to_ssd()
        assert self.store.catalog.tiers.dram.num_used(DENSE) == 0

    def restore(self, chunks: list[ChunkRange]) -> Restore:
        restore = begin(self.store, ids_of(chunks))
        self.rounds()
        return restore

    def hang_reads(self, chunks: list[ChunkRange]) -> None:
        """Reads of these chunks never end, and nobody waits for them any more."""
        for chunk in chunks:
            self.disk.files.hang_next()
            self.restore([chunk]).release()
            self.clock.passes(self.catalog.config.load_deadline_s)
            self.rounds()

    @property
    def taken_slots(self) -> int:
        """Slots of dense state that hold something, or that a transfer may still touch."""
        pool = self.store.catalog.tiers.dram
        return pool.num_used(DENSE) + pool.num_quarantined(DENSE)

    def gauge(self, name: str) -> float:
        self.clock.passes(1.0)
        self.store.publish_gauges()
        payload = self.bench.recorder.drain() or {}
        return float(payload[GAUGES][f"{name}{{}}"])

    def close(self) -> None:
        self.disk.files.resume()
        self.beside.resume()
        self.store.check_integrity()
        self.io_thread.start()
        self.store.close()


@pytest.fixture
def driven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    driven = Driven(tmp_path / "ssd", dram_chunks=8, ssd_chunks=400)
    monkeypatch.setattr(journal_rows, "in_background", driven.beside)
    yield driven
    driven.close()


def joined(root: Path, disk: Disk) -> tuple[Bench, ArtifactStore]:
    """A store whose fleet never says whose anything is."""
    bench, network = Bench(root, disk), MemoryNetwork()
    access = PeerAccess(KnownPeers(), lambda regions: MemoryPeers(network, regions))
    store = bench.open(peers=access)
    assert store.sharing is not None
    store.sharing.serve_under(7)
    return bench, store


def test_a_read_that_never_ends_stops_no_write_and_no_checksum(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    driven.on_ssd_only(CHUNKS[:2])
    with caplog.at_level(logging.WARNING, logger="vllm.heterocache"):
        driven.hang_reads(CHUNKS[:1])
    assert len(caplog.records) == 1
    assert "a read has not ended after 10 s" in caplog.text
    assert driven.catalog.late_bytes == 12_288 + 4_096
    for i in range(20):
        put(driven.store, chain(f"b{i}", 1))
        driven.rounds()
    assert driven.catalog.writes.is_drained
    artifacts = list(driven.store.catalog.tiers.index.artifacts())
    assert len(artifacts) == 2 * 22
    assert all(a.checksum is not None and a.ssd is not None for a in artifacts)
    driven.disk.files.resume()
    driven.rounds()
    assert driven.catalog.late_bytes == 0
    assert driven.taken_slots == driven.store.catalog.tiers.dram.num_used(DENSE)


def test_a_write_that_never_ends_keeps_a_quarter_of_the_dram_at_most(driven: Driven) -> None:
    for chunk in CHUNKS:  # all of the tier is due in one round
        put(driven.store, [chunk])
    driven.disk.files.hang_next()
    driven.rounds(2)
    driven.clock.passes(61.0)
    driven.rounds()
    assert not driven.catalog.writes.is_writable
    put(driven.store, chain("b", 6))
    restore = driven.restore(chain("b", 6))
    assert restore.poll()
    assert not restore.failed
    restore.release()


def test_a_restore_gives_up_when_its_own_time_is_over(driven: Driven) -> None:
    driven.on_ssd_only(CHUNKS[:1])
    driven.disk.files.hang_next()
    found = driven.store.match(CHUNKS[:1])
    restore = driven.store.begin_restore([Wanted(DENSE, found)], within_s=0.5)
    driven.rounds()
    driven.clock.passes(0.49)
    assert not restore.poll()
    driven.clock.passes(0.01)
    assert restore.poll()
    assert restore.failed == {ArtifactId(CHUNKS[0].key, DENSE): Failure.DEADLINE}
    restore.abandon()


def test_what_a_late_read_brings_at_last_is_kept_and_until_then_nobody_waits_for_it(
    driven: Driven,
) -> None:
    driven.on_ssd_only(CHUNKS[:2])
    driven.hang_reads(CHUNKS[:1])
    again = driven.restore(CHUNKS[:2])
    assert again.poll()
    assert again.failed == dict.fromkeys(ids_of(CHUNKS[:1]), Failure.DEADLINE)
    again.release()
    driven.disk.files.resume()
    driven.rounds()
    third = begin(driven.store, ids_of(CHUNKS[:2]))
    assert third.poll()
    assert not third.failed
    third.release()


def test_after_three_reads_that_never_end_none_is_begun_until_one_has(driven: Driven) -> None:
    driven.on_ssd_only(CHUNKS)
    driven.hang_reads(CHUNKS[:3])
    assert not driven.catalog.ssd_readable
    assert driven.gauge("heterocache_ssd_readable") == 0
    assert driven.gauge("heterocache_ssd_quarantined_bytes") == 3 * (12_288 + 4_096)
    refused = begin(driven.store, ids_of(CHUNKS[3:4]))
    assert refused.poll()
    assert set(refused.failed.values()) == {Failure.IO_ERROR}
    refused.release()
    put(driven.store, chain("b", 2))
    driven.rounds()
    assert driven.catalog.writes.is_drained, "writes go on"
    driven.disk.files.resume()
    driven.rounds()
    assert driven.gauge("heterocache_ssd_readable") == 1
    again = driven.restore(CHUNKS[3:5])
    assert again.poll()
    assert not again.failed
    again.release()


def test_reads_are_tried_again_a_minute_later_and_one_that_hangs_is_enough_then(
    driven: Driven,
) -> None:
    driven.on_ssd_only(CHUNKS)
    driven.hang_reads(CHUNKS[:3])
    driven.clock.passes(60.0)
    driven.rounds()
    assert driven.catalog.ssd_readable
    driven.hang_reads(CHUNKS[3:4])
    assert not driven.catalog.ssd_readable
    driven.clock.passes(60.0)
    driven.rounds()
    restore = driven.restore(CHUNKS[4:6])
    assert not restore.failed
    restore.release()
    driven.hang_reads(CHUNKS[6:7])
    assert driven.catalog.ssd_readable, "two have succeeded since"


def test_a_disk_that_cannot_be_read_for_long_has_one_line_in_the_log(
    driven: Driven, caplog: pytest.LogCaptureFixture
) -> None:
    driven.on_ssd_only(CHUNKS)
    with caplog.at_level(logging.ERROR, logger="vllm.heterocache"):
        for chunks in (CHUNKS[:3], CHUNKS[3:4], CHUNKS[4:5]):
            driven.hang_reads(chunks)
            assert not driven.catalog.ssd_readable
            driven.clock.passes(60.0)
            driven.rounds()
        assert len(caplog.records) == 1
        driven.restore(CHUNKS[5:6]).release()
        driven.disk.files.resume()
        driven.rounds()
        driven.store.leave_to_ssd()
        driven.hang_reads(CHUNKS[:3])
    assert len(caplog.records) == 2, "a read has succeeded since"


def test_dram_that_hung_reads_keep_back_is_bounded(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "_MAX_LATE_BYTES", 2 * (12_288 + 4_096))
    driven.on_ssd_only(CHUNKS)
    for chunk in CHUNKS[:6]:
        driven.hang_reads([chunk])
        other = driven.restore(CHUNKS[7:])
        other.release()
        driven.store.leave_to_ssd()
        driven.clock.passes(60.0)
        driven.rounds()
    assert driven.catalog.late_bytes == 2 * (12_288 + 4_096)
    assert driven.taken_slots == 2


def test_reads_that_all_end_late_have_one_line_in_the_log(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(health, "_MAX_LATE_BYTES", 1)
    driven.on_ssd_only(CHUNKS)
    with caplog.at_level(logging.ERROR, logger="vllm.heterocache"):
        for chunk in CHUNKS[:5]:
            driven.hang_reads([chunk])
            assert not driven.catalog.ssd_readable
            driven.disk.files.resume()
            driven.rounds()
            assert driven.catalog.ssd_readable, "it has ended"
    assert len(caplog.records) == 1


def test_a_write_that_has_waited_for_a_second_goes_beside_reads_and_its_checksum_at_once(
    driven: Driven,
) -> None:
    driven.on_ssd_only(CHUNKS[:1])
    driven.disk.files.hang_next()
    reading = driven.restore(CHUNKS[:1])
    put(driven.store, chain("b", 1))
    driven.rounds()
    fresh = driven.store.catalog.tiers.index.find(ids_of(chain("b", 1))[0])
    assert fresh is not None
    assert fresh.checksum is not None
    assert fresh.ssd is None, "reads come first"
    driven.clock.passes(1.0)
    driven.rounds()
    assert fresh.ssd is not None
    reading.release()


@pytest.mark.parametrize("calls_before", [0, 1])
def test_a_journal_that_hangs_costs_no_restore_and_no_slot(
    driven: Driven, caplog: pytest.LogCaptureFixture, calls_before: int
) -> None:
    """Before the write of a batch, or when its rows are added."""
    driven.on_ssd_only(CHUNKS[:5])
    driven.beside.hang_after(calls_before)
    put(driven.store, chain("x", 1))
    driven.rounds()
    for chunk in CHUNKS[:5]:
        restore = driven.restore([chunk])
        assert restore.poll()
        assert not restore.failed
        restore.release()
    assert driven.store.begin_save(chain("new", 1)[0], SIZES) is not None
    with caplog.at_level(logging.WARNING, logger="vllm.heterocache"):
        driven.clock.passes(60.0)
        driven.rounds()
        assert driven.gauge("heterocache_ssd_writable") == 0
        put(driven.store, chain("y", 1))
        driven.rounds()
        assert not len(driven.catalog.writes), "nothing queues up"
        driven.beside.resume()
        driven.rounds()
    assert [r.levelno for r in caplog.records] == [logging.ERROR, logging.WARNING]
    assert driven.gauge("heterocache_ssd_writable") == 1
    assert driven.catalog.writes.is_drained
    for name in "xy":
        assert all(
            a.ssd is not None
            for a in driven.store.catalog.tiers.index.nodes[
                chain(name, 1)[0].key
            ].artifacts.values()
        ), "written, or written again, when the disk is back"


def test_a_write_that_hangs_pauses_writing_until_it_ends(driven: Driven) -> None:
    driven.disk.files.hang_next()
    put(driven.store, CHUNKS[:1])
    driven.rounds()
    driven.clock.passes(60.0)
    driven.rounds()
    assert driven.gauge("heterocache_ssd_writable") == 0
    assert driven.store.flush(60.0) is False, "and at once: there is nothing to wait for"
    put(driven.store, CHUNKS[1:2])
    driven.rounds()
    driven.disk.files.resume()
    driven.rounds()
    assert driven.gauge("heterocache_ssd_writable") == 1
    assert all(a.ssd is not None for a in driven.store.catalog.tiers.index.artifacts())


def test_a_write_that_ends_right_after_its_deadline_is_made_again(
    driven: Driven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same round: nothing has paused, so nothing is queued by a pause's end."""
    poll = MemoryTransfer.poll

    def slowly(transfer: MemoryTransfer) -> TransferState:
        state = poll(transfer)
        if transfer.hung:
            driven.clock.passes(60.0)
            transfer.hung = False
        return state

    monkeypatch.setattr(MemoryTransfer, "poll", slowly)
    driven.disk.files.hang_next()
    put(driven.store, CHUNKS[:1])
    driven.rounds()
    assert driven.catalog.writes.is_writable
    put(driven.store, CHUNKS[1:2])
    driven.clock.passes(1.0)
    driven.rounds()
    artifacts = list(driven.store.catalog.tiers.index.artifacts())
    assert len(artifacts) == 2 * len(SIZES)
    assert all(a.ssd is not None for a in artifacts)


def test_files_that_are_deleted_while_the_journal_is_busy_are_noticed(driven: Driven) -> None:
    driven.beside.hang_after(0)
    put(driven.store, CHUNKS[:1])
    driven.rounds()
    with patch.object(SsdDirectory, "why_lost", return_value="its files were deleted"):
        driven.io_thread.housekeep()
        driven.beside.resume()
        driven.rounds()
    assert not driven.catalog.writes.is_writable


@pytest.mark.parametrize("hangs", ["record", "forget", "touch", "close"])
def test_close_ends_within_its_deadline_though_the_journal_hangs(
    bench: Bench, hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = bench.open(ssd_chunks=2)
    put(store, CHUNKS[:2])
    assert store.flush(60)
    wait(begin(store, ids_of(CHUNKS[:2]))).release()
    gate = threading.Event()
    with patch.object(Journal, hangs, lambda *args: gate.wait(60)):
        put(store, chain("x", 1))
        began_s = time.monotonic()
        store.close(deadline_s=0.2)
        assert time.monotonic() - began_s < 20, "the journal hangs for a minute"
        gate.set()
    assert "stay open until exit" in caplog.text
    with pytest.raises(StoreError, match="after it was closed"):
        _ = store.arena.view


def test_a_thread_that_hangs_in_the_kernel_costs_one_deadline_and_no_slot(driven: Driven) -> None:
    driven.on_ssd_only(CHUNKS)
    driven.catalog.step_began_s = driven.clock()  # a step that does not end
    waiting = [begin(driven.store, ids_of([chunk])) for chunk in CHUNKS]
    assert driven.taken_slots == 8
    driven.clock.passes(10.0)
    assert all(restore.poll() for restore in waiting)
    assert driven.taken_slots == 0
    refused = begin(driven.store, ids_of(CHUNKS[:1]))
    assert refused.poll(), "nobody waits a second time"
    assert driven.gauge("heterocache_io_alive") == 0
    put(driven.store, chain("b", 8))
    for restore in (*waiting, refused):
        restore.release()
    driven.rounds()
    assert driven.gauge("heterocache_io_alive") == 1
    restore = driven.restore(CHUNKS[:1])
    assert not restore.failed
    restore.release()


def test_a_restore_that_is_let_go_in_the_queue_frees_its_slots_at_once(driven: Driven) -> None:
    driven.on_ssd_only(CHUNKS)
    restore = begin(driven.store, ids_of(CHUNKS))
    assert driven.taken_slots == 8
    restore.release()
    assert driven.taken_slots == 0
    assert not driven.catalog.loads.any_queued
    assert not driven.catalog.loads.by_artifact


def test_what_is_forgotten_leaves_every_queue(driven: Driven) -> None:
    for i in range(40):
        put(driven.store, chain(f"b{i}", 1))
    assert len(driven.catalog.writes) == driven.catalog.writes.num_unsummed == 2 * 8
    begin(driven.store, ids_of(chain("b39", 1))).release()
    assert len(driven.catalog._used) == 2
    driven.store.reset()
    now = snapshot(driven.store.catalog)
    assert (now.writes_queued, now.unsummed, now.pending_claims, now.loads_queued) == (0,) * 4
    assert not driven.catalog._used


def test_a_bug_of_the_io_thread_leaves_dram_whole(bench: Bench) -> None:
    store = bench.open(dram_chunks=8)
    for chunk in CHUNKS:
        put(store, [chunk])
        assert store.flush(60)
    store.leave_to_ssd()
    with patch.object(MemoryFiles, "submit", side_effect=RuntimeError("a bug")):
        restores = [begin(store, ids_of([chunk])) for chunk in CHUNKS]
        until(lambda: not store.catalog.io_alive)
    assert all(wait(restore).failed for restore in restores)
    for restore in restores:
        restore.release()
    taken = store.catalog.tiers.dram.num_used(DENSE)
    assert taken <= 8, "at most what was under way"
    put(store, chain("b", 8 - taken))
    restore = begin(store, ids_of(chain("b", 8 - taken)))
    assert restore.poll()
    assert not restore.failed
    restore.release()
    gauges = (bench.recorder.drain() or {})[GAUGES]
    assert gauges["heterocache_io_alive{}"] == 0
    assert gauges["heterocache_ssd_writable{}"] == gauges["heterocache_ssd_readable{}"] == 0
    began_s = time.monotonic()
    store.close(deadline_s=60.0)
    assert time.monotonic() - began_s < 30, "nothing is waited for"


def test_a_fleet_engine_that_may_not_write_flushes_and_closes_at_once(
    tmp_path: Path, disk: Disk
) -> None:
    _, store = joined(tmp_path / "ssd", disk)
    put(store, CHUNKS[:2])
    until(lambda: len(store.catalog.writes.claims._until_s) == 4)
    assert store.io_thread is not None
    store.io_thread.ssd.health.give_up("files deleted")
    began_s = time.monotonic()
    assert store.flush(60.0) is False
    store.close(deadline_s=60.0)
    assert time.monotonic() - began_s < 30, "nothing is waited for"


def test_a_fleet_engine_closes_its_journal_and_then_waits_for_its_peer_process(
    tmp_path: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close_ssd = list[str](), SsdIo.close

    def close_files(ssd: SsdIo, timeout_s: float) -> bool:
        closed.append("files")
        return close_ssd(ssd, timeout_s)

    def end_process(*_: object) -> bool:
        time.sleep(0.2)
        closed.append("process")
        return True

    monkeypatch.setattr(io_thread, "_IDLE_S", 0.01)
    monkeypatch.setattr(io_thread, "_PROCESS_END_S", 60.0)
    monkeypatch.setattr(SsdIo, "close", close_files)
    monkeypatch.setattr(MemoryPeers, "close", end_process)
    _, store = joined(tmp_path / "ssd", disk)
    store.close(0.0)
    assert closed == ["files", "process"]
    with pytest.raises(StoreError, match="after it was closed"):
        _ = store.arena.view


@pytest.mark.parametrize("healed", [True, False])
def test_close_writes_everything_though_writing_has_paused_if_the_disk_is_back(
    bench: Bench, disk: Disk, healed: bool
) -> None:
    store = bench.open()
    disk.files.fail_next(1000)
    put(store, CHUNKS[:2])
    until(lambda: not store.catalog.writes.is_writable)
    put(store, CHUNKS[2:4])
    if healed:
        disk.files._failures.clear()
    began_s = time.monotonic()
    store.close(deadline_s=60.0)
    assert time.monotonic() - began_s < 30, "one more attempt, and no more"
    disk.files._failures.clear()
    store = bench.open()
    assert stored(store, CHUNKS) == (4 if healed else 0)
    store.close()


def test_a_stall_is_told_once_and_ends_with_what_hung(
    driven: Driven, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(spilling, "_DEADLINE_S", 5.0)
    with caplog.at_level(logging.ERROR, logger="vllm.heterocache"):
        for _ in range(3):
            driven.disk.files.hang_next()
            put(driven.store, [driven_chunk()])
            driven.rounds()
            for _ in range(3):
                driven.clock.passes(5.0)
                driven.rounds()
            driven.disk.files.resume()
            driven.rounds()
            assert driven.catalog.writes.is_writable
    assert len(caplog.records) == 3


_names = iter(range(1000))


def driven_chunk() -> ChunkRange:
    return chain(f"n{next(_names)}", 1)[0]


def test_more_restores_than_the_disk_can_serve_are_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each would wait for nearly as long as it may, and then be thrown away half read."""
    driven = Driven(tmp_path / "ssd", dram_chunks=40, ssd_chunks=40)
    monkeypatch.setattr(journal_rows, "in_background", driven.beside)
    monkeypatch.setattr(reader, "_IN_FLIGHT_BYTES", 1)
    monkeypatch.setattr(reader, "_BATCH_BYTES", 10_000)
    chunks = [chain(f"session {i}", 1)[0] for i in range(40)]
    driven.on_ssd_only(chunks)

    def a_second_passes() -> None:
        """In which the disk reads one chunk."""
        driven.disk.files.hang_next()
        driven.io_thread.step()
        driven.clock.passes(1.0)
        driven.disk.files.resume()
        driven.io_thread.step()

    first = begin(driven.store, ids_of(chunks[:1]))
    while not first.poll():
        a_second_passes()
    waiting = [begin(driven.store, ids_of([chunk])) for chunk in chunks[1:]]
    refused = [r for r in waiting if r.poll()]
    assert all(set(r.failed.values()) == {Failure.CONGESTED} for r in refused)
    assert 3 <= len(waiting) - len(refused) <= 8, "what can be read in half the deadline"
    for _ in range(10):
        a_second_passes()
        assert all(r.poll() or not r.failed for r in waiting)
    assert all(r.poll() for r in waiting)
    assert Failure.DEADLINE not in {f for r in waiting for f in r.failed.values()}
    again = begin(driven.store, ids_of(chunks[-1:]))
    a_second_passes()
    assert again.poll()
    assert not again.failed, "once the queue is shorter they are read again"
    for restore in (first, again, *waiting):
        restore.release()
    driven.close()
