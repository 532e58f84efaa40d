"""A `FileTransfer` over plain memory, with faults on demand: for tests."""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreClosedError, TransferError
from hetero_connector.transfer.base import (
    Direction,
    Extent,
    OpenFile,
    TransferState,
    check_extents,
)

Bytes = npt.NDArray[np.uint8]


class MemoryTransfer:
    """Moves its bytes when it is first polled, never at submission, like a device."""

    def __init__(self, owner: MemoryFiles, direction: Direction, extents: Sequence[Extent]) -> None:
        self._owner = owner
        self._direction = direction
        self._extents = tuple(extents)
        self._state = TransferState.PENDING
        self.error: TransferError | None = None
        self.hung = False
        self.corrupt = False

    @property
    def terminal(self) -> bool:
        return self._state is not TransferState.PENDING

    def poll(self) -> TransferState:
        if self._state is TransferState.PENDING and not self.hung:
            if self.error is None:
                self._move()
            self._state = TransferState.DONE if self.error is None else TransferState.FAILED
            self._owner._on_end(self)
        return self._state

    def _move(self) -> None:
        for e in self._extents:
            file = self._owner.files[e.file]
            if e.file_offset + e.size > len(file):
                self.error = TransferError(f"file {e.file} ended at {len(file)} bytes")
                return
            stored = file[e.file_offset : e.file_offset + e.size]
            memory = self._owner.memory[e.memory_offset : e.memory_offset + e.size]
            if self._direction is Direction.READ:
                memory[:] = stored
                moved = memory
            else:
                stored[:] = memory
                moved = stored
        if self.corrupt:
            moved[-1] ^= 0x01


class MemoryFiles:
    """The arrays `files[i]` ([n] uint8) stand for files. A test may shorten or change them."""

    def __init__(self, memory: Bytes, files: Sequence[Bytes]) -> None:
        self.memory = memory
        self.files = list(files)
        self._declared = [OpenFile(-1, len(f)) for f in files]
        self._active: list[MemoryTransfer] = []
        self._failures: deque[int] = deque()
        self._hangs = 0
        self._corruptions = 0
        self._closed = False

    name = "memory"

    @property
    def in_flight(self) -> int:
        return len(self._active)

    def fail_next(self, count: int = 1, code: int = errno.EIO) -> None:
        """Let the next `count` transfers fail with this errno, without moving anything."""
        self._failures.extend([code] * count)

    def hang_next(self, count: int = 1) -> None:
        """Let the next `count` transfers stay PENDING until `resume`."""
        self._hangs += count

    def corrupt_next(self, count: int = 1) -> None:
        """Let the next `count` transfers report DONE, with one bit of their last extent flipped."""
        self._corruptions += count

    def resume(self) -> None:
        """Let hung transfers continue."""
        for transfer in self._active:
            transfer.hung = False

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> MemoryTransfer:
        if self._closed:
            raise StoreClosedError("submit after close")
        check_extents(extents, self._declared, len(self.memory))
        transfer = MemoryTransfer(self, direction, extents)
        if self._failures:
            code = self._failures.popleft()
            transfer.error = TransferError(code, os.strerror(code))
        if self._hangs:
            self._hangs -= 1
            transfer.hung = True
        if self._corruptions:
            self._corruptions -= 1
            transfer.corrupt = True
        self._active.append(transfer)
        return transfer

    def close(self, timeout_s: float = 10.0) -> bool:
        """Close without waiting: hung transfers stay in quarantine, all others complete."""
        self._closed = True
        for transfer in list(self._active):
            transfer.poll()
        return not self._active

    def _on_end(self, transfer: MemoryTransfer) -> None:
        self._active.remove(transfer)
