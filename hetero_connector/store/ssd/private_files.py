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


def create_private(path: Path) -> None:
    """Make an empty file, unless there is one."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | PRIVATE_FLAGS, PRIVATE_MODE))


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
