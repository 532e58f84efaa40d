"""`FileTransfer` over NIXL's POSIX backend: io_uring, or Linux AIO if that is missing.

Facts about NIXL 1.5.1, measured and read (src/plugins/posix):
- One post or poll submits at most 64 I/Os.
- Contiguous descriptors would be merged beyond the limit of one I/O, hence `skip_desc_merge`.
- A handle released while PROC seems to succeed and corrupts later I/O, hence the quarantine.
- Its errors have no errno.
- The POSIXAIO queue stays broken after its first error, so it is not used.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreClosedError, StoreError, TransferError
from hetero_connector.transfer.base import (
    Direction,
    Extent,
    OpenFile,
    TransferState,
    batches,
    check_extents,
    split,
)
from hetero_connector.transfer.nixl_library import import_nixl

_DESCRIPTOR_BYTES = 2 << 20
"""Extents are cut into descriptors of this size. Speed is the same from 1 MiB on."""
_WINDOW_BYTES = 32 << 20
"""Bytes posted at a time over all transfers. 16 MiB saturate an NVMe drive; twice that avoids a
pause between two polls."""
_POST_BYTES = 4 << 20
_MAX_DESCRIPTORS = {"uring": 32, "aio": 1}
"""Descriptors per post. AIO gets one: its post can fail half-way, and the part submitted before
would go on unnoticed."""
_QUEUES = {"uring": {"use_uring": "true"}, "aio": {"use_aio": "true"}}
_POLL_S = 100e-6

_agent_numbers = itertools.count()
_leaked: list[object] = []
"""Objects with transfers that had not ended at `close`: kept for the life of the process."""


def open_agent(queue: str) -> tuple[str, Any]:
    """Make a NIXL agent with only the POSIX backend, on the `uring` or `aio` queue.

    Returns its name and the agent. Raises StoreError with the reason if that fails.
    """
    try:
        nixl = import_nixl()
    except ImportError as e:
        raise StoreError(f"nixl cannot be imported: {e}") from e
    name = f"heterocache-files-{os.getpid()}-{next(_agent_numbers)}"
    # STRICT, because the agent is built on one thread and driven by another.
    sync = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
    try:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[], sync_mode=sync)
        agent = nixl.nixl_agent(name, config)
        agent.create_backend("POSIX", _QUEUES[queue])
    except Exception as e:  # nixl's exceptions derive from Exception only
        raise StoreError(f"NIXL's POSIX backend ({queue}) does not start: {e!r}") from e
    return name, agent


class NixlTransfer:
    """One transfer, posted batch by batch."""

    def __init__(
        self,
        owner: NixlFiles,
        direction: Direction,
        descriptors: list[Extent],
        posts: Iterable[range],
    ) -> None:
        self._owner = owner
        self.direction = direction
        self.waiting = deque(posts)
        self.posted = 0
        self._failure: TransferError | None = None
        self._sides = owner._prepare(descriptors)

    @property
    def terminal(self) -> bool:
        return not self.waiting and not self.posted

    @property
    def error(self) -> TransferError | None:
        return self._failure if self.terminal else None

    def poll(self) -> TransferState:
        if not self.terminal:
            self._owner._drive()
        if not self.terminal:
            return TransferState.PENDING
        return TransferState.DONE if self._failure is None else TransferState.FAILED

    def fail(self, error: TransferError) -> None:
        """Drop the batches not posted yet; those posted must still end."""
        self._failure = self._failure or error
        self.waiting.clear()


class _Post:
    """One NIXL transfer request in flight."""

    __slots__ = ("handle", "size", "transfer")

    def __init__(self, transfer: NixlTransfer, handle: Any, size: int) -> None:
        self.transfer = transfer
        self.handle = handle
        self.size = size


class NixlFiles:
    """Moves extents between `memory` ([n] uint8, writable) and `files`, both registered once.

    Raises StoreError if NIXL, its POSIX backend or the registration fails.
    """

    def __init__(
        self,
        memory: npt.NDArray[np.uint8],
        files: Sequence[OpenFile],
        queue: str = "uring",
    ) -> None:
        self._memory = memory
        self._files = tuple(files)
        self._max_descriptors = _MAX_DESCRIPTORS[queue]
        self.name = f"nixl-posix-{queue}"
        self._agent_name, self._agent = open_agent(queue)
        self._address = memory.ctypes.data
        self._registered: list[Any] = []
        try:
            self._register([(self._address, len(memory), 0, "")], "DRAM")
            for file in files:
                self._register([(0, file.size_bytes, file.fd, "")], "FILE")
        except Exception as e:  # nixl's exceptions derive from Exception only
            raise StoreError(f"NIXL cannot register the arena or a slab file: {e!r}") from e
        self._posts: list[_Post] = []
        self._queued: list[NixlTransfer] = []
        self._posted_bytes = 0
        self._closed = False

    def submit(self, direction: Direction, extents: Sequence[Extent]) -> NixlTransfer:
        if self._closed:
            raise StoreClosedError("submit after close")
        check_extents(extents, self._files, len(self._memory))
        descriptors = [part for extent in extents for part in split(extent, _DESCRIPTOR_BYTES)]
        sizes = [d.size for d in descriptors]
        posts = batches(sizes, _POST_BYTES, self._max_descriptors)
        transfer = NixlTransfer(self, direction, descriptors, posts)
        self._queued.append(transfer)
        # Reads first: a restoring request waits for them, and nothing waits for a write.
        self._queued.sort(key=lambda t: t.direction is Direction.WRITE)
        self._drive()
        return transfer

    def close(self, timeout_s: float = 10.0) -> bool:
        self._closed = True
        deadline = time.monotonic() + timeout_s
        while self._posts or self._queued:
            if time.monotonic() > deadline:
                _leaked.append(self)
                return False
            self._drive()
            time.sleep(_POLL_S)
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
        return True

    def _register(self, regions: list[tuple[int, int, int, str]], kind: str) -> None:
        self._registered.append(self._agent.register_memory(regions, kind))

    def _prepare(self, descriptors: list[Extent]) -> tuple[Any, Any, npt.NDArray[np.int64]]:
        """Prepare the descriptor lists of both sides; return them and the descriptors' sizes."""
        sizes = np.array([d.size for d in descriptors], np.int64)
        local = np.array(
            [(self._address + d.memory_offset, d.size, 0) for d in descriptors], np.uint64
        )
        remote = np.array(
            [(d.file_offset, d.size, self._files[d.file].fd) for d in descriptors], np.uint64
        )
        prepare = self._agent.prep_xfer_dlist
        return (
            prepare("NIXL_INIT_AGENT", local, "DRAM"),
            prepare(self._agent_name, remote, "FILE"),
            sizes,
        )

    def _drive(self) -> None:
        """Release the posts that have ended, then post what fits into the window."""
        self._posts = [post for post in self._posts if not self._release_if_ended(post)]
        while self._queued:
            transfer = self._queued[0]
            if not transfer.waiting:
                self._queued.pop(0)
            elif self._posted_bytes < _WINDOW_BYTES:
                self._post(transfer, transfer.waiting.popleft())
            else:
                return

    def _post(self, transfer: NixlTransfer, batch: range) -> None:
        local, remote, sizes = transfer._sides
        index = np.arange(batch.start, batch.stop, dtype=np.int32)
        size = int(sizes[batch.start : batch.stop].sum())
        try:
            handle = self._agent.make_prepped_xfer(
                transfer.direction.name, local, index, remote, index, skip_desc_merge=True
            )
            state = self._agent.transfer(handle)
        except Exception as e:
            transfer.fail(TransferError(f"{self.name}: post failed: {e!r}"))
            return
        if state == "ERR":
            transfer.fail(TransferError(f"{self.name}: post failed"))
            return
        transfer.posted += 1
        self._posted_bytes += size
        self._posts.append(_Post(transfer, handle, size))

    def _release_if_ended(self, post: _Post) -> bool:
        """Release the post if it has ended; return whether it has."""
        try:
            state = self._agent.check_xfer_state(post.handle)
        except Exception as e:
            # Raised when every I/O of the post has ended and at least one was short or failed.
            post.transfer.fail(TransferError(f"{self.name}: {post.transfer.direction}: {e!r}"))
            state = "ERR"
        if state == "PROC":
            return False
        if state == "ERR":
            post.transfer.fail(TransferError(f"{self.name}: {post.transfer.direction} failed"))
        self._agent.release_xfer_handle(post.handle)
        post.transfer.posted -= 1
        self._posted_bytes -= post.size
        return True
