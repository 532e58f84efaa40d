"""`FileTransfer` by preadv and pwritev on a few threads: works everywhere and reports errno."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreClosedError, TransferError
from hetero_connector.transfer.base import (
    BLOCK_BYTES,
    Direction,
    Extent,
    OpenFile,
    TransferState,
    check_extents,
    split,
)

_THREADS = 4
_PART_BYTES = 1 << 20
"""Most bytes of one system call, so that a large extent keeps all threads busy."""


class PreadTransfer:
    """One transfer, in parts. Its error is the first of any part."""

    def __init__(self, direction: Direction, num_parts: int) -> None:
        self.direction = direction
        self._lock = threading.Lock()
        self._left = num_parts
        self._error: TransferError | None = None

    @property
    def terminal(self) -> bool:
        return self._left == 0

    @property
    def error(self) -> TransferError | None:
        return self._error if self.terminal else None

    @property
    def failing(self) -> bool:
        """True if a part has failed, so that the others need not start."""
        return self._error is not None

    def poll(self) -> TransferState:
        if not self.terminal:
            return TransferState.PENDING
        return TransferState.DONE if self._error is None else TransferState.FAILED

    def on_part_end(self, error: TransferError | None) -> None:
        """Count one part as ended, on the thread that moved or skipped it."""
        with self._lock:
            if error is not None and self._error is None:
                self._error = error
            self._left -= 1


@dataclass(frozen=True, slots=True)
class _Part:
    transfer: PreadTransfer
    extent: Extent


class PreadFiles:
    """Moves extents between `memory` ([n] uint8, writable) and `files` on a few threads."""

    name = "pread"

    def __init__(self, memory: npt.NDArray[np.uint8], files: Sequence[OpenFile]) -> None:
        self._memory_bytes = len(memory)
        self._view = memory.data
        self._files = tuple(files)
        self._closed = False
        self._parts: queue.SimpleQueue[_Part | None] = queue.SimpleQueue()
        # Daemons, because a system call stuck on dead storage must not keep the process alive.
        self._threads = [
            threading.Thread(target=self._run, name=f"heterocache-pread-{i}", daemon=True)
            for i in range(_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> PreadTransfer:
        if self._closed:
            raise StoreClosedError("submit after close")
        check_extents(extents, self._files, self._memory_bytes)
        parts = [part for extent in extents for part in split(extent, _PART_BYTES)]
        transfer = PreadTransfer(direction, len(parts))
        for part in parts:
            self._parts.put(_Part(transfer, part))
        return transfer

    def close(self, timeout_s: float = 10.0) -> bool:
        if not self._closed:
            self._closed = True
            for _ in self._threads:
                self._parts.put(None)
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (part := self._parts.get()) is not None:
            error = None if part.transfer.failing else self._move(part)
            part.transfer.on_part_end(error)

    def _move(self, part: _Part) -> TransferError | None:
        extent, done = part.extent, 0
        fd = self._files[extent.file].fd
        call = os.preadv if part.transfer.direction is Direction.READ else os.pwritev
        while done < extent.size:
            start = extent.memory_offset + done
            view = self._view[start : extent.memory_offset + extent.size]
            try:
                moved = call(fd, [view], extent.file_offset + done)
            except OSError as e:
                return TransferError(e.errno, f"{call.__name__}: {e.strerror}: {extent}")
            done += moved
            if moved == 0 or done % BLOCK_BYTES:
                # Only at the end of a file does a call stop inside a block.
                return TransferError(f"file ended after {done} bytes of {extent}")
        return None
