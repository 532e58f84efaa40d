"""An exclusive lock on a directory that says who holds it and dies with its holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero_connector.errors import StoreInUseError

_RETRY_S = 0.05


class DirectoryLock:
    """flock on `path`, whose content names the holder's pid and host. Not reentrant.

    The lock belongs to the open file, so it is gone when the holder is, however it ended.
    The file's modification time is when the directory was last in use.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd: int | None = fd

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.0, readers_wait_s: float = 0.0) -> DirectoryLock:
        """Raises StoreInUseError naming the holder after `wait_s`, OSError if it cannot be made.

        `readers_wait_s`: how long those who share it (`shared`) are waited for.
        """
        started_s = time.monotonic()
        while (lock := cls.try_acquire(path)) is None:
            patience_s = wait_s if is_locked(path) else max(wait_s, readers_wait_s)
            if time.monotonic() - started_s >= patience_s:
                raise StoreInUseError(_in_use(path))
            time.sleep(_RETRY_S)
        return lock

    @classmethod
    def try_acquire(cls, path: Path) -> DirectoryLock | None:
        """The lock, or None if somebody holds it."""
        fd = _flocked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        if fd is None:
            return None
        try:
            os.ftruncate(fd, 0)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            os.pwrite(fd, json.dumps(who).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            fd, self._fd = self._fd, None
            with suppress(OSError):  # a file system that has become read-only
                os.utime(fd)
            os.close(fd)


def holder(path: Path) -> str:
    """Who wrote the lock file at `path`, for error messages."""
    try:
        who = json.loads(path.read_text())
        return f"process {who['pid']} on {who['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock now, alone. Changes nothing on disk; False without a file."""
    try:
        with shared(path) as is_shared:
            return not is_shared
    except FileNotFoundError:
        return False


@contextmanager
def shared(path: Path) -> Iterator[bool]:
    """Keep others from acquiring the lock for a while; False if somebody has. Any number may.

    Changes nothing on disk. Raises OSError, where there is no lock file for one.
    """
    fd = _flocked(path, os.O_RDONLY, fcntl.LOCK_SH)
    if fd is None:
        yield False
        return
    try:
        yield True
    finally:
        os.close(fd)


def _flocked(path: Path, flags: int, operation: int) -> int | None:
    """The file at `path`, opened and locked; None if somebody has it locked otherwise."""
    while True:
        fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(fd, operation | fcntl.LOCK_NB)
            if _is_at(fd, path):
                return fd
        except BlockingIOError:
            os.close(fd)
            return None
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)  # its directory was removed between our open and our lock


def _in_use(path: Path) -> str:
    """Why the lock cannot be had. Those who only read it leave the last holder's name in it."""
    if is_locked(path):
        who, advice = f"in use by {holder(path)}", "stop that engine"
    else:
        who, advice = "being read by peers that take over from a dead engine", "start again"
    return f"{path.parent} is {who}; {advice}, or give this one another ssd_dir"


def _is_at(fd: int, path: Path) -> bool:
    try:
        here, there = os.fstat(fd), os.stat(path)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
