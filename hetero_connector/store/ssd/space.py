"""Room on the SSD: what lies in an ssd_dir, whose it is, and making space in it."""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero_connector.errors import ConfigError, StoreError, StoreInUseError
from hetero_connector.store.ssd.directory_lock import (
    DirectoryLock,
    holder,
    is_lock_file,
    is_locked,
)
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.units import size_text

logger = logging.getLogger("vllm.heterocache")

JOURNAL_NAME = "journal.sqlite"
LOCK_NAME = "lock"
OPENING_LOCK_NAME = ".lock"
"""The lock of an ssd_dir itself, held while an engine opens a directory in it."""
SLAB_NAME = "slots.slab"
LEARNED_NAME = "learned.json"
"""The profile of what the directory's engines have learned."""
_READERS_WAIT_S = 2.0
"""Peers that adopt from a directory release its lock after an artifact when an engine starts."""
_FULL = 7 / 8
"""An engine takes nearly all of its ssd_gib; the rest is too small for another tier."""
_MODEL_DIRECTORY = re.compile(r"[0-9a-f]{16}")
_OURS = re.compile(
    r"lock|generation(\.new)?|journal\.sqlite(-wal|-shm)?|journal\.corrupt-.*|"
    rf"{re.escape(SLAB_NAME)}|{re.escape(LEARNED_NAME)}(\.new)?|cleared-salts\.json(\.new)?"
)
_SETTINGS = (
    *("model_dtype", "kv_cache_dtype", "quantization", "chunk_tokens", "layout"),
    *("attention_backend", "engine_version", "tp_size"),
)
"""Parts of a description that are settings of the engine; the rest of them is in `extras`."""
_SQLITE_MAGIC = b"SQLite format 3\0"


@dataclass(frozen=True)
class ModelDirectory:
    """A model's directory inside an ssd_dir."""

    path: Path
    disk_bytes: int
    last_used: float
    """Unix time, seconds."""

    @property
    def lock_path(self) -> Path:
        """Its lock file."""
        return self.path / LOCK_NAME


def model_directory(root: Path, fingerprint: bytes) -> Path:
    """Return a model's directory in `root`: named by the fingerprint's first 16 hex digits."""
    return root / fingerprint.hex()[:16]


def is_own_name(name: str) -> bool:
    """Return whether a file of this name in a model's directory is ours."""
    return _OURS.fullmatch(name) is not None


def is_model_directory(path: Path) -> bool:
    """Return whether `path` looks like one that this package made."""
    return path.is_dir() and (path / JOURNAL_NAME).exists()


def may_remove(path: Path) -> bool:
    """Return whether this package made the directory `path`, for this user.

    Its name does not say so: its lock must be one of ours, or its journal a SQLite file.
    """
    try:
        found = path.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
            return False
        journal = _first_bytes(path / JOURNAL_NAME, len(_SQLITE_MAGIC))
        return journal == _SQLITE_MAGIC or is_lock_file(_first_bytes(path / LOCK_NAME, 4096))
    except OSError:
        return False


