"""A damaged journal never stops a start: its rows are left out, or it is moved aside."""

from __future__ import annotations

import json
import random
import shutil
import sqlite3
from pathlib import Path

import pytest

from hetero_connector.errors import StoreError
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.ssd.journal_connection import sqlite_errors
from hetero_connector.store.ssd.journal_format import CorruptJournalError
from hetero_connector.tools.cli import main
from hetero_connector.tools.command import EXIT_OK, EXIT_UNUSABLE
from tests.store.filling import FINGERPRINT, SIZES, Bench, begin, chain, ids_of, intact, put, wait
from tests.waiting import until

pytestmark = pytest.mark.long

CHUNKS = chain("a", 100)
FLIPS = 60
"""Flips in one test: about three seconds."""


def opened(root: Path) -> ArtifactStore:
    return Bench(root).open(dram_chunks=128, ssd_chunks=128)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ssd_dir with a journal of 200 rows that was closed in order."""
    root = tmp_path_factory.mktemp("written")
    store = opened(root)
    put(store, CHUNKS)
    store.close()
    return root


@pytest.fixture
def root(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "ssd"))


def journal_of(root: Path) -> Path:
    return root / FINGERPRINT.hex()[:16] / "journal.sqlite"


def serve(root: Path) -> int:
    """Open the store as an engine does; return how many artifacts it serves, all of them exact."""
    store = opened(root)
    try:
        found = store.match(CHUNKS)
        restore = wait(begin(store, ids_of([stored.chunk for stored in found], SIZES)))
        assert intact(store, restore)
        return len(restore.offsets)
    finally:
        store.close()


def test_a_journal_without_damage_serves_all(root: Path) -> None:
    assert serve(root) == 2 * len(CHUNKS)


@pytest.mark.parametrize("seed", range(2))
def test_a_flipped_bit_stops_no_start_and_changes_no_byte(root: Path, seed: int) -> None:
    path = journal_of(root)
    whole = path.read_bytes()
    random_ = random.Random(seed)
    used = [at for at, byte in enumerate(whole) if byte]
    for _ in range(FLIPS):
        # The header, the schema and the meta table are small: half of the flips go there.
        at = random_.choice(used if random_.random() < 0.5 else [x for x in used if x < 8192])
        damaged = bytearray(whole)
        damaged[at] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        try:
            serve(root)
        except Exception as error:
            pytest.fail(f"bit of byte {at}, {whole[at]:#x} to {damaged[at]:#x}: {error!r}")
        for aside in path.parent.glob("journal.*"):
            aside.unlink()


def _empty_index(path: Path) -> None:
    """Exchange the index of slots for an empty one: nothing but a deletion finds out."""
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA writable_schema = ON")
    connection.execute("CREATE TABLE other (x, y, PRIMARY KEY (x, y)) WITHOUT ROWID")
    root_of = "SELECT rootpage FROM sqlite_schema WHERE type = ? AND tbl_name = ?"
    (full,) = connection.execute(root_of, ("index", "artifacts")).fetchone()
    (empty,) = connection.execute(root_of, ("table", "other")).fetchone()
    exchange = "UPDATE sqlite_schema SET rootpage = ? WHERE rootpage = ?"
    for new, old in ((-1, full), (full, empty), (empty, -1)):
        connection.execute(exchange, (new, old))
    connection.commit()
    connection.close()
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA quick_check").fetchone() == ("ok",)
    connection.close()


def test_a_damaged_index_stops_no_start(root: Path) -> None:
    path = journal_of(root)
    _run(path, "UPDATE artifacts SET start = start + 1 WHERE slot = 3")  # the start deletes it
    _empty_index(path)
    assert serve(root) == 0
    assert len(list(path.parent.glob("journal.corrupt-*[0-9]"))) == 1
    store = opened(root)
    put(store, CHUNKS)
    store.close()
    assert serve(root) == 2 * len(CHUNKS)


def test_a_journal_that_a_deletion_found_damaged_is_not_opened_again(root: Path) -> None:
    path = journal_of(root)
    _empty_index(path)
    store = opened(root)
    put(store, chain("b", 100))  # in the place of others, whose rows go first
    until(lambda: not store.catalog.writes.is_writable)
    assert store.wait_forgotten(60), "no later engine reads what was moved aside"
    store.close()
    assert not path.exists()
    assert serve(root) == 0
    assert path.exists()


DEEP = "[" * 100_000
DAMAGE = {
    "slabs are a list": "UPDATE meta SET value = '[]' WHERE key = 'slabs'",
    "the slots are a number": "UPDATE meta SET value = '{\"slot_bytes\": 5}' WHERE key = 'slabs'",
    "no slots": """UPDATE meta SET value = replace(value, '"count": 1', '"count": 0')
        WHERE key = 'slabs'""",
    "infinite slots": """UPDATE meta SET value = replace(value, '"count": 1', '"count": 1e999')
        WHERE key = 'slabs'""",
    "slots beyond all files": """UPDATE meta SET value = replace(value, '"count": 1', '"count": 1'
        || '000000000000000') WHERE key = 'slabs'""",
    "a zone for no slot": """UPDATE meta SET value = replace(value, '"zone_bytes": ',
        '"zone_bytes": 4096, "was": ') WHERE key = 'slabs'""",
    "zones of no size": """UPDATE meta SET value = replace(value, '"zone_bytes": ',
        '"zone_bytes": 0, "was": ') WHERE key = 'slabs'""",
    "a slot of other bytes": """UPDATE meta SET value = replace(value, '12288', '12296')
        WHERE key = 'slabs'""",
    "another fingerprint": """UPDATE meta SET value = '6' || substr(value, 2, 29) || '67'
        WHERE key = 'fingerprint'""",
    "another version": "UPDATE meta SET value = '3' WHERE key = 'format_version'",
    "the description is a number": "UPDATE meta SET value = '5' WHERE key = 'description'",
    "the description is deep": f"UPDATE meta SET value = '{DEEP}' WHERE key = 'description'",
    "the description is no text": """UPDATE meta SET value = CAST(x'ff41' AS TEXT)
        WHERE key = 'description'""",
    "a key is no text": """UPDATE meta SET key = CAST(x'ff41' AS TEXT) WHERE key = 'slabs'""",
    "the generation is no number": "INSERT OR REPLACE INTO meta VALUES ('generation', 'zz')",
    "a column is missing": "ALTER TABLE artifacts RENAME COLUMN size_bytes TO size",
}


@pytest.mark.parametrize("statement", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_journal_that_makes_no_sense_is_moved_aside(root: Path, statement: str) -> None:
    _run(journal_of(root), statement)
    assert serve(root) == 0
    assert list(journal_of(root).parent.glob("journal.corrupt-*"))
    assert serve(root) == 0, "the next start has an empty journal"


def test_a_row_whose_state_type_is_no_text_is_left_out(root: Path) -> None:
    _run(
        journal_of(root),
        "UPDATE artifacts SET state_type = CAST(x'ff41' AS TEXT) WHERE slot = 3 "
        "AND state_type = 'dense_kv'",
    )
    assert serve(root) > 0
    assert not list(journal_of(root).parent.glob("journal.corrupt-*"))


def test_the_tools_name_a_damaged_journal_and_go_on(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = journal_of(root)
    shutil.copytree(path.parent, root / "0123456789abcdef")
    for damage in ("slabs are a list", "the description is deep", "a key is no text"):
        _run(path, DAMAGE[damage])
        for command in ("inspect", "verify"):
            assert main([command, str(root), "--json"]) == EXIT_UNUSABLE
            told = capsys.readouterr()
            assert str(path) in told.err
            assert "moves it aside and starts empty" in told.err
            (other,) = json.loads(told.out)
            assert other["artifacts"] == 2 * len(CHUNKS)


def test_inspect_shows_a_time_that_is_no_date(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _run(journal_of(root), "UPDATE artifacts SET last_access = 1e200 WHERE slot = 3")
    assert main(["inspect", str(root)]) == EXIT_OK
    assert "1e+200 s after 1970" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("code", "is_damage"),
    [
        (sqlite3.SQLITE_CORRUPT, True),
        (sqlite3.SQLITE_NOTADB, True),
        (sqlite3.SQLITE_ERROR, True),
        (sqlite3.SQLITE_IOERR_READ, False),
        (sqlite3.SQLITE_READONLY, False),
        (sqlite3.SQLITE_FULL, False),
        (sqlite3.SQLITE_BUSY, False),
        (sqlite3.SQLITE_CANTOPEN, False),
    ],
)
def test_an_error_of_the_disk_is_no_damage(code: int, is_damage: bool) -> None:
    error = sqlite3.OperationalError("an error")
    error.sqlite_errorcode = code
    with pytest.raises(StoreError) as caught, sqlite_errors(Path("journal.sqlite")):
        raise error
    assert isinstance(caught.value, CorruptJournalError) == is_damage


def _run(path: Path, statement: str) -> None:
    connection = sqlite3.connect(path)
    connection.execute(statement)
    connection.commit()
    connection.close()
