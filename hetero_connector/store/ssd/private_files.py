"""Files that only this user can open: state on disk is as private as the prompts behind it."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

from hetero_connector.errors import ConfigError

PRIVATE_MODE = 0o600
PRIVATE_DIRECTORY_MODE = 0o700
PRIVATE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
"""No symbolic links: one at our path would let another user choose where we write."""
_OTHERS = 0o077
_CANNOT_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF, errno.EISDIR}
"""Some filesystems cannot sync a directory; they order their metadata themselves."""


def create_private(path: Path) -> None:
    """Make an empty file, unless there is one."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE_FLAGS, PRIVATE_MODE))


def read_private(path: Path, max_bytes: int) -> bytes:
    """Return the content of a regular file. OSError if it is none, a link, or larger."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | PRIVATE_FLAGS)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        if found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has more than {max_bytes:,} bytes")
        return file.read(max_bytes)


def replace_private(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, also at a power cut, in place of the last one.

    The file `<path>.new` is used for it. Raises OSError.
    """
    new = path.with_name(f"{path.name}.new")
    new.unlink(missing_ok=True)
    with open(
        os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | PRIVATE_FLAGS, PRIVATE_MODE), "wb"
    ) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a power cut. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _CANNOT_SYNC:
            raise
    finally:
        os.close(fd)


def make_private(directory: Path, is_ours: Callable[[str], object]) -> int | None:
    """Take the rights of other users from `directory` and from its files that are ours, by name.

    Returns the widest mode that any had; None if nothing was open to others. ConfigError
    (`ssd_dir`) if something of ours is no regular file, or belongs to another user who lets others
    in; OSError if it cannot be looked at.
    """
    found = _close_to_others(directory, os.O_DIRECTORY)
    for entry in os.scandir(directory):
        if is_ours(entry.name):
            found |= _close_to_others(Path(entry.path), os.O_NONBLOCK)
    return found if found & _OTHERS else None


def others_can_replace(directory: Path) -> bool:
    """Return whether other users may rename or remove what lies in `directory`."""
    mode = directory.stat().st_mode
    return bool(mode & (stat.S_IWGRP | stat.S_IWOTH)) and not mode & stat.S_ISVTX


def _close_to_others(path: Path, flags: int) -> int:
    """The mode it had."""
    try:
        fd = os.open(path, os.O_RDONLY | PRIVATE_FLAGS | flags)
    except FileNotFoundError:  # an engine that stops removes its journal's WAL
        return 0
    except OSError as e:
        if e.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENXIO):  # a link, a file, a socket
            raise
        raise ConfigError("ssd_dir", f"{path} is not what this package made: {e}; remove it") from e
    try:
        kind = os.fstat(fd).st_mode
        if not stat.S_ISREG(kind) and not flags & os.O_DIRECTORY:
            what = "a directory" if stat.S_ISDIR(kind) else "no regular file"
            raise ConfigError(
                "ssd_dir",
                f"{path} is {what}, where this package keeps a file of its own; remove it",
            )
        mode = stat.S_IMODE(kind)
        if mode & _OTHERS:
            try:
                os.fchmod(fd, mode & ~_OTHERS)
            except PermissionError as e:
                raise ConfigError(
                    "ssd_dir",
                    f"{path} belongs to another user and is open to others (mode {mode:o}); "
                    "give it to the user of this engine, or choose another directory",
                ) from e
        return mode
    finally:
        os.close(fd)
