from __future__ import annotations

import errno
import itertools
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange
from hetero_connector.errors import FormatError, StoreError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.ssd import journal_format as module
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_connection import connect
from hetero_connector.store.ssd.journal_format import (
    CorruptJournalError,
    JournalMeta,
    JournalRow,
    parse_meta,
)
from tests.store.filling import Bench, begin, chain, ids_of, intact, put, wait

KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA
SLOTS = {KV: 8192, SWA: 4096}
CUT = SlotGeometry(1, SLOTS, 8192, 99 * 8192)
"""A slot of each type, and 99 zones for one of dense state or two windows."""
META = JournalMeta(bytes(range(16)), CUT, {"model": "tiny"}, 5.0)


def row(n: int, state_type: StateType = KV, slot: int | None = None) -> JournalRow:
    key = ChunkKey(n.to_bytes(16, "little"))
    parent = ChunkKey((n - 1).to_bytes(16, "little")) if n > 1 else ROOT
    chunk = ChunkRange(key, parent, (n - 1) * 256, n * 256)
    digest = bytes([n % 256]) * 16
    return JournalRow(chunk, state_type, n if slot is None else slot, 3, 4096, digest, 1e9 + n, n)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


def test_what_the_last_engine_said_of_itself_is_kept(journal: Journal, path: Path) -> None:
    journal.record([row(1)])
    journal.close()
    newer = Journal.open(path, replace(META, description={"model": "tiny", "more": 1}))
    assert newer.meta.description == {"model": "tiny", "more": 1}
    newer.close()
    Journal.open(path, replace(META, description={})).close()
    read = Journal.open_existing(path, read_only=True)
    assert read.meta == replace(META, description={"model": "tiny", "more": 1})
    assert list(read.load()) == [row(1)]
    read.close()


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    journal = Journal.open(path, META)
    yield journal
    journal.close()


def test_rows_come_back_as_recorded_after_reopening(journal: Journal, path: Path) -> None:
    rows = [row(1), row(1, SWA), row(2), row(3)]
    journal.record(reversed(rows))
    journal.close()
    again = Journal.open(path, META)
    assert list(again.load()) == rows
    assert again.meta == META
    assert again.moved_aside is None
    again.close()


def test_recording_an_occupied_slot_replaces_its_row(journal: Journal) -> None:
    journal.record([row(1, slot=7), row(2)])
    journal.record([row(3, slot=7)])
    assert list(journal.load()) == [row(2), row(3, slot=7)]


def test_forget_touch_and_clear(journal: Journal) -> None:
    journal.record([row(1), row(2), row(2, SWA)])
    journal.forget([row(2).id, ArtifactId(ChunkKey(bytes(16)), KV)])
    journal.touch([(row(1).id, 2e9, 9), (row(2).id, 2e9, 9)])
    assert list(journal.load()) == [
        replace(row(1), last_access=2e9, reuse_count=9),
        row(2, SWA),
    ]
    journal.clear(b"g")
    assert list(journal.load()) == []


