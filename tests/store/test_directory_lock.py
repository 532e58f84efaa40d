"""Who may have a directory: one alone, or any number who read."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from hetero_connector.store.directory_lock import DirectoryLock, shared
from hetero_connector.store.ssd_space import JOURNAL_NAME, make_room


def test_who_shares_shares_the_lock_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its open and its lock the directory is removed, and made again by an engine."""
    path, flock = tmp_path / "lock", fcntl.flock
    path.touch()
    engines: list[DirectoryLock] = []

    def late(fd: int, how: int) -> None:
        if how & fcntl.LOCK_SH and not engines:
            path.unlink()
            engines.append(DirectoryLock.acquire(path))
        flock(fd, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with shared(path) as is_shared:
        assert not is_shared
    engines[0].release()
    with shared(path) as is_shared:
        assert is_shared


def test_a_directory_that_is_being_read_makes_way_when_its_readers_are_done(
    tmp_path: Path,
) -> None:
    unused = tmp_path / "0123456789abcdef"
    unused.mkdir()
    (unused / JOURNAL_NAME).write_bytes(bytes(8192))
    lock = DirectoryLock.acquire(unused / "lock")
    lock.release()
    shares = threading.Event()

    def read() -> None:
        with shared(unused / "lock") as is_shared:
            assert is_shared
            shares.set()
            threading.Event().wait(0.3)

    reader = threading.Thread(target=read)
    reader.start()
    assert shares.wait(10)
    make_room(tmp_path, tmp_path / "own", 4096, 8192)
    assert not unused.exists()
    reader.join()
