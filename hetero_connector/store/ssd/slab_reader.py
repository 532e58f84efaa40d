"""Reading single artifacts of a slab file, where a thread or a tool may wait for the disk."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import TransferError
from hetero_connector.store.ssd.space import SLAB_NAME
from hetero_connector.transfer.base import BLOCK_BYTES, open_direct


class SlabReader:
    """The slab file of one directory, opened when it is first read. Use it in a `with` block."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        """`max_bytes`: of the largest slot."""
        self._path = folder / SLAB_NAME
        self._fd = -1
        # Page-aligned for O_DIRECT, which reads the disk, not the page cache.
        self._buffer = np.frombuffer(mmap.mmap(-1, max_bytes), np.uint8)

    def __enter__(self) -> SlabReader:
        return self

    def __exit__(self, *_: object) -> None:
        if self._fd >= 0:
            os.close(self._fd)

    def read(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return `[size_bytes] uint8`, valid until the next call.

        Raises TransferError if they cannot be read.
        """
        padded = -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES
        if self._fd < 0:
            try:
                self._fd = open_direct(self._path, os.O_RDONLY)
            except OSError as e:
                raise TransferError(f"the slab file cannot be opened: {e}") from e
        read_blocks(self._fd, offset, self._buffer[:padded])
        return self._buffer[:size_bytes]


def read_blocks(slab: int, offset: int, into: npt.NDArray[np.uint8]) -> None:
    """Fill `into` ([blocks] uint8, 4 KiB-aligned) from an open slab file.

    Raises TransferError if it is too short or cannot be read.
    """
    done = 0
    while done < len(into):
        try:
            got = os.preadv(slab, [into.data[done:]], offset + done)
        except OSError as e:
            raise TransferError(e.errno, f"its bytes cannot be read: {e.strerror}") from e
        done += got
        if got == 0 or done % BLOCK_BYTES:
            raise TransferError("the slab file is too short")
