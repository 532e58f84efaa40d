"""The journal of one model's SSD directory: which slot holds which artifact.

A SQLite file in WAL mode with synchronous=NORMAL: a committed transaction survives a
killed process, and a power cut may lose the last ones but never tears the file. That is
enough because of the order in which the store writes: slab bytes are down (`fdatasync`)
before their row is committed, and a row is deleted, committed, before any of its bytes are
overwritten. So after a kill no row names a slot of other bytes; after a power cut some may, whose
deletion was lost. Such a row fails its checksum, which costs a miss like a lost row.

A process that opens a journal to write has it alone. Others read a copy (`Journal.open_copy`).

Threads: any one at a time (the store's I/O thread, or the opener before it starts).
Every method raises StoreError, never a bare sqlite3 error. A journal in which a transaction finds
damage is moved aside at once: the next start would not see it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import FormatError, StoreError
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.ssd.journal_connection import (
    SUFFIXES,
    Connect,
    connect,
    copy_journal,
    move_aside,
    open_connection,
    sqlite_errors,
)
from hetero_connector.store.ssd.journal_format import (
    CorruptJournalError,
    JournalMeta,
    JournalRow,
    RowValues,
    as_row,
    layout_of,
    parse_meta,
    parse_row,
    row_check,
)

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE artifacts (
    chunk BLOB NOT NULL,
    parent BLOB NOT NULL,
    start INTEGER NOT NULL,
    end INTEGER NOT NULL,
    state_type TEXT NOT NULL,
    slot INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    size_bytes INTEGER NOT NULL,
    checksum BLOB NOT NULL,
    last_access REAL NOT NULL,
    reuse_count INTEGER NOT NULL,
    PRIMARY KEY (chunk, state_type),
    UNIQUE (state_type, slot)
) WITHOUT ROWID;
"""
_COLUMNS = (
    "chunk, parent, start, end, state_type, slot, generation, size_bytes, checksum, "
    "last_access, reuse_count"
)
_NOTE = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
_GENERATION = "generation"


