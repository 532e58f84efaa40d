"""A dead engine's SSD directory, read by another: never written, and only while no engine has it.

The engine's death lets go of the directory's lock, however it died; a stopped one keeps it. While
its orphans are read the lock is shared among those who read, so an engine that starts there waits
until they let go: between two artifacts they look whether one does. Where locks do not reach (a
network file system that keeps them local) the checksum, which is the directory's record's and is
seeded with the artifact's id, still tells bytes that somebody overwrites.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StoreError, StoreInUseError
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure
from hetero_connector.store.directory_lock import holder, is_locked, shared
from hetero_connector.store.journal import Journal
from hetero_connector.store.reading import padded
from hetero_connector.store.ssd_space import JOURNAL_NAME, LOCK_NAME, OPENING_LOCK_NAME, SLAB_SUFFIX
from hetero_connector.transfer.checksum import checksum

logger = logging.getLogger("vllm.heterocache")


class OrphanDirectory:
    """What a dead engine left. Made by `open_orphans`; used by one thread."""

    def __init__(self, path: Path, journal: Journal) -> None:
        self._path = path
        self._journal = journal
        self._slabs: dict[StateType, int] = {}
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
        except (StoreError, OSError) as e:  # a bad sector, a slab that is missing: not of all
            if not self._told:
                logger.warning("%s of %s cannot be read: %s", artifact, self._path, e)
            self._told = True
            return Failure.IO_ERROR

    def close(self) -> None:
        """Idempotent."""
        self._journal.close()
        while self._slabs:
            os.close(self._slabs.popitem()[1])

    def _read(
        self, artifact: ArtifactId, digest: bytes, size_bytes: int, into: npt.NDArray[np.uint8]
    ) -> Failure | None:
        row = self._journal.find(artifact)
        if row is None or row.checksum != digest or row.size_bytes != size_bytes:
            return Failure.GONE
        slot_bytes = self._journal.meta.slabs[artifact.state_type].slot_bytes
        target = into[: padded(size_bytes)]
        if not self._fill(artifact.state_type, row.slot * slot_bytes, target):
            return Failure.IO_ERROR
        return None if checksum(into[:size_bytes], artifact.seed) == digest else Failure.CHECKSUM

    def _fill(self, state_type: StateType, offset: int, target: npt.NDArray[np.uint8]) -> bool:
        """False where the slab ends before. Raises OSError."""
        done = 0
        while done < len(target):
            moved = os.preadv(self._slab(state_type), [target.data[done:]], offset + done)
            if not moved:
                return False
            done += moved
        return True

    def _slab(self, state_type: StateType) -> int:
        if state_type not in self._slabs:
            path = self._path / f"{state_type.value}{SLAB_SUFFIX}"
            self._slabs[state_type] = _open_direct(path)
        return self._slabs[state_type]


@contextmanager
def open_orphans(path: Path) -> Iterator[OrphanDirectory]:
    """Read one model's directory that an engine left behind.

    Raises StoreInUseError while an engine has it or is about to, StoreError or OSError if it
    cannot be read.
    """
    _let_start_first(path)
    with ExitStack() as stack:
        if not stack.enter_context(shared(path / LOCK_NAME)):
            raise StoreInUseError(f"{path} is in use by {holder(path / LOCK_NAME)}")
        # Unchecked: that reads all of it, each time, and checksums judge every byte anyway.
        journal = Journal.open_existing(path / JOURNAL_NAME, read_only=True, check=False)
        directory = OrphanDirectory(path, journal)
        stack.callback(directory.close)
        yield directory


def _let_start_first(path: Path) -> None:
    if is_locked(path.parent / OPENING_LOCK_NAME):
        raise StoreInUseError(f"an engine is opening {path.parent}")


def _open_direct(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
