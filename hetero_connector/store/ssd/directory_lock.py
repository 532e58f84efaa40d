"""An exclusive lock on a directory that says who holds it and dies with its holder.

flock is no guard where locks do not reach: NFS mounted with `nolock` or `local_lock`, some FUSE
file systems. There a second engine gets in, and both would write to the same slots. So the
lock's file also says whose it is, in a line with a random word: the engine that finds another
line first has lost the directory, and adds its own line below so that the other one knows, too.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hetero_connector.errors import StoreInUseError
from hetero_connector.store.ssd.private_files import PRIVATE_FLAGS, PRIVATE_MODE

logger = logging.getLogger("vllm.heterocache")

_RETRY_S = 0.05
SERVER_LEASE_S = 120.0
"""An NFS server gives up the locks of a client that crashed after its lease, 90 s by default."""
_LOCKS = Path("/proc/locks")
_MAX_BYTES = 4096
_UNKNOWN = "another process"


class DirectoryLock:
    """flock on `path`, whose content names the holder's pid and host. Not reentrant.

    The lock belongs to the open file, so it is gone when the holder is, however it ended.
    The file's modification time is when the directory was last in use.
    """

    def __init__(self, path: Path, fd: int, line: bytes) -> None:
        """`line`: what the file says of us."""
        self.path = path
        self._fd: int | None = fd
        self._line = line
        self._has_told = False

    @classmethod
    def acquire(cls, path: Path, wait_s: float = 0.0, readers_wait_s: float = 0.0) -> DirectoryLock:
        """Raises StoreInUseError naming the holder after `wait_s`, OSError if it cannot be made.

        `readers_wait_s`: how long those who share it (`shared`) are waited for. A lock of this
        host whose holder does not live is a file server's: it is waited for, with one line in the
        log.
        """
        started_s, is_servers = time.monotonic(), False
        while (lock := cls.try_acquire(path)) is None:
            patience_s = wait_s if is_locked(path) else max(wait_s, readers_wait_s)
            if _is_left_over(path):
                patience_s = max(patience_s, SERVER_LEASE_S)
                if not is_servers:
                    is_servers = True
                    logger.warning(
                        "%s was locked by %s, which is not seen here any more: a file server keeps "
                        "the locks of a host that crashed for a while; waiting up to %.0f s",
                        path,
                        holder(path),
                        SERVER_LEASE_S,
                    )
            if time.monotonic() - started_s >= patience_s:
                raise StoreInUseError(_in_use(path))
            time.sleep(_RETRY_S)
        return lock

    @classmethod
    def try_acquire(cls, path: Path) -> DirectoryLock | None:
        """Return the lock, or None if another process has it."""
        fd = _flocked(path, os.O_RDWR | os.O_CREAT, fcntl.LOCK_EX)
        if fd is None:
            return None
        try:
            os.fchmod(fd, PRIVATE_MODE)  # whoever can open it can lock it
            os.ftruncate(fd, 0)
            who = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
            line = json.dumps(who | {"nonce": secrets.token_hex(16)}).encode() + b"\n"
            os.pwrite(fd, line, 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, line)

    def taken_by(self) -> str | None:
        """Name the process that took the directory although we hold its lock; None: none has.

        Tells the other one that we are here, once. OSError if the file cannot be read.
        """
        if self._fd is None:
            return None
        content = os.pread(self._fd, _MAX_BYTES, 0)
        if not content or content.startswith(self._line):
            return None
        if not self._has_told:
            self._has_told = True
            os.pwrite(self._fd, self._line, len(content))
        return _named(content)

    def intruder(self) -> str | None:
        """Name the process that held the directory when we took it, and noticed; None: none has."""
        if self._fd is None:
            return None
        content = os.pread(self._fd, _MAX_BYTES, 0)
        other = content.removeprefix(self._line)
        return _named(other) if other and other != content else None

    def mark_used(self) -> None:
        """Note in the file that the directory is in use now."""
        if self._fd is not None:
            with suppress(OSError):  # a file system that has become read-only
                os.utime(self._fd)

    def release(self) -> None:
        """Idempotent."""
        if self._fd is not None:
            self.mark_used()
            fd, self._fd = self._fd, None
            os.close(fd)


def holder(path: Path) -> str:
    """Name the process that holds the lock at `path`, for error messages.

    The kernel's word where it has one (a lock of this host, in this container), else the file's:
    whoever can open the file can lock it without writing his name there.
    """
    try:
        content, found = path.read_bytes()[:_MAX_BYTES], os.stat(path)
    except OSError:
        return _UNKNOWN
    named = _named(content)
    pids = _flock_holders(found)
    if not pids or any(f"process {pid} on {socket.gethostname()}" == named for pid in pids):
        return named
    return f"process {pids[0]} ({_command(pids[0])}) on {socket.gethostname()}"


def _is_left_over(path: Path) -> bool:
    """Return whether this host had the lock and no process of it has: the kernel knows of none."""
    try:
        content, found = path.read_bytes()[:_MAX_BYTES], os.stat(path)
        who = json.loads(content.partition(b"\n")[0])
        pid, host = int(who["pid"]), who["host"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    if host != socket.gethostname() or _flock_holders(found):
        return False
    return not Path(f"/proc/{pid}").exists()


def is_lock_file(content: bytes) -> bool:
    """Return whether `content` is a lock's: a first line that names a process."""
    return _named(content) != _UNKNOWN


def _named(content: bytes) -> str:
    """Whom the first line of a lock's file names."""
    try:
        who = json.loads(content.partition(b"\n")[0])
        return f"process {who['pid']} on {who['host']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return _UNKNOWN


def _flock_holders(file: os.stat_result) -> list[int]:
    """Processes that hold an flock on a file, as far as /proc/locks shows them."""
    device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    try:
        rows = [line.split() for line in _LOCKS.read_text().splitlines()]
    except OSError:
        return []
    # `1: FLOCK  ADVISORY  WRITE 1234 08:01:5678 0 EOF`; a waiter's line has `->` after the number.
    return [int(r[4]) for r in rows if len(r) > 5 and r[1] == "FLOCK" and r[5] == device]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended"


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock alone. Only looks; False without a file."""
    try:
        with shared(path) as is_shared:
            return not is_shared
    except FileNotFoundError:
        return False


@contextmanager
def shared(path: Path) -> Iterator[bool]:
    """Share the lock, so that no process can acquire it; yield False if one already has.

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
    """Return the file at `path`, opened and locked; None if another lock forbids it."""
    while True:
        fd = os.open(path, flags | PRIVATE_FLAGS, PRIVATE_MODE)
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
    """Say why the lock cannot be had. Readers leave the last holder's name in the file."""
    if is_locked(path):
        who, advice = f"in use by {holder(path)}", "stop that engine"
    else:
        who, advice = "being read by peers that take over from a dead engine", "start again"
    return f"{path.parent} is {who}; {advice}"


def _is_at(fd: int, path: Path) -> bool:
    try:
        here, there = os.fstat(fd), os.stat(path)
    except FileNotFoundError:
        return False
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
