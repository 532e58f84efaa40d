"""The faulty disk does what disks do: else the machine would prove nothing."""

from __future__ import annotations

import errno
import os
import sqlite3
import threading
from pathlib import Path

import numpy as np
import pytest

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.transfer.base import Direction, Extent, TransferState
from tests.faults.disk import Cut, Disk, Fate, Weather
from tests.faults.journals import connector
from tests.faults.slabs import FaultyFiles, faulty_files

KIND = StateType.DENSE_KV
BLOCK = 4096


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    (tmp_path / "disk").mkdir()
    disk = Disk(seed=1)
    disk.mount(tmp_path / "disk")
    return disk


class Slab:
    """One slab of eight blocks, written by way of the faulty transfer."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk = disk
        self.directory = SsdDirectory.open(root / "disk", b"f" * 16, {KIND: BLOCK}, 9 * 5120)
        self.memory = np.zeros(BLOCK, np.uint8)
        self.files = FaultyFiles(disk, self.memory, self.directory)

    def move(self, direction: Direction, block: int, value: int = 0) -> TransferState:
        self.memory[:] = value
        transfer = self.files.submit(direction, [Extent(0, block * BLOCK, 0, BLOCK)])
        for _ in range(5):
            transfer.poll()
        return transfer.poll()

    def write(self, block: int, value: int) -> TransferState:
        return self.move(Direction.WRITE, block, value)

    def sync(self) -> None:
        with faulty_files(self.disk):
            self.directory.sync()

    def kept(self, block: int) -> set[int]:
        path = next(self.disk.image.rglob("*.slab"))
        return set(path.read_bytes()[block * BLOCK : (block + 1) * BLOCK])


@pytest.fixture
def slab(disk: Disk, tmp_path: Path) -> Slab:
    return Slab(disk, tmp_path)


def test_a_power_cut_takes_what_was_not_synced_and_nothing_else(slab: Slab) -> None:
    slab.write(0, 1)
    slab.write(1, 1)
    slab.sync()
    slab.write(1, 2)
    slab.write(2, 2)
    slab.disk.cut(Cut.POWER_LOSES_ALL)
    assert (slab.kept(0), slab.kept(1), slab.kept(2)) == ({1}, {1}, {0})


def test_a_power_cut_may_keep_any_sector(slab: Slab) -> None:
    for value in (1, 2, 3):
        for block in range(4):
            slab.write(block, value)
        if value == 1:
            slab.sync()
    slab.disk.cut(Cut.POWER)
    assert set().union(*(slab.kept(block) for block in range(4))) == {1, 2, 3}


def test_a_kill_takes_nothing(slab: Slab) -> None:
    slab.write(0, 1)
    slab.disk.cut(Cut.KILL)
    assert slab.kept(0) == {1}


def test_nothing_lands_after_the_machine_has_stopped(slab: Slab) -> None:
    slab.disk.cut(Cut.KILL)
    assert slab.write(0, 1) is TransferState.FAILED
    assert slab.kept(0) == {0}


def test_a_sync_does_not_write_what_one_that_failed_has_dropped(slab: Slab) -> None:
    slab.write(0, 1)
    slab.disk.weather = Weather({"slab.sync": {Fate.FAILS: 1.0}})
    with pytest.raises(Exception, match="fdatasync"):
        slab.sync()
    slab.disk.heal()
    slab.write(1, 1)
    slab.sync()
    slab.disk.cut(Cut.POWER_LOSES_ALL)
    assert (slab.kept(0), slab.kept(1)) == ({0}, {1})


def test_what_is_written_again_after_a_failed_sync_is_synced(slab: Slab) -> None:
    slab.write(0, 1)
    slab.disk.weather = Weather({"slab.sync": {Fate.FAILS: 1.0}})
    with pytest.raises(Exception, match="fdatasync"):
        slab.sync()
    slab.disk.heal()
    slab.write(0, 1)
    slab.sync()
    slab.disk.cut(Cut.POWER_LOSES_ALL)
    assert slab.kept(0) == {1}


@pytest.mark.parametrize(
    ("fate", "ends"),
    [
        (Fate.FAILS, TransferState.FAILED),
        (Fate.FULL, TransferState.FAILED),
        (Fate.SHORT, TransferState.FAILED),
        (Fate.LIES, TransferState.DONE),
        (Fate.HANGS, TransferState.PENDING),
        (Fate.NEVER_ENDS, TransferState.PENDING),
    ],
)
def test_a_write_meets_its_fate(slab: Slab, fate: Fate, ends: TransferState) -> None:
    slab.disk.weather = Weather({"slab.write": {fate: 1.0}})
    assert slab.write(0, 7) is ends
    slab.disk.heal()
    slab.files.close()
    assert slab.files.in_flight == (fate is Fate.NEVER_ENDS)


def test_a_fate_is_the_same_for_the_same_seed() -> None:
    def fates(seed: int) -> list[Fate]:
        disk = Disk(seed)
        disk.weather = Weather({"slab.": {Fate.FAILS: 0.5}})
        return [disk.fate("slab.read") for _ in range(50)]

    assert fates(1) == fates(1) != fates(2)
    assert set(fates(1)) == {Fate.WORKS, Fate.FAILS}


class Table:
    """A WAL database on the disk."""

    def __init__(self, disk: Disk, root: Path) -> None:
        self.disk = disk
        self.path = root / "disk" / "a.sqlite"
        self.connection = connector(disk)(self.path, "rwc")
        self.connection.execute("PRAGMA journal_mode=WAL")
        self.connection.execute("CREATE TABLE t (x INTEGER)")

    def add(self, x: int, durable: bool) -> None:
        self.connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
        self.connection.execute("BEGIN IMMEDIATE")
        self.connection.executemany("INSERT INTO t VALUES (?)", [(x,)] * 50)
        self.connection.execute("COMMIT")

    def kept(self) -> list[tuple[int, int]]:
        with sqlite3.connect(self.disk.image / "a.sqlite") as found:
            assert found.execute("PRAGMA integrity_check").fetchone() == ("ok",)
            return found.execute("SELECT x, count(*) FROM t GROUP BY x").fetchall()


@pytest.fixture
def table(disk: Disk, tmp_path: Path) -> Table:
    return Table(disk, tmp_path)


def test_sqlite_keeps_what_it_synced(table: Table) -> None:
    table.add(1, durable=True)
    table.add(2, durable=False)
    table.disk.cut(Cut.POWER_LOSES_ALL)
    assert table.kept() == [(1, 50)]


@pytest.mark.parametrize("seed", range(20))
def test_sqlite_is_never_torn(tmp_path: Path, seed: int) -> None:
    (tmp_path / "disk").mkdir()
    disk = Disk(seed)
    disk.mount(tmp_path / "disk")
    table = Table(disk, tmp_path)
    table.add(1, durable=True)
    for x in range(2, 6):
        table.add(x, durable=False)
    disk.cut(Cut.POWER)
    kept = table.kept()
    assert kept == [(x, 50) for x in range(1, len(kept) + 1)]
    assert kept


def test_sqlite_keeps_all_of_a_killed_process(table: Table) -> None:
    table.add(1, durable=False)
    table.disk.cut(Cut.KILL)
    assert table.kept() == [(1, 50)]


@pytest.mark.parametrize(
    ("operation", "fate", "code"),
    [
        ("journal.write", Fate.FAILS, sqlite3.SQLITE_IOERR),
        ("journal.write", Fate.SHORT, sqlite3.SQLITE_IOERR),
        ("journal.write", Fate.FULL, sqlite3.SQLITE_FULL),
        ("journal.sync", Fate.FAILS, sqlite3.SQLITE_IOERR),
    ],
)
def test_sqlite_reports_the_error_as_sqlite3_does(
    table: Table, operation: str, fate: Fate, code: int
) -> None:
    table.disk.weather = Weather({operation: {fate: 1.0}})
    with pytest.raises(sqlite3.OperationalError) as caught:
        table.add(1, durable=True)
    assert caught.value.sqlite_errorcode & 0xFF == code
    table.disk.heal()
    if table.connection.in_transaction:
        table.connection.execute("ROLLBACK")
    table.add(2, durable=True)
    table.disk.cut(Cut.POWER_LOSES_ALL)
    assert (2, 50) in table.kept()


def test_a_commit_that_hangs_goes_on_when_the_faults_end(table: Table) -> None:
    table.disk.weather = Weather({"journal.sync": {Fate.HANGS: 1.0}})
    thread = threading.Thread(target=table.add, args=(1, True), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    table.disk.heal()
    thread.join(60)
    assert not thread.is_alive()


def test_a_cut_ends_what_hangs(table: Table) -> None:
    table.disk.weather = Weather({"journal.write": {Fate.NEVER_ENDS: 1.0}})
    errors: list[int] = []

    def add() -> None:
        try:
            table.add(1, durable=True)
        except sqlite3.OperationalError as e:
            errors.append(e.sqlite_errorcode & 0xFF)

    thread = threading.Thread(target=add, daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    table.disk.cut(Cut.KILL)
    thread.join(60)
    assert errors == [sqlite3.SQLITE_IOERR]


def test_a_machine_stops_at_the_chosen_operation(slab: Slab) -> None:
    slab.disk.cut_at = (slab.disk.operations + 3, Cut.KILL)
    ends = [slab.write(block, 1) for block in range(3)]
    assert ends == [TransferState.DONE, TransferState.DONE, TransferState.FAILED]
    with pytest.raises(OSError, match="stopped") as caught:
        slab.disk.fate("slab.read")
    assert caught.value.errno == errno.EIO
    assert os.listdir(slab.disk.image)
