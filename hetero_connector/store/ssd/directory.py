"""The SSD tier's files for one model, and whose they are.

    ssd_dir/.lock                       held for a moment while a directory is opened
    ssd_dir/<fingerprint, 16 hex>/lock  held by the engine that uses it
                                 /journal.sqlite
                                 /generation          which resets it has seen
                                 /learned.json        what its engines have learned
                                 /slots.slab
                                 /cleared-salts.json  how often each salt and model was cleared

The slab file is preallocated and its slots never move, so a write to it never runs out of disk,
except where the file system copies on write (btrfs, zfs). It is cut as the arena is. Only the
engine's user can open any of it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hetero_connector.artifacts.generation import FIRST, Generation
from hetero_connector.errors import (
    ConfigError,
    StoreError,
    StoreInUseError,
    StoreTakenError,
    TransferError,
)
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry, bundles_of, padded
from hetero_connector.store.ssd.directory_lock import SERVER_LEASE_S, DirectoryLock
from hetero_connector.store.ssd.generation_file import (
    GENERATION_NAME,
    GenerationFile,
    GenerationKeeper,
)
from hetero_connector.store.ssd.journal import Journal
from hetero_connector.store.ssd.journal_connection import Connect, connect
from hetero_connector.store.ssd.journal_format import (
    CorruptJournalError,
    JournalMeta,
    UnreadableJournalError,
)
from hetero_connector.store.ssd.private_files import (
    PRIVATE_DIRECTORY_MODE,
    PRIVATE_FLAGS,
    PRIVATE_MODE,
    make_private,
    others_can_replace,
    sync_folder,
)
from hetero_connector.store.ssd.space import (
    JOURNAL_NAME,
    LOCK_NAME,
    OPENING_LOCK_NAME,
    SLAB_NAME,
    is_own_name,
    make_room,
    model_directory,
    no_space,
    room_beside_live,
)
from hetero_connector.transfer.base import OpenFile, is_direct, open_direct
from hetero_connector.units import GIB

logger = logging.getLogger("vllm.heterocache")

_ROW_BYTES = 512
"""Journal bytes an artifact may cost: a row in two b-trees, at SQLite's usual fill."""
_WAL_BYTES = 8 << 20
_READERS_WAIT_S = 30.0
"""Peers that adopt from here release the lock after an artifact."""
_OPEN_WAIT_S = SERVER_LEASE_S + _READERS_WAIT_S + 30.0
"""Longer than an engine that opens its directory waits for that one's lock."""
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_NO_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST}
_NO_ACCESS |= {errno.ENOENT, errno.ELOOP}