class Journal:
    """Rows of the artifacts on SSD. Built by `Journal.open` or `Journal.open_existing`."""

    def __init__(self, path: Path, connection: sqlite3.Connection, meta: JournalMeta) -> None:
        self.path = path
        self.meta = meta
        self.moved_aside: Path | None = None
        """The path of a corrupt journal that was moved aside; everything in it is forgotten."""
        self.check_owner: Callable[[], object] | None = None
        """Called before each transaction; raises StoreTakenError once another engine is here."""
        self._connection = connection
        self._aside: Path | None = None
        self._copy = ExitStack()
        """Removes the copy that is read, if it is one."""

    @classmethod
    def open(
        cls, path: Path, meta: JournalMeta, connect: Connect = connect, check: bool = True
    ) -> Journal:
        """Open the journal, or create it with `meta` if there is none.

        A damaged file is moved aside (`moved_aside`) and an empty journal takes its place.
        The slots are left as found (see `resize`); a description that
        `meta` has takes the place of the last one. `check`: read all of it, else damage may go
        unseen. Raises FormatError if it belongs to another format version, model or slot size,
        StoreError if it cannot be opened or created.
        """
        moved = None
        if path.exists():
            try:
                journal = cls.open_existing(path, check=check, connect=connect)
                try:
                    journal._require(meta)
                    journal._describe(meta)
                except StoreError:
                    journal.close()
                    raise
                return journal
            except CorruptJournalError:
                moved = move_aside(path)
        journal = cls._create(path, meta, connect)
        journal.moved_aside = moved
        return journal

    @classmethod
    def open_existing(
        cls,
        path: Path,
        read_only: bool = False,
        check: bool = True,
        connect: Connect = connect,
    ) -> Journal:
        """Open a journal as it is, whatever model it belongs to.

        `check`: read all of it first; else damage may go unseen, and the caller must check what it
        finds. Raises CorruptJournalError if it is damaged, FormatError for another format version,
        StoreError if it cannot be read.
        """
        # Only a WAL that another process may be writing needs the shared-memory file, which cannot
        # be made in a read-only directory.
        settled = not path.with_name(f"{path.name}-wal").exists()
        read_mode = "ro&immutable=1" if settled else "ro"
        connection = open_connection(path, read_mode if read_only else "rw", connect)
        return cls._opened(path, connection, check)

    @classmethod
    def open_copy(cls, path: Path, check: bool = True) -> Journal:
        """Open a journal to read it, as it is now, while an engine may be writing it.

        An engine has its journal alone, so a copy is read, which `close` removes: it lies in a
        temporary folder. Raises as `open_existing`, and StoreError if it has no room there.
        """
        with sqlite_errors(path):
            copy = copy_journal(path)
        if copy is None:
            return cls.open_existing(path, read_only=True, check=check)
        with ExitStack() as undo:
            undo.enter_context(copy)
            with sqlite_errors(path):
                connection = connect(Path(copy.name) / path.name, "rw")
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            journal = cls._opened(path, connection, check)
            journal._copy = undo.pop_all()
            return journal

    @classmethod
    def _opened(cls, path: Path, connection: sqlite3.Connection, check: bool) -> Journal:
        try:
            with sqlite_errors(path):
                if check:
                    _check(path, connection)
                table = dict(connection.execute("SELECT key, value FROM meta").fetchall())
                connection.execute(f"SELECT {_COLUMNS} FROM artifacts LIMIT 1")
            return cls(path, connection, parse_meta(path, table))
        except BaseException:
            connection.close()
            raise

    @classmethod
    def _create(cls, path: Path, meta: JournalMeta, connect: Connect) -> Journal:
        for suffix in SUFFIXES[1:]:  # of a deleted journal, not of this one
            path.with_name(path.name + suffix).unlink(missing_ok=True)
        connection = open_connection(path, "rwc", connect)
        try:
            with sqlite_errors(path):
                connection.execute("PRAGMA journal_mode=WAL")
                # One transaction, so that a crash leaves either no tables or all.
                connection.executescript(f"BEGIN;{_SCHEMA}")
                connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.as_table().items())
                connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return cls(path, connection, meta)

    def _require(self, wanted: JournalMeta) -> None:
        if self.meta.fingerprint != wanted.fingerprint:
            raise FormatError(
                f"{self.path} holds state of another model (fingerprint "
                f"{self.meta.fingerprint.hex()}, this one is {wanted.fingerprint.hex()}); "
                "use another ssd_dir, or delete this directory"
            )
        if self.meta.geometry.stride_bytes != wanted.geometry.stride_bytes:
            raise FormatError(
                f"{self.path} describes other slots ({layout_of(self.meta)}) than these settings "
                f"ask for ({layout_of(wanted)}); use the former chunk_tokens, another ssd_dir, "
                "or delete this directory"
            )

    def _describe(self, wanted: JournalMeta) -> None:
        meta = replace(self.meta, description=wanted.description)
        if not wanted.description or meta.as_table() == self.meta.as_table():
            return
        with self._transaction() as connection:
            connection.executemany(_NOTE, meta.as_table().items())
        self.meta = meta

    def resize(self, geometry: SlotGeometry) -> int:
        """Set the cut; return how many rows were deleted, whose slots are not in the same place."""
        meta = replace(self.meta, geometry=geometry)
        with self._transaction() as connection:
            deleted = self._forget_bytes_from(self.meta.geometry.common_bytes(geometry))
            connection.executemany(_NOTE, meta.as_table().items())
        self.meta = meta
        return deleted

    def load(self) -> Iterator[JournalRow]:
        """Every row, parents before children. Rows that make no sense are left out."""
        return map(as_row, self.load_values())

    def load_values(self) -> Iterator[RowValues]:
        """Yield the rows like `load`, without an object for each."""
        check = row_check(self.meta)
        with sqlite_errors(self.path):
            cursor = self._connection.execute(f"SELECT {_COLUMNS} FROM artifacts ORDER BY start")
            for values in cursor:
                checked = check(values)
                if checked is not None:
                    yield checked

    def forget_bytes_from(self, offset: int) -> int:
        """Delete the rows of slots that end after `offset`; return how many there were."""
        with self._transaction():
            return self._forget_bytes_from(offset)

    def count(self) -> int:
        """Return the number of rows, those that make no sense included."""
        with sqlite_errors(self.path):
            return int(self._connection.execute("SELECT count(*) FROM artifacts").fetchone()[0])

    def find(self, artifact: ArtifactId) -> JournalRow | None:
        """The row of an artifact; None without one, or if it makes no sense."""
        with sqlite_errors(self.path):
            values = self._connection.execute(
                f"SELECT {_COLUMNS} FROM artifacts WHERE chunk = ? AND state_type = ?",
                (bytes(artifact.chunk), artifact.state_type.value),
            ).fetchone()
        return None if values is None else parse_row(values, self.meta)

    def malformed(self) -> list[tuple[bytes, str]]:
        """Keys (chunk, state type) of the rows that `load` leaves out."""
        with sqlite_errors(self.path):
            cursor = self._connection.execute(f"SELECT {_COLUMNS} FROM artifacts")
            return [(v[0], v[4]) for v in cursor if parse_row(v, self.meta) is None]

    def record(self, rows: Iterable[JournalRow]) -> None:
        """Add rows, in one transaction. Their bytes must be down.

        A row of the same artifact, or of the same slot, is replaced.
        """
        marks = ", ".join("?" * 11)
        with self._transaction() as connection:
            connection.executemany(
                f"INSERT OR REPLACE INTO artifacts ({_COLUMNS}) VALUES ({marks})",
                (
                    (
                        bytes(r.chunk.key),
                        bytes(r.chunk.parent),
                        r.chunk.start,
                        r.chunk.end,
                        r.state_type.value,
                        r.slot,
                        r.generation,
                        r.size_bytes,
                        r.checksum,
                        r.last_access,
                        r.reuse_count,
                    )
                    for r in rows
                ),
            )

    def forget(self, ids: Iterable[ArtifactId]) -> None:
        """Delete rows, in one transaction; unknown ids are ignored. Then slots may be reused.

        A journal that was moved aside lists nothing any more.
        """
        self.forget_keys((bytes(i.chunk), i.state_type.value) for i in ids)

    def forget_keys(self, keys: Iterable[tuple[bytes, str]]) -> None:
        """`forget` by raw (chunk, state type), as `malformed` returns them."""
        if self._aside is not None:
            return
        # By bytes: a damaged state type may be no text.
        with self._transaction() as connection:
            connection.executemany(
                "DELETE FROM artifacts WHERE chunk = ? AND CAST(state_type AS BLOB) = ?",
                ((chunk, _as_bytes(state_type)) for chunk, state_type in keys),
            )

    def touch(self, used: Iterable[tuple[ArtifactId, float, int]]) -> None:
        """Set (last access, reuse count) of a batch of rows; unknown ids are ignored."""
        with self._transaction() as connection:
            connection.executemany(
                "UPDATE artifacts SET last_access = ?, reuse_count = ? "
                "WHERE chunk = ? AND state_type = ?",
                ((when, count, bytes(i.chunk), i.state_type.value) for i, when, count in used),
            )

    def note(self, key: str, value: str) -> None:
        """Store a text under a key, in place of the last one."""
        with self._transaction() as connection:
            connection.execute(_NOTE, (key, value))

    def noted(self, key: str) -> str | None:
        """Return what `note` kept."""
        with sqlite_errors(self.path):
            cursor = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,))
            found = cursor.fetchone()
        return None if found is None else str(found[0])

    def generation(self) -> bytes | None:
        """Return the generation (`Generation.tag`) of every row; None if no row was written yet."""
        noted = self.noted(_GENERATION)
        try:
            return None if noted is None else bytes.fromhex(noted)
        except ValueError as e:
            raise CorruptJournalError(self.path, f"its generation: {e}") from e

    def clear(self, generation: bytes) -> None:
        """Delete every row: those to come are of `generation`. What was noted stays.

        A journal that was moved aside lists nothing any more.
        """
        if self._aside is not None:
            return
        with self._transaction() as connection:
            connection.execute("DELETE FROM artifacts")
            connection.execute(_NOTE, (_GENERATION, generation.hex()))

    def condemn(self) -> Path:
        """Move the files aside, because they are damaged; return the new path."""
        if self._aside is None:
            self._aside = move_aside(self.path)
        return self._aside

    def close(self) -> None:
        """Idempotent."""
        with sqlite_errors(self.path):
            self._connection.close()
            self._copy.close()

    def _forget_bytes_from(self, offset: int) -> int:
        cut = self.meta.geometry
        deleted = self._connection.executemany(
            "DELETE FROM artifacts WHERE state_type = ? AND slot >= ?",
            [(t.value, cut.num_slots_in(t, offset)) for t in cut.stride_bytes],
        )
        return deleted.rowcount

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._begun() as connection:
                yield connection
        except CorruptJournalError:  # a check of indexes takes 5 s for a million rows
            self.condemn()
            raise

    @contextmanager
    def _begun(self) -> Iterator[sqlite3.Connection]:
        with sqlite_errors(self.path):
            if self.check_owner is not None:
                self.check_owner()
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # SQLite has already rolled back by itself after some errors (full disk).
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise


def _check(path: Path, connection: sqlite3.Connection) -> None:
    found = connection.execute("PRAGMA quick_check(1)").fetchone()
    if found[0] != "ok":
        raise CorruptJournalError(path, found[0])


def _as_bytes(value: object) -> object:
    return value.encode(errors="surrogateescape") if isinstance(value, str) else value
