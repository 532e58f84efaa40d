"""One engine alone may write to a directory, or any number may read it."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hetero_connector.errors import StoreInUseError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.store.ssd.directory_lock import DirectoryLock, holder, shared
from hetero_connector.store.ssd.space import JOURNAL_NAME, make_room


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
    assert shares.wait(60)
    make_room(tmp_path, tmp_path / "own", 4096, 8192, {})
    assert not unused.exists()
    reader.join()


_FOREIGN = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDONLY)
fcntl.flock(fd, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_error_names_who_really_holds_the_lock(tmp_path: Path) -> None:
    """Not the engine that held it last: its name is still in the file."""
    path = tmp_path / "lock"
    DirectoryLock.acquire(path).release()
    with subprocess.Popen(
        [sys.executable, "-c", _FOREIGN, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"locked\n"
        with pytest.raises(StoreInUseError, match=rf"process {other.pid} \(.*python.*\)"):
            DirectoryLock.acquire(path)
        other.communicate()


def test_without_the_kernels_word_the_files_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another host, or where /proc shows no locks."""
    monkeypatch.setattr("hetero_connector.store.ssd.directory_lock._LOCKS", tmp_path / "none")
    held = DirectoryLock.acquire(tmp_path / "lock")
    with pytest.raises(StoreInUseError, match=f"process {os.getpid()} on "):
        DirectoryLock.acquire(tmp_path / "lock")
    held.release()
    assert holder(tmp_path / "nothing") == "another process"


def test_where_locks_do_not_reach_both_holders_learn_of_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda fd, how: None)
    older = DirectoryLock.acquire(tmp_path / "lock")
    assert older.taken_by() is None
    newer = DirectoryLock.acquire(tmp_path / "lock")
    me = f"process {os.getpid()} on "
    assert newer.taken_by() is newer.intruder() is None, "not before the older one has noticed"
    for _ in range(2):
        assert str(older.taken_by()).startswith(me)
        assert str(newer.intruder()).startswith(me)
        assert newer.taken_by() is None
    older.release()
    newer.release()
    after = DirectoryLock.acquire(tmp_path / "lock")
    assert after.taken_by() is after.intruder() is None
    after.release()


def test_a_lock_file_that_others_could_lock_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    path.touch(0o644)
    path.chmod(0o644)
    DirectoryLock.acquire(path).release()
    assert path.stat().st_mode & 0o777 == 0o600


class Server:
    """Keeps a lock that the kernel of this host knows nothing of, as a file server does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, refusals: int) -> None:
        self.refusals = refusals
        self.waited_s = 0.0
        monkeypatch.setattr(fcntl, "flock", self._flock)
        monkeypatch.setattr("time.sleep", self._sleep)
        monkeypatch.setattr("time.monotonic", lambda: self.waited_s)

    def _flock(self, fd: int, how: int) -> None:
        if self.waited_s < self.refusals:
            raise BlockingIOError

    def _sleep(self, seconds: float) -> None:
        self.waited_s += seconds


def left_by(path: Path, pid: int) -> None:
    path.write_text(json.dumps({"pid": pid, "host": socket.gethostname(), "since": 0.0}))


def test_a_lock_that_a_file_server_keeps_for_a_crashed_host_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "lock"
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        pass
    left_by(path, ended.pid)
    server = Server(monkeypatch, refusals=90)
    DirectoryLock.acquire(path).release()
    assert 90 <= server.waited_s < 91
    assert [m for m in caplog.messages if "is not seen here any more" in m] == [caplog.messages[0]]
    left_by(path, ended.pid)
    server.refusals = 10_000
    with pytest.raises(StoreInUseError):
        DirectoryLock.acquire(path)
    assert server.waited_s < 90 + 130, "not for ever"


def test_an_engine_waits_for_one_that_waits_for_the_lock_of_a_crashed_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine that waits is alive, and holds the lock of the whole ssd_dir meanwhile."""
    left_by(tmp_path / ".lock", os.getpid())
    server = Server(monkeypatch, refusals=125)
    SsdDirectory.open(tmp_path, bytes(16), {StateType.DENSE_KV: 4096}, 1 << 20).close()
    assert server.waited_s >= 125


def test_a_lock_of_a_process_that_lives_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock"
    left_by(path, os.getpid())
    server = Server(monkeypatch, refusals=90)
    with pytest.raises(StoreInUseError, match=f"process {os.getpid()} "):
        DirectoryLock.acquire(path)
    assert server.waited_s == 0.0
