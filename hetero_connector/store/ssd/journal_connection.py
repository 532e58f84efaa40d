"""Opening a journal's file for SQLite, and SQLite's errors as the store's own."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero_connector.errors import StoreError
from hetero_connector.store.ssd.journal_format import CorruptJournalError, UnreadableJournalError
from hetero_connector.store.ssd.private_files import create_private

SUFFIXES = ("", "-wal", "-shm")
"""The suffixes of the files that SQLite makes next to the journal."""
_WAL_HEADER_BYTES = 32
_MAX_COPIES = 20
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_SET_TMPDIR = "set TMPDIR to a folder with room for the copy"
Connect = Callable[[Path, str], sqlite3.Connection]
"""Opens a file for SQLite. The mode is that of its URIs: `ro`, `rw`, `rwc`."""


def connect(path: Path, mode: str) -> sqlite3.Connection:
    """The file as it is on disk. Raises sqlite3.Error, or OSError if it cannot be made."""
    if mode == "rwc":
        create_private(path)  # SQLite gives its other files the mode of this one
    # Autocommit: transactions are begun by hand. The directory's lock, not SQLite's
    # thread check, keeps users apart.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}",
        uri=True,
        isolation_level=None,
        check_same_thread=False,
        timeout=5.0,
    )
    # Text that is no UTF-8 is damage of its own row, not of the whole journal.
    connection.text_factory = lambda text: text.decode(errors="surrogateescape")
    return connection


def open_connection(path: Path, mode: str, connect: Connect) -> sqlite3.Connection:
    """Connect as every journal does. CorruptJournalError or StoreError if that fails.

    Who may write has the file alone and keeps the WAL's index in memory of its own. In the
    file `-shm`, which SQLite maps, it would end the process by SIGBUS if that file is truncated.
    """
    with sqlite_errors(path):
        connection = connect(path, mode)
        try:
            if not mode.startswith("ro"):
                connection.execute("PRAGMA locking_mode=EXCLUSIVE")
            connection.execute("PRAGMA synchronous=NORMAL")
        except BaseException:
            connection.close()
            raise
    return connection


_DAMAGE_CODES = {
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    # The statements are constant: they fail only if the tables are not those of a journal.
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_CONSTRAINT,
    sqlite3.SQLITE_MISMATCH,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_FORMAT,
    sqlite3.SQLITE_SCHEMA,
}


@contextmanager
def sqlite_errors(path: Path) -> Iterator[None]:
    """Raise CorruptJournalError for a damaged file, StoreError for any other error.

    An error of the disk (EIO, full, read-only) is no damage. EIO is an UnreadableJournalError.
    """
    try:
        yield
    except OSError as e:
        kind = UnreadableJournalError if e.errno == errno.EIO else StoreError
        raise kind(f"journal {path}: {e}") from e
    except UnicodeDecodeError as e:  # SQLite quotes the damaged text in its error
        raise CorruptJournalError(path, e) from e
    except sqlite3.Error as e:
        code = getattr(e, "sqlite_errorcode", 0)
        # A damaged header makes SQLite treat a file that can be written as read-only.
        is_denied = code == sqlite3.SQLITE_READONLY and not os.access(path, os.W_OK)
        if code & 0xFF in _DAMAGE_CODES or (code == sqlite3.SQLITE_READONLY and not is_denied):
            raise CorruptJournalError(path, e) from e
        kind = UnreadableJournalError if code & 0xFF == sqlite3.SQLITE_IOERR else StoreError
        raise kind(f"journal {path}: {e}") from e


def copy_journal(path: Path) -> tempfile.TemporaryDirectory[str] | None:
    """Copy a journal that an engine may be writing; return the folder of the copy.

    None if it has no WAL: then it is whole as it is. The journal is copied before its WAL, so each
    page that a checkpoint writes meanwhile is in the WAL's copy, too, unless the WAL began anew.
    Raises OSError, and StoreError if it did each time or if the copy cannot be written.
    """
    wal = path.with_name(f"{path.name}-wal")
    for _ in range(_MAX_COPIES):
        if (began := _wal_header(wal)) is None:
            return None
        try:
            copy = tempfile.TemporaryDirectory(prefix="heterocache-journal-")
        except OSError as e:
            raise StoreError(f"no copy of {path} can be made: {e}; {_SET_TMPDIR}") from e
        try:
            shutil.copyfile(path, Path(copy.name) / path.name)
            shutil.copyfile(wal, Path(copy.name) / wal.name)
            if _wal_header(wal) == began:
                return copy
        except FileNotFoundError:  # its engine stopped meanwhile
            if not path.exists():
                copy.cleanup()
                raise
        except OSError as e:
            copy.cleanup()
            if e.errno not in _NO_ROOM:
                raise
            folder = Path(copy.name).parent
            raise StoreError(f"no copy of {path} fits in {folder}: {e}; {_SET_TMPDIR}") from e
        except BaseException:
            copy.cleanup()
            raise
        copy.cleanup()
    raise StoreError(
        f"journal {path}: its engine writes it faster than it can be copied; try again when the "
        "engine stores less"
    )


def _wal_header(wal: Path) -> bytes | None:
    """Return what SQLite changes when it begins a WAL anew; None without one."""
    try:
        with wal.open("rb") as file:
            return file.read(_WAL_HEADER_BYTES)
    except FileNotFoundError:
        return None


def move_aside(path: Path) -> Path:
    """Rename a damaged journal in place of the last one; return its new name."""
    for old in path.parent.glob("journal.corrupt-*"):
        with suppress(OSError):
            old.unlink()
    target = path.with_name(f"journal.corrupt-{time.strftime('%Y%m%d-%H%M%S')}")
    for suffix in SUFFIXES:
        part = path.with_name(path.name + suffix)
        try:
            if part.exists():
                part.rename(target.with_name(target.name + suffix))
        except OSError as e:
            raise StoreError(f"the damaged journal {part} cannot be moved aside: {e}") from e
    return target
