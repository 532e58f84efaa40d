"""A `FileTransfer` with a limited bandwidth, to measure with a slower disk."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from hetero_connector.errors import TransferError
from hetero_connector.transfer.base import (
    Direction,
    Extent,
    FileTransfer,
    Transfer,
    TransferState,
)


class ThrottledTransfer:
    """Ends when the inner transfer has ended and the time for its bytes has passed."""

    def __init__(self, inner: Transfer, due_s: float, clock: Callable[[], float]) -> None:
        self._inner = inner
        self._due_s = due_s
        self._clock = clock
        self._over = False

    @property
    def terminal(self) -> bool:
        return self._over

    @property
    def error(self) -> TransferError | None:
        return self._inner.error if self._over else None

    def poll(self) -> TransferState:
        state = self._inner.poll()
        if state is TransferState.PENDING or self._clock() < self._due_s:
            return TransferState.PENDING
        self._over = True
        return state


class ThrottledFiles:
    """Limits the reads of `inner` to `read_bandwidth` bytes a second, one after another.

    Writes are not slowed. Memory is never touched late, because the inner transfer has ended.
    """

    def __init__(
        self,
        inner: FileTransfer,
        read_bandwidth: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if read_bandwidth <= 0:
            raise ValueError(f"a bandwidth is above 0 bytes a second, got {read_bandwidth}")
        self._inner = inner
        self.read_bandwidth = read_bandwidth
        """Bytes a second, for reads submitted from now on."""
        self._clock = clock
        self._free_s = 0.0

    @property
    def name(self) -> str:
        return f"{self._inner.name} at {self.read_bandwidth / 1e6:.0f} MB/s"

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> Transfer:
        inner = self._inner.submit(direction, extents)
        if direction is not Direction.READ:
            return inner
        seconds = sum(extent.size for extent in extents) / self.read_bandwidth
        self._free_s = max(self._free_s, self._clock()) + seconds
        return ThrottledTransfer(inner, self._free_s, self._clock)

    def close(self, timeout_s: float = 10.0) -> bool:
        return self._inner.close(timeout_s)