class UnfinishedDirectoryError(StoreError):
    """Making the directory was cut short: it lists nothing and lacks its slab file."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} was left unfinished; start its engine once")


class SsdDirectory:
    """An open, locked directory: its slab file, journal and warnings. Built by `open`."""

    def __init__(
        self, path: Path, lock: DirectoryLock, geometry: SlotGeometry, connect: Connect
    ) -> None:
        self.path = path
        self.geometry = geometry
        """The cut of the slab file."""
        self.direct = True
        """True if the slab is open with O_DIRECT."""
        self.warnings: list[str] = []
        """Problems that were found and mended at opening; also logged."""
        self.journal: Journal
        self.generations: GenerationKeeper
        """The resets that the state here has seen."""
        self._lock = lock
        self._connect = connect
        self._fd = -1
        self._made_slab = False
        self._found_bytes = 0
        """The size that the slab file had when it was opened."""
        self._warned_of_intruder = False
        self._last_look_failed = False

    @classmethod
    def open(
        cls,
        root: Path,
        fingerprint: bytes,
        slot_bytes: Mapping[StateType, int],
        ssd_bytes: int,
        description: Mapping[str, Any] | None = None,
        connect: Connect = connect,
        *,
        keep_unused: bool = False,
        generation: Generation | None = None,
    ) -> SsdDirectory:
        """Open or create a model's directory in `root`, all of which stays within `ssd_bytes`.

        `slot_bytes`: a slot's size by state type. The slab is as large as fits next to the
        running engines of other models; state of models that are not in use is removed for it, or,
        with `keep_unused`, counted like theirs. Rows
        whose slots are no more (a lower `ssd_bytes`, a truncated slab) are forgotten. A directory
        without a journal gets this `generation`; None: the one it has, else the first. Raises
        ConfigError (`ssd_dir`, `ssd_gib`), StoreInUseError, FormatError, StoreError.
        """
        ssd_geometry(slot_bytes, ssd_bytes)  # before anything is created
        path = model_directory(root, fingerprint)
        try:
            root.mkdir(PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
            is_new = not (root / OPENING_LOCK_NAME).exists()
            opening = DirectoryLock.acquire(root / OPENING_LOCK_NAME, wait_s=_OPEN_WAIT_S)
            try:
                room = room_beside_live(root, path, ssd_bytes, keep_unused=keep_unused)
                geometry = ssd_geometry(slot_bytes, room)
                meta = JournalMeta(fingerprint, geometry, description or {}, created=time.time())
                path.mkdir(PRIVATE_DIRECTORY_MODE, exist_ok=True)
                widest = make_private(path, is_own_name)
                lock = DirectoryLock.acquire(path / LOCK_NAME, readers_wait_s=_READERS_WAIT_S)
                directory = cls(path, lock, geometry, connect)
                try:
                    if widest is not None:
                        directory._warn(
                            f"other users could open files of {path} (mode {widest:o}): now only "
                            "this one can"
                        )
                    if others_can_replace(root):
                        directory._warn(
                            f"other users can write to {root}, and so put directories of theirs in "
                            "place of this engine's; take that right from them"
                        )
                    with _advice(path):
                        directory._open_files(root, meta, room, keep_unused, generation)
                except BaseException:
                    directory._abandon()
                    raise
            except BaseException:
                if is_new:  # who waits for it makes another one
                    (root / OPENING_LOCK_NAME).unlink(missing_ok=True)
                raise
            finally:
                opening.release()
            try:
                with _advice(path):
                    directory._check_journal(meta)
            except BaseException:
                directory._abandon()
                raise
        except StoreInUseError as e:
            raise StoreInUseError(f"{e}, or give this engine another ssd_dir") from e
        except (ConfigError, StoreError):
            raise
        except OSError as e:
            raise _explain(e, root) from e
        return directory

    @classmethod
    def open_existing(cls, path: Path) -> SsdDirectory:
        """Open a model's directory for a tool, cut as its last engine left it.

        Raises StoreInUseError; StoreError if it is damaged, UnfinishedDirectoryError if nothing was
        stored in it yet: its engine mends that when it starts.
        """
        with _errors_at(path), contextlib.ExitStack() as undo:
            make_private(path, is_own_name)
            lock = DirectoryLock.acquire(path / LOCK_NAME, readers_wait_s=_READERS_WAIT_S)
            undo.callback(lock.release)
            slab = path / SLAB_NAME
            try:
                journal = Journal.open_existing(path / JOURNAL_NAME)
            except CorruptJournalError:
                if slab.exists():
                    raise
                raise UnfinishedDirectoryError(path) from None
            undo.callback(journal.close)
            directory = cls(path, lock, journal.meta.geometry, connect)
            directory.journal = journal
            found_bytes = slab.stat().st_size if slab.exists() else 0
            if found_bytes < directory.geometry.size_bytes:
                if not journal.count():
                    raise UnfinishedDirectoryError(path)
                raise StoreError(
                    f"the slab file of {path} is missing or too short; start its engine once"
                )
            if not (path / GENERATION_NAME).exists():
                raise StoreError(f"{path} was left unfinished; start its engine once")
            generations = GenerationFile.open(path / GENERATION_NAME, is_new=False)
            directory.generations = GenerationKeeper(generations)
            undo.callback(directory.close)
            directory._fd = open_direct(slab, os.O_RDWR | PRIVATE_FLAGS)
            directory.direct = is_direct(directory._fd)
            journal.check_owner = directory.check_owner
            undo.pop_all()
            return directory

    @property
    def files(self) -> tuple[OpenFile, ...]:
        """The files of a transfer: the slab."""
        return (OpenFile(self._fd, self.geometry.size_bytes),)

    def sync(self) -> None:
        """Wait until every slab byte written so far survives a power cut. TransferError if not."""
        try:
            os.fdatasync(self._fd)
        except OSError as e:
            raise TransferError(e.errno, f"fdatasync of {SLAB_NAME}: {e}") from e

    def why_lost(self) -> str | None:
        """Why the next engine would not find the files where they were; None: it would.

        Where that cannot be seen, the reason comes with the second look in a row that fails.
        """
        try:
            linked = os.fstat(self._fd).st_nlink > 0
            os.stat(self.path / JOURNAL_NAME)
            self.check_owner()
        except FileNotFoundError:
            linked = False
        except StoreTakenError as e:
            return str(e)
        except OSError as e:
            failed_before, self._last_look_failed = self._last_look_failed, True
            return f"its files cannot be reached any more ({e})" if failed_before else None
        self._last_look_failed = False
        return None if linked else "its files were deleted under this engine"

    def check_owner(self) -> None:
        """Before anything is written: StoreTakenError if another engine opened the directory, too.

        Where locks do not reach nothing keeps it out; the last one to come has it. OSError if
        that cannot be seen.
        """
        who = self._lock.taken_by()
        if who is not None:
            raise StoreTakenError(
                f"{who} has opened it, too: locks do not work on this file system; give each "
                "engine an ssd_dir of its own, or one on a local disk"
            )
        if not self._warned_of_intruder and (who := self._lock.intruder()) is not None:
            self._warned_of_intruder = True
            self._warn(
                f"{who} was still using {self.path} when this engine opened it: locks do not work "
                "on this file system. It has stopped writing; give each engine an ssd_dir of its "
                "own, or one on a local disk"
            )

    def mark_used(self) -> None:
        """Note that the directory is in use now: who makes room deletes it after older ones."""
        self._lock.mark_used()

    def close(self) -> None:
        """Close the journal and the slab, release the lock. Idempotent."""
        if hasattr(self, "journal"):
            self.journal.close()
        if hasattr(self, "generations"):
            self.generations.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._lock.release()

    def _abandon(self) -> None:
        """Close after a failed opening: a slab that it made is removed, while it is locked.

        The generation's file stays with the journal, which without it would count as reset.
        """
        if self._made_slab:
            (self.path / SLAB_NAME).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            if os.listdir(self.path) == [LOCK_NAME]:
                (self.path / LOCK_NAME).unlink()
                self.path.rmdir()
        self.close()

    def _open_files(
        self,
        root: Path,
        meta: JournalMeta,
        room_bytes: int,
        keep_unused: bool,
        generation: Generation | None,
    ) -> None:
        """Do what other engines must not do meanwhile: they wait, whatever the journal's size."""
        # The journal first: if it belongs to something else, nothing has been touched yet.
        is_new = not (self.path / JOURNAL_NAME).exists()
        room = root, self.path, self.geometry.size_bytes, room_bytes, meta.description
        if is_new:
            make_room(*room, keep_unused=keep_unused)
            self._open_generation(is_new=True, wanted=generation)
        self._open_journal(meta, check=False)
        if not is_new:
            make_room(*room, keep_unused=keep_unused)
            self._open_generation(is_new=False)
        self._open_slab(root)
        if not self.direct:
            self._warn(f"{self.path} has no O_DIRECT: the page cache will hold the slab, too")
        sync_folder(self.path)
        sync_folder(root)  # in which the directory itself is an entry

    def replace_journal(self) -> None:
        """Move the journal aside, because it is damaged, and begin an empty one."""
        meta = self.journal.meta
        self._journal_was_moved(self.journal.condemn())
        self.journal.close()
        self._open_journal(meta, check=True)
        self.journal.check_owner = self.check_owner

    def _check_journal(self, meta: JournalMeta) -> None:
        """Read the journal for damage, and forget what it lists of slots that are no more."""
        self.journal.close()
        self._open_journal(meta, check=True)
        try:
            self._settle_journal()
        except CorruptJournalError:  # some damage shows only in a statement
            self.replace_journal()
            self._settle_journal()
        self.journal.check_owner = self.check_owner

    def _settle_journal(self) -> None:
        """Make the journal agree with the slab and read what a start reads of it."""
        self.journal.generation()
        # A kill between the slab's opening and this leaves rows that fail their checksums.
        lost = self.journal.forget_bytes_from(self._found_bytes)
        if lost:
            self._warn(f"the slab file of {self.path} is missing or short: {lost} artifacts lost")
        if self.journal.meta.geometry != self.geometry:
            lost = self.journal.resize(self.geometry)
            if lost:
                self._warn(f"{self.path} has another size now: {lost} artifacts lost")

    def _open_journal(self, meta: JournalMeta, *, check: bool) -> None:
        self.journal = Journal.open(self.path / JOURNAL_NAME, meta, self._connect, check)
        if self.journal.moved_aside:
            self._journal_was_moved(self.journal.moved_aside)

    def _journal_was_moved(self, aside: Path) -> None:
        self._warn(
            f"the journal of {self.path} was damaged; it is now {aside.name} and everything it "
            "listed is forgotten"
        )

    @property
    def is_outdated(self) -> bool:
        """True if the journal lists what was stored before the last reset."""
        noted = self.journal.generation()
        return (FIRST.tag if noted is None else noted) != self.generations.latest.tag

    def _open_generation(self, *, is_new: bool, wanted: Generation | None = None) -> None:
        path = self.path / GENERATION_NAME
        file = GenerationFile.open(path, is_new=is_new)
        if wanted is not None and wanted != file.found:
            try:
                file.write(wanted)
            finally:
                file.close()
            file = GenerationFile.open(path, is_new=is_new)
        self.generations = GenerationKeeper(file)

    def _open_slab(self, root: Path) -> None:
        path, size = self.path / SLAB_NAME, self.geometry.size_bytes
        is_new = not path.exists()
        flags = os.O_RDWR | os.O_CREAT | PRIVATE_FLAGS
        self._fd = fd = open_direct(path, flags, PRIVATE_MODE)
        self._made_slab = is_new
        self.direct = is_direct(fd)
        self._found_bytes = before = os.fstat(fd).st_size
        try:
            if before > size:
                os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
        except OSError as e:
            if e.errno not in _NO_SPACE:
                raise
            os.ftruncate(fd, min(before, size))
            raise no_space(root, size - before) from e

    def _warn(self, message: str) -> None:
        self.warnings.append(message)
        logger.warning(message)


