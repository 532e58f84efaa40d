"""A dead engine's files may be anybody's work: they are neither believed nor waited for."""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_connector.store.base import Failure
from hetero_connector.store.peers import orphaned_storage as orphans
from hetero_connector.store.peers.orphaned_storage import OrphanDirectory, may_adopt_from
from hetero_connector.store.ssd.space import model_directory
from tests.store.adoption import CHUNKS, PEER_DEADLINE_S, Copies, Survivor, leave
from tests.store.filling import FINGERPRINT, intact, put, stored, wait
from tests.waiting import until

LOST = {Failure.IO_ERROR, Failure.UNREACHABLE, Failure.GONE}


@pytest.fixture
def left(tmp_path: Path) -> Copies:
    return leave(tmp_path / "fleet" / "dead")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The path at which it lies."""
    return model_directory(tmp_path / "fleet" / "dead", FINGERPRINT)


@pytest.fixture
def survivor(tmp_path: Path) -> Iterator[Survivor]:
    made = Survivor(tmp_path / "fleet" / "alive")
    yield made
    made.store.close()
    made.store.check_integrity()


def moved_to(copies: Copies, storage: Path | str) -> Copies:
    """Claim that the directory said that they lie there."""
    return {what: copy._replace(storage=str(storage)) for what, copy in copies.items()}


def misses(survivor: Survivor, copies: Copies) -> set[Failure]:
    """All of them are; why. The store goes on."""
    restore = survivor.adopt(copies)
    assert not restore.offsets
    failures = set(restore.failed.values())
    restore.release()
    put(survivor.store, CHUNKS)
    assert stored(survivor.store, CHUNKS) == len(CHUNKS)
    return failures


@pytest.mark.parametrize(
    ("storage", "may"),
    [
        ("/fleet/a/b", True),
        ("/fleet/a", True),
        ("/fleet", False),
        ("/fleet2/a", False),
        ("/fleet/../etc", False),
        ("/fleet/a/../../etc", False),
        ("/fleet//a", False),
        ("fleet/a", False),
        ("/etc", False),
        ("", False),
        ("/fleet/\0", False),
    ],
)
def test_only_what_lies_below_the_root_is_believed(storage: str, may: bool) -> None:
    assert may_adopt_from(Path("/fleet"), storage) is may
    assert not may_adopt_from(None, storage)


def test_a_storage_outside_of_the_root_is_not_opened(
    left: Copies, survivor: Survivor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(tmp_path / "fleet" / "dead", outside)
    opened = list[object]()
    monkeypatch.setattr(orphans, "shared", lambda path: opened.append(path))
    assert misses(survivor, moved_to(left, model_directory(outside, FINGERPRINT))) <= LOST
    assert opened == []


@pytest.mark.parametrize("what", ["ssd_dir", "model", "lock", "journal.sqlite", "slab"])
def test_no_link_below_the_root_is_followed(
    left: Copies, survivor: Survivor, folder: Path, tmp_path: Path, what: str
) -> None:
    target = {"ssd_dir": folder.parent, "model": folder}.get(what)
    files = list(folder.glob("*.slab")) if what == "slab" else [target or folder / what]
    for number, linked in enumerate(files):
        elsewhere = tmp_path / f"elsewhere-{number}"
        linked.rename(elsewhere)
        linked.symlink_to(elsewhere)
    assert misses(survivor, left) <= LOST


@pytest.mark.parametrize("name", ["lock", "journal.sqlite", "journal.sqlite-wal", "slab", ".lock"])
def test_a_pipe_is_not_waited_for(
    left: Copies, survivor: Survivor, folder: Path, name: str
) -> None:
    where = {"slab": list(folder.glob("*.slab")), ".lock": [folder.parent / ".lock"]}
    for path in where.get(name, [folder / name]):
        path.unlink(missing_ok=True)
        os.mkfifo(path)
    assert misses(survivor, left) <= LOST
    until(lambda: "heterocache-adopt" not in {t.name for t in threading.enumerate()})


ENDLESS = (
    "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) "
    "SELECT * FROM real_artifacts, n WHERE i < 0"
)
SCHEMAS = {
    "a view that never ends": f"""
        ALTER TABLE artifacts RENAME TO real_artifacts;
        CREATE VIEW artifacts AS {ENDLESS};""",
    "a view of the description": """
        ALTER TABLE meta RENAME TO real_meta;
        CREATE VIEW meta AS SELECT key, value FROM real_meta;""",
    "a computed column": "ALTER TABLE artifacts ADD COLUMN x AS (hex(zeroblob(1000000)));",
    "a virtual table": """
        DROP TABLE artifacts;
        CREATE VIRTUAL TABLE artifacts USING fts5(chunk, parent, start, end, state_type, slot);""",
    "a long description": "UPDATE meta SET value = hex(zeroblob(2000000));",
    "a deep description": f"UPDATE meta SET value = '{'[' * 100_000}';",
    "slots beyond all files": "UPDATE artifacts SET slot = slot + 4611686018427387904;",
    "nothing": "DROP TABLE meta; DROP TABLE artifacts;",
}


@pytest.mark.parametrize("what", SCHEMAS)
def test_a_journal_that_somebody_else_made_is_a_miss(
    left: Copies, survivor: Survivor, folder: Path, what: str
) -> None:
    with sqlite3.connect(folder / "journal.sqlite") as connection:
        connection.executescript(SCHEMAS[what])
    connection.close()
    assert misses(survivor, left) <= LOST


def test_sqlite_gives_up_what_takes_too_long(
    left: Copies, survivor: Survivor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no look at the schema tells it."""
    monkeypatch.setattr(orphans, "_QUERIES_S", 0.0)
    monkeypatch.setattr(orphans, "_OPS_BETWEEN_LOOKS", 1)
    assert misses(survivor, left) <= LOST


