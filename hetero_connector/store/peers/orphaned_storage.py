"""A dead engine's SSD directory, read by another, and only while no engine has it.

Journal and slab are never written. To read the WAL of an engine that was killed, SQLite makes the
file `journal.sqlite-shm` there and maps it: on a read-only file system it cannot, and nothing of
that engine is read.

An engine's death releases the directory's lock, however it died; a stopped engine keeps it. The
readers share the lock, so an engine that starts there waits for them: between two artifacts they
check whether one does, and release it. Where locks do not reach (a network file system that keeps
them local) the checksum still finds bytes that are being overwritten: it comes from the fleet's
record, and is seeded with the artifact's id.

The fleet's record names the path, and any program may have written what lies there. Neither is
believed: the path must lie below a folder that the configuration names, when a directory is opened
there may be no symbolic link below that, files must be regular ones, and SQLite gets a deadline and
a schema that is checked first. After that look lock and journal are opened by their path: whoever
may change folders there can still have another of the engine's own files read in their place.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StoreError, StoreInUseError
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.ssd.directory_lock import holder, is_locked, shared
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_connection import connect
from hetero_connector.store.ssd.slab_reader import read_blocks
from hetero_connector.store.ssd.space import JOURNAL_NAME, LOCK_NAME, OPENING_LOCK_NAME, SLAB_NAME
from hetero_connector.transfer.base import open_direct
from hetero_connector.transfer.checksum import checksum

logger = logging.getLogger("vllm.heterocache")


_QUERIES_S = 5.0
"""Longest that SQLite may work on one directory, all queries together."""
_OPS_BETWEEN_LOOKS = 1_000
_MAX_SQL_BYTES = 1 << 20
_REGULAR = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""Opening a pipe must not wait for its other end."""


def may_adopt_from(root: Path | None, storage: str) -> bool:
    """Return whether a path that the fleet's directory names is below `root`, as it is spelled."""
    if root is None or "\0" in storage or os.path.normpath(storage) != storage:
        return False
    path = Path(storage)
    return path.is_absolute() and path != root and path.is_relative_to(root)


class OrphanDirectory:
    """The SSD directory of a dead engine. Made by `open_orphans`; used by one thread."""

    def __init__(self, path: Path, folder: int, journal: Journal) -> None:
        """`folder`: the directory at `path`, open; it stays the caller's."""
        self._path = path
        self._folder = folder
        self._journal = journal
        self._slab = -1
        self._told = False

    def read(
        self, artifact: ArtifactId, digest: bytes, size_bytes: int, into: npt.NDArray[np.uint8]
    ) -> Failure | None:
        """Bring the artifact's bytes into `into` ([blocks] uint8, 4 KiB-aligned), verified.

        None if they are there now. `digest`: the checksum in the fleet's record. Raises
        StoreInUseError if an engine is about to start here.
        """
        _let_start_first(self._path)
        try:
            return self._read(artifact, digest, size_bytes, into)
        except (
            StoreError,
            OSError,
            OverflowError,
        ) as e:  # a bad sector, a slab that is short: not of all
            if not self._told:
                logger.warning("%s of %s cannot be read: %s", artifact, self._path, e)
            self._told = True
            return Failure.IO_ERROR

    def close(self) -> None:
        """Idempotent."""
        self._journal.close()
        if self._slab >= 0:
            os.close(self._slab)
            self._slab = -1

    def _read(
        self, artifact: ArtifactId, digest: bytes, size_bytes: int, into: npt.NDArray[np.uint8]
    ) -> Failure | None:
        row = self._journal.find(artifact)
        if row is None or row.checksum != digest or row.size_bytes != size_bytes:
            return Failure.GONE
        offset = self._journal.meta.geometry.offset(artifact.state_type, row.slot)
        if self._slab < 0:
            self._slab = _open_slab(self._folder)
        read_blocks(self._slab, offset, into[: padded(size_bytes)])
        return None if checksum(into[:size_bytes], artifact.seed) == digest else Failure.CHECKSUM


@contextmanager
def open_orphans(
    path: Path, root: Path, is_cancelled: Callable[[], bool] = lambda: False
) -> Iterator[OrphanDirectory]:
    """Read one model's directory, somewhere below `root`, that an engine left behind.

    Raises StoreInUseError while an engine has it or is about to, StoreError or OSError if it
    cannot be read. `is_cancelled`: asked now and then by what may take long.
    """
    with ExitStack() as stack:
        folder = _open_below(root, path)
        stack.callback(os.close, folder)
        for name in (LOCK_NAME, JOURNAL_NAME, *(f"{JOURNAL_NAME}{s}" for s in ("-wal", "-shm"))):
            _require_regular(folder, name, path)
        _require_regular(folder, os.path.join("..", OPENING_LOCK_NAME), path)
        _let_start_first(path)
        if not stack.enter_context(shared(path / LOCK_NAME)):
            raise StoreInUseError(f"{path} is in use by {holder(path / LOCK_NAME)}")
        # Unchecked: that reads all of it, each time, and checksums judge every byte anyway.
        journal = Journal.open_existing(
            path / JOURNAL_NAME,
            read_only=True,
            check=False,
            connect=lambda file, mode: _connect(file, mode, is_cancelled),
        )
        directory = OrphanDirectory(path, folder, journal)
        stack.callback(directory.close)
        yield directory


def _open_below(root: Path, path: Path) -> int:
    """The directory at `path`, open. No link below `root` is followed."""
    if not may_adopt_from(root, str(path)):
        raise StoreError(f"{path} does not lie below {root} (adopt_from)")
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for name in path.relative_to(root).parts:
        try:
            below = os.open(name, _REGULAR | os.O_DIRECTORY, dir_fd=folder)
        finally:
            os.close(folder)
        folder = below
    return folder


def _require_regular(folder: int, name: str, path: Path) -> None:
    """StoreError for anything but a regular file; none is fine."""
    try:
        mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        raise StoreError(f"{path / name} is not a regular file")


def _connect(path: Path, mode: str, is_cancelled: Callable[[], bool]) -> sqlite3.Connection:
    """To a file that may be anybody's work."""
    connection = connect(path, mode)
    until_s = time.monotonic() + _QUERIES_S
    connection.set_progress_handler(
        lambda: is_cancelled() or time.monotonic() > until_s, _OPS_BETWEEN_LOOKS
    )
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_SQL_BYTES)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
        for pragma in ("trusted_schema=OFF", "cell_size_check=ON", "mmap_size=0", "query_only=ON"):
            connection.execute(f"PRAGMA {pragma}")
        tables = connection.execute(
            "SELECT name, type, rootpage FROM sqlite_master "
            "WHERE lower(name) IN ('meta', 'artifacts')"
        ).fetchall()
        for name, kind, page in tables:
            columns = connection.execute("SELECT hidden FROM pragma_table_xinfo(?)", (name,))
            # A view, a virtual table, a computed column: each runs what its author likes.
            if kind != "table" or not page or any(hidden for (hidden,) in columns):
                raise StoreError(f"{path}: {name} is no plain table")
    except BaseException:
        connection.close()
        raise
    return connection


def _let_start_first(path: Path) -> None:
    if is_locked(path.parent / OPENING_LOCK_NAME):
        raise StoreInUseError(f"an engine is opening {path.parent}")


def _open_slab(folder: int) -> int:
    slab = open_direct(SLAB_NAME, _REGULAR, dir_fd=folder)
    if not stat.S_ISREG(os.fstat(slab).st_mode):
        os.close(slab)
        raise StoreError(f"{SLAB_NAME} is not a regular file")
    return slab