def _first_bytes(path: Path, count: int) -> bytes:
    """Return the beginning of a regular file; nothing of anything else. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return b""
    try:
        return os.pread(fd, count, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
    finally:
        os.close(fd)


def model_directories(root: Path) -> Iterator[ModelDirectory]:
    """Every model's directory in `root`, unfinished ones included, in no order.

    Links are not followed.
    """
    for path in root.iterdir():
        is_directory = path.is_dir() and not path.is_symlink()
        if not (_MODEL_DIRECTORY.fullmatch(path.name) and is_directory):
            continue
        try:
            sizes = [_disk_bytes(entry) for entry in os.scandir(path)]
            used = _modified(path / LOCK_NAME) or path.stat().st_mtime
        except FileNotFoundError:
            continue  # its engine, or another one starting, removed it meanwhile
        yield ModelDirectory(path, sum(sizes), used)


def _disk_bytes(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks * 512
    except FileNotFoundError:  # an engine that stops removes its journal's WAL
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def room_beside_live(root: Path, own: Path, limit_bytes: int, *, keep_unused: bool = False) -> int:
    """Return the part of `limit_bytes` that running engines of other models leave to `own`.

    `keep_unused`: what no engine uses stays, too. Raises ConfigError if nothing is left. Call with
    `root` locked.
    """
    others = (d for d in model_directories(root) if d.path != own)
    live = [d for d in others if keep_unused or is_locked(d.lock_path)]
    live_bytes = sum(d.disk_bytes for d in live)
    if live and live_bytes >= limit_bytes * _FULL:
        users = ", ".join(
            holder(d.lock_path) if is_locked(d.lock_path) else f"another model ({d.path.name})"
            for d in live
        )
        raise ConfigError(
            "ssd_gib",
            f"{root} may hold {size_text(limit_bytes)} and {size_text(live_bytes)} of them are in "
            f"use by {users}; give this engine another ssd_dir, or an ssd_gib for both together",
        )
    return limit_bytes - live_bytes


def make_room(
    root: Path,
    own: Path,
    needed_bytes: int,
    room_bytes: int,
    description: Mapping[str, Any],
    *,
    keep_unused: bool = False,
) -> None:
    """Let `own` grow to `needed_bytes` while it and unused models stay within `room_bytes`.

    Directories of models that no engine uses are removed for it, least recently used first, and
    only if needed; a directory that this package did not make stays, and all do with `keep_unused`.
    The log says what differs in them from the `description` of this engine's model. Raises
    ConfigError if the filesystem has too little space even then. Call with `root` locked.
    """
    directories = list(model_directories(root))
    present = next((d.disk_bytes for d in directories if d.path == own), 0)
    unused = [
        d
        for d in directories
        if not keep_unused and d.path != own and may_remove(d.path) and not is_locked(d.lock_path)
    ]
    unused_bytes = sum(d.disk_bytes for d in unused)
    for victim in sorted(unused, key=lambda d: d.last_used):
        fits = unused_bytes + needed_bytes <= room_bytes
        if fits and free_bytes(root) + present >= needed_bytes:
            return
        if _remove(victim, description):
            unused_bytes -= victim.disk_bytes
    if free_bytes(root) + present < needed_bytes:
        raise no_space(root, needed_bytes - present)


def free_bytes(root: Path) -> int:
    """Bytes an ordinary user may still write on the filesystem of `root`."""
    stat = os.statvfs(root)
    return stat.f_bavail * stat.f_frsize


def no_space(root: Path, asked_bytes: int) -> ConfigError:
    """The error for a filesystem that is too full."""
    return ConfigError(
        "ssd_gib",
        f"asks for {size_text(asked_bytes)} more in {root}, where {size_text(free_bytes(root))} "
        "are free; lower ssd_gib, free space, or choose another ssd_dir",
    )


def _difference(path: Path, description: Mapping[str, Any]) -> str:
    """Say of what model or settings the unused directory `path` is, next to this engine's."""
    try:
        journal = Journal.open_existing(path / JOURNAL_NAME, read_only=True, check=False)
    except StoreError:
        return "of a model or settings not in use"
    other = journal.meta.description
    journal.close()
    if other.get("weights") != description.get("weights"):
        return f"of the model {other.get('model_name') or 'without a name'}, not in use"
    extras = [_extras_of(x) for x in (other, description)]
    one, two = extras[0] | dict(other), extras[1] | dict(description)
    names = {*_SETTINGS, *extras[0], *extras[1]}
    changed = sorted(name for name in names if one.get(name) != two.get(name))
    return f"of this model with other settings: {', '.join(changed) or 'its configuration'}"


def _extras_of(description: Mapping[str, Any]) -> dict[str, Any]:
    """Return what else a description has; the unused directory's may be damaged."""
    extras = description.get("extras")
    return dict(extras) if isinstance(extras, Mapping) else {}


def _remove(victim: ModelDirectory, description: Mapping[str, Any]) -> bool:
    """Delete an unused model's directory; False if an engine uses it or it cannot be deleted."""
    try:
        lock = DirectoryLock.acquire(victim.lock_path, readers_wait_s=_READERS_WAIT_S)
    except StoreInUseError:
        return False
    try:
        logger.warning(
            "removing %s (%s, %s) to stay within ssd_gib; to keep such state, use another ssd_dir",
            victim.path,
            size_text(victim.disk_bytes),
            _difference(victim.path, description),
        )

        # The journal first: interrupted, this leaves a slab that nothing refers to, and no rows
        # without the generation that they belong to.
        def order(name: str) -> tuple[bool, bool, str]:
            return name == LOCK_NAME, name != JOURNAL_NAME, name

        for name in sorted(os.listdir(victim.path), key=order):
            if is_own_name(name):
                (victim.path / name).unlink()
        victim.path.rmdir()
    except OSError as e:
        if e.errno != errno.ENOTEMPTY:  # a user's own files: they stay, ours are gone
            logger.warning("cannot remove %s: %s", victim.path, e)
            return False
    finally:
        lock.release()
    return True