class Hang:
    """Reads from these storages wait until `end` is called."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, storages: set[Path]) -> None:
        self.waiting = list[Path]()
        """The storage of each read that waits, or has waited."""
        self._ended, read = threading.Event(), OrphanDirectory.read

        def slowly(directory: OrphanDirectory, *args: object) -> Failure | None:
            if directory._path in storages:
                self.waiting.append(directory._path)
                self._ended.wait(60)
            return read(directory, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(OrphanDirectory, "read", slowly)

    def end(self) -> None:
        self._ended.set()


def give_up(survivor: Survivor, copies: Copies, hang: Hang) -> set[Failure]:
    """Restore from a storage, and let the deadline pass once its read waits."""
    before = len(hang.waiting)
    restore = survivor.begin(copies)
    until(lambda: len(hang.waiting) > before or restore.poll())
    survivor.clock.passes(PEER_DEADLINE_S)
    wait(restore)
    failures = set(restore.failed.values())
    restore.release()
    return failures


def test_a_storage_that_hangs_leaves_others_alone(
    left: Copies, survivor: Survivor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = leave(tmp_path / "fleet" / "second")
    dead = tmp_path / "fleet" / "dead"
    hang = Hang(monkeypatch, {model_directory(dead, FINGERPRINT)})
    assert give_up(survivor, left, hang) == {Failure.DEADLINE}
    restore = survivor.adopt(copies)
    assert not restore.failed
    assert intact(survivor.store, restore)
    restore.release()
    hang.end()


def test_so_many_storages_may_hang_and_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survivor = Survivor(tmp_path / "fleet" / "alive", dram_chunks=16)
    monkeypatch.setattr("hetero_connector.store.peers.adopter._MAX_LATE", 2)
    roots = [tmp_path / "fleet" / str(number) for number in range(3)]
    copies = [leave(root) for root in roots]
    hang = Hang(monkeypatch, {model_directory(root, FINGERPRINT) for root in roots})
    for left in copies[:2]:
        assert give_up(survivor, left, hang) == {Failure.DEADLINE}
        survivor.store.reset()
    assert give_up(survivor, copies[2], hang) == {Failure.UNREACHABLE}
    hang.end()
    pool = survivor.store.catalog.tiers.dram
    until(lambda: sum(pool.num_used(kind) for kind in pool.geometry.stride_bytes) == 0)
    assert not survivor.adopt(copies[2]).failed
    survivor.store.close()
    survivor.store.check_integrity()