class JournalAgainstDict(RuleBasedStateMachine):
    """The journal behaves like a dict from id to row in which a slot has one owner."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.journal = Journal.open(path, META)
        self.rows: dict[ArtifactId, JournalRow] = {}

    @rule(n=st.integers(1, 6), state_type=st.sampled_from([KV, SWA]), slot=st.integers(0, 4))
    def record(self, n: int, state_type: StateType, slot: int) -> None:
        new = row(n, state_type, slot)
        self.journal.record([new])
        taken = [i for i, r in self.rows.items() if (r.state_type, r.slot) == (state_type, slot)]
        for i in taken:
            del self.rows[i]
        self.rows[new.id] = new

    @rule(n=st.integers(1, 6), state_type=st.sampled_from([KV, SWA]))
    def forget(self, n: int, state_type: StateType) -> None:
        gone = row(n, state_type).id
        self.journal.forget([gone])
        self.rows.pop(gone, None)

    @rule(slots=st.integers(1, 5))
    def resize(self, slots: int) -> None:
        small = replace(CUT, zones_bytes=(slots - 1) * 8192)
        gone = [i for i, r in self.rows.items() if r.slot >= small.num_slots(r.state_type)]
        assert self.journal.resize(small) == len(gone)
        for i in gone:
            del self.rows[i]
        assert self.journal.resize(CUT) == 0

    @invariant()
    def same_rows(self) -> None:
        assert {r.id: r for r in self.journal.load()} == self.rows

    def teardown(self) -> None:
        self.journal.close()


def test_journal_matches_a_model(tmp_path: Path) -> None:
    numbers = itertools.count()
    run_state_machine_as_test(
        lambda: JournalAgainstDict(tmp_path / f"{next(numbers)}.sqlite"),
        settings=settings(max_examples=10, stateful_step_count=15, deadline=None),
    )


@pytest.mark.parametrize(
    ("meta", "says"),
    [
        (replace(META, fingerprint=bytes(16)), "another model"),
        (replace(META, geometry=SlotGeometry(100, {KV: 4096, SWA: 4096})), "chunk_tokens"),
        (replace(META, geometry=SlotGeometry(100, {KV: 8192})), "chunk_tokens"),
    ],
)
def test_a_journal_of_something_else_is_refused_and_kept(
    journal: Journal, path: Path, meta: JournalMeta, says: str
) -> None:
    journal.record([row(1)])
    journal.close()
    with pytest.raises(FormatError, match=says):
        Journal.open(path, meta)
    assert _rows(path) == [row(1)]


def test_another_format_version_is_refused_with_what_to_do(journal: Journal, path: Path) -> None:
    table = META.as_table() | {"format_version": "1"}
    rows = table | {"digest": module.meta_digest(table)}
    journal._connection.executemany(
        "UPDATE meta SET value = ? WHERE key = ?", [(v, k) for k, v in rows.items()]
    )
    journal.close()
    with pytest.raises(FormatError, match=r"version 1.*delete this directory"):
        Journal.open(path, META)


@pytest.mark.parametrize(
    "slabs",
    [
        [],
        {"slot_bytes": 5},
        {"count": 0},
        {"count": 1e999},
        {"count": 1 << 50},
        {"slot_bytes": {}},
        {"slot_bytes": {"dense_kv": 0, "window_swa": 4096}},
        {"slot_bytes": {"dense_kv": 8192, "window_swa": 4097}},
        {"slot_bytes": {"later": 8192, "window_swa": 4096}},
        {"zone_bytes": 0},
        {"zone_bytes": 4096},
        {"zones_bytes": -8192},
        {"zones_bytes": "many"},
    ],
)
def test_an_impossible_cut_is_damage(path: Path, slabs: object) -> None:
    table = META.as_table()
    assert parse_meta(path, table) == META
    whole = json.loads(table["slabs"])
    table["slabs"] = json.dumps(whole | slabs if isinstance(slabs, dict) else slabs)
    table["digest"] = module.meta_digest(table)
    with pytest.raises(CorruptJournalError, match="meta table cannot be read"):
        parse_meta(path, table)


def test_a_journal_without_its_digest_is_damaged(path: Path) -> None:
    table = META.as_table()
    del table["digest"]
    with pytest.raises(CorruptJournalError, match="digest"):
        parse_meta(path, table)


def spoil_header(path: Path) -> None:
    path.write_bytes(b"not a database at all" * 300)


def spoil_pages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for page in range(1, len(data) // 4096):
        data[page * 4096 : page * 4096 + 64] = b"\xff" * 64
    path.write_bytes(data)


def spoil_by_truncation(path: Path) -> None:
    os.truncate(path, 4096 + 100)


def spoil_by_emptying(path: Path) -> None:
    os.truncate(path, 0)


def spoil_schema(path: Path) -> None:
    path.unlink()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE other (x)")
    connection.close()


def spoil_meta(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("UPDATE meta SET value='{' WHERE key='slabs'")
    connection.commit()
    connection.close()


@pytest.mark.parametrize(
    "spoil",
    [spoil_header, spoil_pages, spoil_by_truncation, spoil_by_emptying, spoil_schema, spoil_meta],
)
def test_a_damaged_journal_is_moved_aside_and_an_empty_one_starts(path: Path, spoil) -> None:
    journal = Journal.open(path, META)
    journal.record([row(n) for n in range(1, 90)])
    journal.close()
    spoil(path)
    with pytest.raises(CorruptJournalError, match="journal"):
        Journal.open_existing(path)
    fresh = Journal.open(path, META)
    assert list(fresh.load()) == []
    assert fresh.moved_aside is not None
    assert fresh.moved_aside.exists()
    assert fresh.moved_aside.name.startswith("journal.corrupt-")
    fresh.record([row(1)])
    fresh.close()
    assert [r.id for r in _rows(path)] == [row(1).id]


def test_only_the_last_damaged_journal_is_kept(path: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        path.with_name(f"journal.corrupt-20260101-000000{suffix}").touch()
    foreign = path.with_name("journal.corrupt-directory")
    foreign.mkdir()
    journal = Journal.open(path, META)
    journal.record([row(1)])
    aside = journal.condemn()
    kept = {foreign, aside, aside.with_name(f"{aside.name}-wal")}
    assert set(path.parent.glob("journal.corrupt-*")) == kept
    journal.close()


def _rows(path: Path) -> list[JournalRow]:
    journal = Journal.open_existing(path, read_only=True)
    try:
        return list(journal.load())
    finally:
        journal.close()


def test_rows_that_make_no_sense_are_left_out(journal: Journal) -> None:
    journal.record([row(1), row(2), row(3), row(4, slot=100), replace(row(5), size_bytes=8193)])
    journal._connection.execute("UPDATE artifacts SET state_type='later' WHERE slot=1")
    journal._connection.execute("UPDATE artifacts SET checksum=x'00' WHERE slot=2")
    assert list(journal.load()) == [row(3)]


@pytest.mark.parametrize(
    "damage",
    [
        "generation=-1", "generation='x'", "generation=x'00'", "reuse_count=-1",
        "reuse_count='often'", "last_access='yesterday'", "last_access=9e999",
        "checksum='0123456789abcdef'", "slot=0.5",
    ],
)  # fmt: skip
def test_a_row_with_a_damaged_value_is_left_out(journal: Journal, damage: str) -> None:
    journal.record([row(1), row(2)])
    journal._connection.execute(f"UPDATE artifacts SET {damage} WHERE slot=1")
    assert list(journal.load()) == [row(2)]


def test_a_journal_that_was_moved_aside_has_nothing_to_forget(journal: Journal, path: Path) -> None:
    journal.record([row(1), row(2)])
    aside = journal.condemn()
    journal.check_owner = lambda: pytest.fail("it writes")
    journal.forget([row(1).id])
    journal.clear(b"another")
    assert journal.count() == 2
    journal.close()
    assert aside.exists()
    assert not path.exists()


def test_a_stale_wal_beside_a_deleted_journal_is_not_replayed(journal: Journal, path: Path) -> None:
    journal.record([row(1)])
    wal = path.with_name("journal.sqlite-wal")
    saved = wal.read_bytes()
    assert saved
    journal.close()
    path.unlink()
    wal.write_bytes(saved)
    assert list(Journal.open(path, META).load()) == []


def test_a_full_disk_is_a_store_error_and_loses_nothing(journal: Journal) -> None:
    journal.record([row(1)])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    old = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        with pytest.raises(StoreError, match="journal"):
            journal.record([row(n) for n in range(2, 99)])
        with pytest.raises(StoreError, match="journal"):
            journal.forget([row(1).id])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, old)
    assert list(journal.load()) == [row(1)]
    journal.record([row(2)])
    assert list(journal.load()) == [row(1), row(2)]


def _record_until_killed(path: Path, progress) -> None:
    journal = Journal.open(path, META)
    for n in range(1, 100):
        journal.record([row(n), row(n, SWA)])
        progress.send(n)
    signal.pause()


def test_what_was_committed_survives_kill_9_whole(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    writer = context.Process(target=_record_until_killed, args=(path, send))
    writer.start()
    while receive.recv() < 20:
        pass
    writer.kill()
    writer.join()
    committed = 20
    while receive.poll():
        committed = receive.recv()
    journal = Journal.open(path, META)
    assert journal.moved_aside is None
    rows = list(journal.load())
    assert len(rows) in (2 * committed, 2 * committed + 2)
    journal.close()


def test_a_journal_that_cannot_be_created_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="journal"):
        Journal.open(tmp_path / "missing" / "journal.sqlite", META)
    (tmp_path / "journal.sqlite").mkdir()
    with pytest.raises(StoreError, match="journal"):
        Journal.open(tmp_path / "journal.sqlite", META)


def test_used_after_close_is_a_store_error(journal: Journal) -> None:
    journal.close()
    with pytest.raises(StoreError):
        journal.record([row(1)])
    with pytest.raises(StoreError):
        list(journal.load())


def _record_for_ever(path: Path, ready) -> None:
    journal = Journal.open(path, META)
    journal.record([row(1)])
    ready.send(True)
    for n in itertools.count():
        journal.record([row(1 + n % 97), row(1 + n % 97, SWA)])
        if n % 50 == 49:
            journal._connection.execute("PRAGMA wal_checkpoint(RESTART)")


@pytest.fixture
def writer(path: Path) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that writes the journal at `path` all the time."""
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_record_for_ever, args=(path, send))
    process.start()
    assert receive.recv()
    yield process
    process.kill()
    process.join()