@contextlib.contextmanager
def _errors_at(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise StoreError(f"{path} cannot be opened: {e}") from e


@contextlib.contextmanager
def _advice(path: Path) -> Iterator[None]:
    """Say what to do about a journal that the disk does not read or write."""
    try:
        yield
    except UnreadableJournalError as e:
        raise StoreError(
            f"{e}. If this stays so though the disk is sound, delete {path} (what is stored there "
            "is lost), or choose another ssd_dir"
        ) from e


def ssd_geometry(slot_bytes: Mapping[StateType, int], ssd_bytes: int) -> SlotGeometry:
    """Return the cut with which slab and journal stay within `ssd_bytes`, whatever is stored.

    Raises ConfigError (`ssd_gib`) if there is not room for one artifact of each type.
    """
    room = ssd_bytes - min(_WAL_BYTES, ssd_bytes // 16)
    # The bundle with the smallest slots has the most rows.
    smallest = min(
        sum(padded(slot_bytes[t]) for t in bundle) / len(bundle)
        for bundle in bundles_of(slot_bytes)
    )
    share = smallest / (smallest + _ROW_BYTES)
    geometry = SlotGeometry.by_use(slot_bytes, int(room * share))
    if not geometry.count:
        least = geometry.chunk_bytes / share * 16 / 15
        raise ConfigError(
            "ssd_gib",
            f"{ssd_bytes / GIB:.3g} does not hold one artifact of each state type of this "
            f"model; at least {least / GIB:.3g}, or leave ssd_dir out",
        )
    return geometry


def _explain(error: OSError, root: Path) -> ConfigError | StoreError:
    if error.errno in _NO_SPACE:
        return no_space(root, 0)
    if error.errno in _NO_ACCESS:
        return ConfigError(
            "ssd_dir", f"{root} cannot be written ({error}); choose a directory that can be"
        )
    return StoreError(f"{root} cannot be used as ssd_dir: {error}")
