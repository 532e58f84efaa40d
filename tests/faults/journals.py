"""SQLite on a faulty disk: a VFS that counts operations, and the calls of sqlite3 over apsw."""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast

import apsw

from tests.faults.disk import Disk, DiskError

_numbers = count()
_CODES = {
    errno.EIO: {
        "read": apsw.SQLITE_IOERR_READ,
        "write": apsw.SQLITE_IOERR_WRITE,
        "sync": apsw.SQLITE_IOERR_FSYNC,
        "truncate": apsw.SQLITE_IOERR_TRUNCATE,
    },
    errno.ENOSPC: dict.fromkeys(("read", "write", "sync", "truncate"), apsw.SQLITE_FULL),
}


class FaultyVfs(apsw.VFS):
    """SQLite's files, each operation of which asks the disk for its fate first."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.vfs_name = f"faulty-{next(_numbers)}"
        super().__init__(self.vfs_name, "unix")

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:  # noqa: N802
        """Open one of SQLite's files."""
        return _FaultyFile(self.disk, name, flags)

    def xDelete(self, filename: str, syncdir: bool) -> None:  # noqa: N802
        """Delete one; deletions are taken to be durable."""
        with _as_apsw("write"):
            self.disk.require_power()
        super().xDelete(filename, syncdir)
        self.disk.forgets(filename)


class _FaultyFile(apsw.VFSFile):
    def __init__(self, disk: Disk, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._disk = disk
        given = name.filename() if isinstance(name, apsw.URIFilename) else name
        self._path = given or "a temporary file"
        super().__init__("unix", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:  # noqa: N802
        """Read, or fail."""
        with _as_apsw("read"):
            self._disk.suffer(self._disk.fate("journal.read"))
        return super().xRead(amount, offset)

    def xWrite(self, data: Any, offset: int) -> None:  # noqa: N802
        """Write all, half or nothing."""
        content = bytes(data)
        with _as_apsw("write"):
            is_short = self._disk.suffer(self._disk.fate("journal.write"))
            if is_short:
                content = content[: len(content) // 2]
            if content:
                self._disk.writes(self._path, offset, content, super().xFileSize(), self._old)
                super().xWrite(content, offset)
            if is_short:
                raise DiskError(errno.EIO, "it broke off")

    def xTruncate(self, newsize: int) -> None:  # noqa: N802
        """Cut off the end."""
        with _as_apsw("truncate"):
            if self._disk.suffer(self._disk.fate("journal.truncate")):
                raise DiskError(errno.EIO, "it broke off")
            self._disk.truncates(self._path, newsize, super().xFileSize(), self._old)
        super().xTruncate(newsize)

    def xSync(self, flags: int) -> None:  # noqa: N802
        """Make durable what was written so far."""
        with _as_apsw("sync"):
            ended = self._disk.begins_sync(self._path)
            fate = self._disk.fate("journal.sync")
            try:
                if self._disk.suffer(fate):
                    raise DiskError(errno.EIO, "it broke off")
            except DiskError:
                if not self._disk.is_off:
                    ended(False)
                raise
            ended(True)

    def _old(self, offset: int, size: int) -> bytes:
        return super().xRead(size, offset) if size else b""


@contextlib.contextmanager
def _as_apsw(operation: str) -> Iterator[None]:
    """Tell SQLite what the disk raised."""
    try:
        yield
    except DiskError as e:
        raise apsw.exception_for(_CODES[e.errno or errno.EIO][operation]) from e


class _Rows:
    """A statement's result, as a cursor of sqlite3 gives it."""

    def __init__(self, rows: list[tuple[Any, ...]], rowcount: int) -> None:
        self._rows = iter(rows)
        self.rowcount = rowcount

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        return self._rows

    def fetchall(self) -> list[tuple[Any, ...]]:
        return list(self._rows)

    def fetchone(self) -> tuple[Any, ...] | None:
        return next(self._rows, None)


class _Connection:
    """The part of `sqlite3.Connection` that the journal uses."""

    def __init__(self, connection: apsw.Connection, vfs: FaultyVfs) -> None:
        self._connection = connection
        self._vfs = vfs  # SQLite calls it as long as the connection lives

    @property
    def in_transaction(self) -> bool:
        return bool(self._connection.in_transaction)

    def execute(self, sql: str, values: Sequence[Any] = ()) -> _Rows:
        with _as_sqlite3():
            before = self._connection.total_changes()
            rows = list(self._connection.execute(sql, tuple(values)))
            return _Rows(rows, self._connection.total_changes() - before)

    def executescript(self, sql: str) -> None:
        with _as_sqlite3():
            self._connection.execute(sql)

    def executemany(self, sql: str, values: Iterable[Sequence[Any]]) -> _Rows:
        with _as_sqlite3():
            before = self._connection.total_changes()
            self._connection.executemany(sql, (tuple(v) for v in values))
            return _Rows([], self._connection.total_changes() - before)

    def close(self) -> None:
        # SQLite closes whatever becomes of the last checkpoint, and sqlite3 says nothing of it.
        with contextlib.suppress(apsw.Error):
            self._connection.close()


@contextlib.contextmanager
def _as_sqlite3() -> Iterator[None]:
    """Raise what the sqlite3 module would have raised."""
    try:
        yield
    except apsw.Error as e:
        code: int = getattr(e, "extendedresult", None) or apsw.SQLITE_ERROR
        is_damage = code & 0xFF in (apsw.SQLITE_CORRUPT, apsw.SQLITE_NOTADB)
        error = (sqlite3.DatabaseError if is_damage else sqlite3.OperationalError)(str(e))
        error.sqlite_errorcode = code
        raise error from e


def connector(disk: Disk) -> Callable[[Path, str], sqlite3.Connection]:
    """`Journal` opens its file with this. Pass it as `connect`."""
    vfs = FaultyVfs(disk)

    def connect(path: Path, mode: str) -> sqlite3.Connection:
        flags = apsw.SQLITE_OPEN_URI | apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        with _as_sqlite3():
            uri = f"{os.path.abspath(path)}"
            connection = apsw.Connection(f"file://{uri}?mode={mode}", flags=flags, vfs=vfs.vfs_name)
            connection.set_busy_timeout(5_000)
        return cast(sqlite3.Connection, _Connection(connection, vfs))

    return connect
