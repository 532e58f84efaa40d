"""Slab files on a faulty disk: a `FileTransfer`, and the fdatasync of what it wrote."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from collections.abc import Iterator, Sequence
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreClosedError, TransferError
from hetero_connector.store.ssd.directory import SsdDirectory
from hetero_connector.transfer.base import (
    Direction,
    Extent,
    OpenFile,
    TransferState,
    check_extents,
)
from tests.faults.disk import Disk, DiskError, Fate

Bytes = npt.NDArray[np.uint8]


class FaultyTransfer:
    """Moves its bytes when it is polled, after a number of polls that the seed chooses."""

    def __init__(self, files: FaultyFiles, direction: Direction, extents: Sequence[Extent]) -> None:
        self.error: TransferError | None = None
        self.extents = tuple(extents)
        self.direction = direction
        self._files = files
        self._disk = files.disk
        self._state = TransferState.PENDING
        self._polls_left = random.Random(f"{self._disk.seed}/polls/{files.submitted}").randrange(3)
        try:
            self.fate = self._disk.fate(f"slab.{direction}", blocks=False)
        except DiskError:
            self.fate = Fate.FAILS
        self._goes_on = self._disk.goes_on(self.fate)

    @property
    def terminal(self) -> bool:
        """See `Transfer`."""
        return self._state is not TransferState.PENDING

    def poll(self) -> TransferState:
        """See `Transfer`."""
        if self.terminal or self._is_waiting():
            return self._state
        try:
            self._disk.require_power()
            if self.fate is Fate.FAILS:
                raise DiskError(errno.EIO, os.strerror(errno.EIO))
            if self.fate is Fate.FULL:
                raise DiskError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.move()
        except DiskError as e:
            self.error = TransferError(e.errno, e.strerror)
        self._state = TransferState.DONE if self.error is None else TransferState.FAILED
        self._files.active.remove(self)
        return self._state

    def move(self) -> None:
        """Move the bytes, or half of them."""
        extents = self.extents
        for number, extent in enumerate(extents):
            size = extent.size
            if self.fate is Fate.SHORT and number == len(extents) // 2:
                size = size // 2
            is_bent = self.fate is Fate.LIES and number == len(extents) - 1
            self._files.move(self.direction, extent, size, is_bent)
            if size < extent.size:
                raise DiskError(errno.EIO, "it broke off")

    def _is_waiting(self) -> bool:
        if self._disk.is_off:
            return False
        if self.fate in (Fate.HANGS, Fate.NEVER_ENDS):
            return not self._goes_on()
        self._polls_left -= 1
        return self._polls_left >= 0


class FaultyFiles:
    """Implements `FileTransfer` between a store's arena and its slab files."""

    name = "faulty"

    def __init__(self, disk: Disk, memory: Bytes, directory: SsdDirectory) -> None:
        self.disk = disk
        self.active: list[FaultyTransfer] = []
        self.submitted = 0
        self._memory = memory
        self._declared: tuple[OpenFile, ...] = directory.files
        self._paths = [os.readlink(f"/proc/self/fd/{file.fd}") for file in self._declared]
        self._fds = [os.open(path, os.O_RDWR) for path in self._paths]  # not O_DIRECT
        self._closed = False
        disk.landing.append(self._land)

    @property
    def in_flight(self) -> int:
        """Transfers that have not ended."""
        return len(self.active)

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> FaultyTransfer:
        """See `FileTransfer`."""
        if self._closed:
            raise StoreClosedError("submit after close")
        check_extents(extents, self._declared, len(self._memory))
        self.submitted += 1
        transfer = FaultyTransfer(self, direction, extents)
        self.active.append(transfer)
        return transfer

    def move(self, direction: Direction, extent: Extent, size: int, is_bent: bool) -> None:
        """Move the first `size` bytes of an extent, the last of them wrong if it `is_bent`."""
        fd = self._fds[extent.file]
        memory = self._memory[extent.memory_offset : extent.memory_offset + size]
        if direction is Direction.READ:
            memory[:] = np.frombuffer(os.pread(fd, size, extent.file_offset), np.uint8)
            if is_bent:
                memory[0] ^= 1
            return
        data = bytearray(memory.tobytes())
        if is_bent:
            data[0] ^= 1
        self.disk.writes(
            self._paths[extent.file],
            extent.file_offset,
            bytes(data),
            self._declared[extent.file].size_bytes,
            lambda offset, count: os.pread(fd, count, offset),
        )
        os.pwrite(fd, data, extent.file_offset)

    def close(self, timeout_s: float = 10.0) -> bool:
        """See `FileTransfer`. Ends what can end."""
        self._closed = True
        for _ in range(4):
            for transfer in list(self.active):
                transfer.poll()
        if not self.active:
            self._close_fds()
        return not self.active

    def end_process(self) -> None:
        """Close the files, as the kernel does for a process that has ended."""
        self._closed = True
        self.active.clear()
        self._close_fds()

    def _close_fds(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def _land(self, rng: random.Random) -> None:
        """At a cut a write under way may be on the disk already."""
        for transfer in self.active:
            if transfer.direction is Direction.WRITE and rng.random() < 0.5:
                with contextlib.suppress(DiskError):
                    transfer.move()


@contextlib.contextmanager
def faulty_files(disk: Disk) -> Iterator[None]:
    """Let what is synced of the slabs, and written and synced of the generation, meet its fate.

    Other files are written and synced as ever.
    """
    sync, write = os.fdatasync, os.pwrite

    def fdatasync(fd: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        name = _operation(path)
        if name is None or not disk.owns(path):
            sync(fd)
            return
        ended = disk.begins_sync(path)
        fate = disk.fate(f"{name}.sync")
        try:
            if disk.suffer(fate):
                raise DiskError(errno.EIO, "it broke off")
        except DiskError:
            if not disk.is_off:
                ended(False)
            raise
        ended(True)

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if _operation(path) != "state" or not disk.owns(path):
            return write(fd, data, offset)
        if disk.suffer(disk.fate("state.write")):
            data = data[: len(data) // 2]
        size = os.fstat(fd).st_size
        disk.writes(path, offset, data, size, lambda at, count: os.pread(fd, count, at))
        return write(fd, data, offset)

    with patch("os.fdatasync", fdatasync), patch("os.pwrite", pwrite):
        yield


def _operation(path: str) -> str | None:
    """The first word of what is done to a file: `slab`, or `state` for the generation."""
    if path.endswith(".slab"):
        return "slab"
    return "state" if os.path.basename(path).startswith("generation") else None