def test_a_journal_is_read_while_another_process_writes_it(
    path: Path, writer: multiprocessing.process.BaseProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent))
    for _ in range(20):
        journal = Journal.open_copy(path)
        rows = list(journal.load())
        assert rows
        assert all(r == row(r.chunk.end // 256, r.state_type) for r in rows)
        journal.close()
    assert writer.is_alive()
    assert not list(path.parent.glob("heterocache-journal-*")), "the copies are removed"


def test_a_journal_that_is_always_written_anew_is_copied_so_often_and_no_more(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(path.parent))
    wal, copied, copyfile = path.with_name(f"{path.name}-wal"), list[Path](), shutil.copyfile
    path.touch()
    wal.touch()

    def overtaken(source: Path, target: Path) -> None:
        copyfile(source, target)
        copied.append(target)
        assert len(copied) < 1000, "it goes on for ever"
        wal.write_bytes(len(copied).to_bytes(32))

    monkeypatch.setattr(shutil, "copyfile", overtaken)
    with pytest.raises(StoreError, match="try again when the engine stores less"):
        Journal.open_copy(path)
    assert not list(path.parent.glob("heterocache-journal-*")), "the copies are removed"


@pytest.mark.parametrize("room", ["a full folder", "no folder"])
def test_a_copy_that_has_no_room_is_no_error_of_the_journal(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str
) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    journal = Journal.open(path, META)
    journal.record([row(1)])
    folder = tmp_path / "copies"
    if room == "a full folder":
        folder.mkdir()
        monkeypatch.setattr(shutil, "copyfile", full)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with pytest.raises(StoreError, match=f"^no copy of {path}.*{folder}.*set TMPDIR"):
        Journal.open_copy(path)
    assert not list(folder.rglob("*"))
    journal.close()


def test_a_second_writer_is_told_that_the_journal_is_in_use(
    path: Path, writer: multiprocessing.process.BaseProcess
) -> None:
    with pytest.raises(StoreError, match="locked") as caught:
        Journal.open_existing(path)
    assert not isinstance(caught.value, CorruptJournalError)


def _serve_while_files_are_truncated(root: Path) -> None:
    store = Bench(root).open()
    put(store, chain("a", 4))
    assert store.flush(60)
    for file in root.rglob("journal.sqlite-*"):
        os.truncate(file, 0)
    put(store, chain("b", 4))
    store.flush(60)
    assert len(store.match(chain("b", 4))) == 4
    store.close()


def test_a_truncated_index_or_log_of_sqlite_does_not_end_the_process(tmp_path: Path) -> None:
    """SQLite maps its file `-shm`: a process that reads beyond its end dies of SIGBUS."""
    child = multiprocessing.get_context("fork").Process(
        target=_serve_while_files_are_truncated, args=(tmp_path,)
    )
    child.start()
    child.join(60)
    assert child.exitcode == 0
    store = Bench(tmp_path).open()
    chunks = chain("a", 4) + chain("b", 4)
    restore = wait(begin(store, ids_of([found.chunk for found in store.match(chunks)])))
    assert intact(store, restore)
    store.close()


def test_a_journal_talks_to_its_file_only_through_the_connection_it_is_given(
    tmp_path: Path,
) -> None:
    """So that a test can put a bad disk under it."""
    opened = []

    def noted(path: Path, mode: str) -> sqlite3.Connection:
        opened.append((path.name, mode))
        return connect(path, mode)

    path = tmp_path / "journal.sqlite"
    Journal.open(path, META, noted).close()
    Journal.open(path, META, noted).close()
    Journal.open_existing(path, read_only=True, connect=noted).close()
    assert opened == [(path.name, "rwc"), (path.name, "rw"), (path.name, "ro&immutable=1")]


def test_a_file_that_cannot_be_connected_to_is_a_store_error(tmp_path: Path) -> None:
    def broken(path: Path, mode: str) -> sqlite3.Connection:
        raise sqlite3.OperationalError("disk I/O error")

    with pytest.raises(StoreError, match="disk I/O error"):
        Journal.open(tmp_path / "journal.sqlite", META, broken)
