"""The port through which bytes move between the DRAM arena and slab files.

Threads: a `FileTransfer` and the transfers it hands out belong to one I/O thread. No
method waits for I/O, except `close`. `choose` says which implementation a machine uses.

Memory: the device may touch an extent's memory until its transfer is `terminal`. Until then the
caller must neither reuse nor free it, even if it no longer wants the bytes. There is no cancel:
the caller may drop the transfer, and the `FileTransfer` keeps it in quarantine until it ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

from hetero_connector.errors import TransferError

BLOCK_BYTES = 4096
"""Every offset and size is a multiple of this, as O_DIRECT requires."""
_POLL_S = 50e-6


class Direction(StrEnum):
    """The direction of a transfer."""

    READ = "read"
    """File to memory."""
    WRITE = "write"
    """Memory to file."""


class TransferState(Enum):
    """The state of a transfer."""

    PENDING = "pending"
    DONE = "done"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Extent:
    """A run of bytes in a file, and its place in the arena. In bytes, multiples of 4 KiB."""

    file: int
    """Index into the files the `FileTransfer` was built over."""
    file_offset: int
    memory_offset: int
    size: int


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file to read and write. The caller keeps the descriptor open until `close`."""

    fd: int
    size_bytes: int
    """Extents must end at or before this."""


class Transfer(Protocol):
    """A transfer of extents, from submission to its end."""

    @property
    def terminal(self) -> bool:
        """True if it has ended, so that its memory is no longer touched. Does not poll."""
        ...

    @property
    def error(self) -> TransferError | None:
        """The reason if it is FAILED, else None. The destination's content is then undefined."""
        ...

    def poll(self) -> TransferState:
        """Drive the transfer and return its state. DONE and FAILED are final."""
        ...


class FileTransfer(Protocol):
    """Moves extents between one memory region and a fixed list of files."""

    @property
    def name(self) -> str:
        """Its name in logs and errors: `nixl-posix-uring`, `pread`, ..."""
        ...

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> Transfer:
        """Start moving `extents`, and return a transfer to poll.

        Large extents are split as suits the device. I/O failures, including those at submission,
        show as a FAILED transfer. Raises ValueError for extents that are empty, misaligned or out
        of range (a bug of the caller) and StoreClosedError after `close`.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for transfers to end, then release the memory and the files. Idempotent.

        Returns False if a transfer had not ended at the timeout: then the memory and the
        descriptors must be kept for the life of the process.
        """
        ...


def open_direct(
    path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None
) -> int:
    """Open a file with O_DIRECT, or without it if the file system does not support it."""
    try:
        return os.open(path, flags | os.O_DIRECT, mode, dir_fd=dir_fd)
    except OSError as e:
        if e.errno != errno.EINVAL:
            raise
        return os.open(path, flags, mode, dir_fd=dir_fd)


def is_direct(fd: int) -> bool:
    """True if a descriptor is open with O_DIRECT."""
    return bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)


def wait_for(transfer: Transfer, timeout_s: float) -> None:
    """Poll a transfer until it ends. For probes and tools: an I/O thread must not wait.

    Raises the transfer's error if it has failed, and a TransferError at the timeout.
    """
    deadline_s = time.monotonic() + timeout_s
    while transfer.poll() is TransferState.PENDING:
        if time.monotonic() > deadline_s:
            raise TransferError(errno.ETIMEDOUT, f"no end after {timeout_s:.0f} s")
        time.sleep(_POLL_S)
    if transfer.error is not None:
        raise transfer.error


def check_extents(extents: Sequence[Extent], files: Sequence[OpenFile], memory_bytes: int) -> None:
    """Raise ValueError for the first extent that is empty, misaligned or out of range."""
    if not extents:
        raise ValueError("a transfer needs at least one extent")
    for extent in extents:
        if extent.size <= 0 or (
            (extent.size | extent.file_offset | extent.memory_offset) % BLOCK_BYTES
        ):
            raise ValueError(f"not multiples of {BLOCK_BYTES} bytes: {extent}")
        if not 0 <= extent.file < len(files):
            raise ValueError(f"no such file: {extent}; there are {len(files)}")
        if extent.file_offset < 0 or extent.file_offset + extent.size > (
            files[extent.file].size_bytes
        ):
            raise ValueError(f"outside the file: {extent}; {files[extent.file]}")
        if extent.memory_offset < 0 or extent.memory_offset + extent.size > memory_bytes:
            raise ValueError(f"outside the memory of {memory_bytes} bytes: {extent}")


def split(extent: Extent, part_bytes: int) -> list[Extent]:
    """Cut an extent into pieces of at most `part_bytes`, in order."""
    return [
        Extent(
            extent.file,
            extent.file_offset + at,
            extent.memory_offset + at,
            min(part_bytes, extent.size - at),
        )
        for at in range(0, extent.size, part_bytes)
    ]


def batches(sizes: Sequence[int], max_bytes: int, max_count: int) -> Iterator[range]:
    """Yield ranges of indices with at most `max_count` items and `max_bytes`, or a single item."""
    start, total = 0, 0
    for i, size in enumerate(sizes):
        if i > start and (total + size > max_bytes or i - start >= max_count):
            yield range(start, i)
            start, total = i, 0
        total += size
    yield range(start, len(sizes))
