"""Opening a journal's file for SQLite, and SQLite's errors as the store's own."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hetero_connector.errors import StoreError
from hetero_connector.store.ssd.journal_format import CorruptJournalError
from hetero_connector.store.ssd.private_files import create_private

SUFFIXES = ("", "-wal", "-shm")
"""What SQLite appends to the journal's name for the files that belong to it."""
Connect = Callable[[Path, str], sqlite3.Connection]
"""Opens a file for SQLite. The mode is that of its URIs: `ro`, `rw`, `rwc`."""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """The file as it is on disk. Raises sqlite3.Error, or OSError if it cannot be made."""
    if mode == "rwc":
        create_private(path)  # SQLite gives its other files the mode of this one
    # Autocommit: transactions are begun by hand. The directory's lock, not SQLite's
    # thread check, keeps users apart.
    return sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=5.0,
    )


def open_connection(path: Path, mode: str, connect: Connect) -> sqlite3.Connection:
    """Connect as every journal does. CorruptJournalError or StoreError if that fails."""
    with sqlite_errors(path):
        connection = connect(path, mode)
        try:
            connection.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            connection.close()
            raise
    return connection


_CORRUPT_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise CorruptJournalError for a damaged file, StoreError for any other error."""
    try:
        yield
    except OSError as e:
        raise StoreError(f"journal {path}: {e}") from e
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", 0) & 0xFF
        no_table = isinstance(e, sqlite3.OperationalError) and "no such" in str(e)
        if code in _CORRUPT_CODES or no_table:
            raise CorruptJournalError(f"journal {path} is damaged: {e}") from e
        raise StoreError(f"journal {path}: {e}") from e


def move_aside(path: Path) -> Path:
    """Rename a damaged journal; return its new name."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for n in range(1000):
        target = path.with_name(f"journal.corrupt-{stamp}{f'-{n}' if n else ''}")
        if not target.exists():
            break
    for suffix in SUFFIXES:
        part = path.with_name(path.name + suffix)
        try:
            if part.exists():
                part.rename(target.with_name(target.name + suffix))
        except OSError as e:
            raise StoreError(f"the damaged journal {part} cannot be moved aside: {e}") from e
    return target
