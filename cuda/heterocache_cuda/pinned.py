"""Page-lock the arena, so that the device reads and writes it by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Protocol

import numpy as np
import numpy.typing as npt

from heterocache_cuda.driver import CudaError

logger = logging.getLogger("vllm.heterocache")

PIECE_BYTES = 1 << 30
"""Registered by one call. For each call the driver keeps 16 bytes per page of 4 KiB in a single
allocation of less than 2 GiB, so 512 GiB in one call fail. Pieces also let threads work at once."""
_THREADS = 4
"""The kernel takes references to pages in parallel; what the driver does then is in turn, and every
rank of an engine pins the same memory at the same time."""
_PROGRESS_S = 10.0


class HostRegistration(Protocol):
    """The calls that pin memory: those of `Driver`."""

    @property
    def can_use_host_pointers(self) -> bool:
        """Return whether the device reads registered memory at the host's own addresses."""
        ...

    def register(self, address: int, size_bytes: int) -> None:
        """Page-lock memory. Raises CudaError."""
        ...

    def unregister(self, address: int) -> None:
        """Unlock memory. Raises CudaError."""
        ...


class PinnedArena:
    """Host memory that is pinned as a whole, or not at all."""

    def __init__(
        self, registration: HostRegistration, addresses: list[int], piece_bytes: int
    ) -> None:
        self._registration = registration
        self._addresses = addresses
        """The pieces; none if the memory could not be pinned."""
        self.piece_bytes = piece_bytes
        """Pieces end at multiples of this, counted from the start of the memory."""

    @property
    def is_complete(self) -> bool:
        """Return whether the device may use the memory: else copy by way of a `BounceBuffer`."""
        return bool(self._addresses)

    @classmethod
    def pin(
        cls,
        view: npt.NDArray[np.uint8],
        registration: HostRegistration,
        *,
        piece_bytes: int = PIECE_BYTES,
        clock: Callable[[], float] = time.monotonic,
    ) -> PinnedArena:
        """Pin `[size_bytes] uint8`, and log how long it took; about 0.1 s/GiB.

        A failure is a warning: nothing of the memory is pinned then.
        """
        gib, started_s = view.nbytes / 2**30, clock()
        pinning = _Pinning(registration)
        try:
            pinning.pin(view.ctypes.data, view.nbytes, piece_bytes, clock)
        except CudaError as error:
            _unregister(registration, pinning.addresses)
            logger.warning(
                "The DRAM tier's %.1f GiB cannot be pinned: %s. Copies between it and the GPU go "
                "through a small buffer, several times slower, and block the engine meanwhile. "
                "Try a smaller dram_gib; the kernel's log (dmesg, NVRM) may say more.",
                gib,
                error,
            )
            return cls(registration, [], piece_bytes)
        logger.info("pinned %.1f GiB of host memory in %.1f s", gib, clock() - started_s)
        return cls(registration, pinning.addresses, piece_bytes)

    def close(self) -> None:
        """Unpin, after the last copy and before the memory is unmapped. Idempotent."""
        addresses, self._addresses = self._addresses, []
        _unregister(self._registration, addresses)


class _Pinning:
    """Pieces that several threads register."""

    def __init__(self, registration: HostRegistration) -> None:
        self.addresses: list[int] = []
        """Registered so far, by any thread."""
        self._registration = registration
        self._has_failed = threading.Event()

    def pin(
        self, address: int, size_bytes: int, piece_bytes: int, clock: Callable[[], float]
    ) -> None:
        """Register all pieces. Raises the first CudaError, when no thread registers any more."""
        if not self._registration.can_use_host_pointers:
            raise CudaError("this GPU does not read host memory at the host's own addresses")
        started_s = logged_s = clock()
        starts = range(0, size_bytes, piece_bytes)
        with ThreadPoolExecutor(_THREADS, "heterocache-pin") as pool:
            futures = [
                pool.submit(self._register, address + at, min(piece_bytes, size_bytes - at))
                for at in starts
            ]
            for done, future in enumerate(as_completed(futures), 1):
                future.result()
                if clock() - logged_s >= _PROGRESS_S:
                    logged_s = clock()
                    gib = done * piece_bytes / 2**30, size_bytes / 2**30, logged_s - started_s
                    logger.info("pinned %.0f of %.0f GiB of host memory in %.0f s", *gib)

    def _register(self, address: int, size_bytes: int) -> None:
        if self._has_failed.is_set():
            return
        try:
            self._registration.register(address, size_bytes)
        except CudaError:
            self._has_failed.set()
            raise
        self.addresses.append(address)


def _unregister(registration: HostRegistration, addresses: list[int]) -> None:
    for address in addresses:
        try:
            registration.unregister(address)
        except CudaError as error:
            logger.warning("pinned memory at %#x stays locked until exit: %s", address, error)
