"""A NIXL agent with only the UCX backend: the calls that reading a peer's memory needs.

Over NIXL's bindings rather than its `nixl_agent` class, for one reason: that class starts
UCX's progress thread with a delay of zero, which polls without a pause and takes a whole
core from an idle engine. With a delay the thread sleeps until a file descriptor wakes it.

The progress thread answers peers that connect, and serves their reads where no transport
reads memory one-sidedly (plain TCP). Nothing in Python runs for either.

Which transport UCX takes is the user's to say (`UCX_TLS`, `UCX_NET_DEVICES`); left alone, it
takes RDMA between hosts that have it, `process_vm_readv` (CMA) within a host, else TCP. It listens
on every interface that `UCX_NET_DEVICES` leaves it, whatever it takes; NIXL's own parameter
`ucx_devices` does not change that.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreError, TransferError
from hetero_connector.transfer.nixl_library import default_environment, import_nixl

Descriptors = npt.NDArray[np.uint64]
"""`[n, 3] uint64`: address, bytes, device 0."""

_UCX_DEFAULTS = {"UCX_LOG_LEVEL": "fatal", "UCX_CMA_SEG_SIZE": "4m"}
"""Unless the user says otherwise. UCX would report every dead peer on stdout. CMA moves one
segment, 512 KiB by default, each time it is polled; with segments as large as our descriptors it
is done when the post returns."""
_PROGRESS_DELAY_US = 10_000
"""At least that often the progress thread looks by itself, in case no descriptor woke it."""


class UcxAgent:
    """Used by one thread at a time; only `metadata` may be read by any."""

    def __init__(self, name: str, regions: Sequence[tuple[int, int]]) -> None:
        """Register `regions` (address, bytes); StoreError says why that does not work."""
        try:
            nixl = import_nixl()
            from nixl import _bindings as bindings
        except ImportError as e:
            raise StoreError(f"nixl cannot be imported: {e}") from e
        self.name = name
        self._bindings: Any = bindings
        config = bindings.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT.value
        try:
            self._agent: Any = bindings.nixlAgent(name, config)
            with contextlib.ExitStack() as settings:  # UCX reads them here
                for key, value in _UCX_DEFAULTS.items():
                    settings.enter_context(default_environment(key, value))
                self._agent.createBackend("UCX", {})
            described = [(address, size, 0, "") for address, size in regions]
            self._registered = bindings.nixlRegDList(bindings.DRAM_SEG, described)
            self._agent.registerMem(self._registered, [])
            self.metadata = bytes(self._agent.getLocalMD())
        except Exception as e:  # nixl's exceptions derive from Exception only
            raise StoreError(
                f"NIXL's UCX backend does not start: {e!r}. If UCX_TLS or UCX_NET_DEVICES are "
                "set, they must leave one network transport, tcp at least"
            ) from e

    def load(self, metadata: bytes) -> str:
        """Get to know a peer; its name. TransferError if NIXL refuses the metadata."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as e:
            raise TransferError(errno.ECONNREFUSED, f"NIXL refuses the metadata: {e!r}") from e
        return name.decode() if isinstance(name, bytes) else str(name)

    def unload(self, peer: str) -> None:
        """Forget a peer and close the connection. Nothing may be under way with it."""
        # NIXL forgets a peer by itself when a read finds it dead.
        with contextlib.suppress(self._bindings.nixlNotFoundError):
            self._agent.invalidateRemoteMD(peer)

    def prepare(self, peer: str | None, descriptors: Descriptors) -> int:
        """A handle on one side's descriptors: a peer's, or our own (None).

        TransferError if any of them is outside what that side registered.
        """
        agent = self._bindings.NIXL_INIT_AGENT if peer is None else peer
        try:
            listed = self._bindings.nixlXferDList(self._bindings.DRAM_SEG, descriptors)
            return int(self._agent.prepXferDlist(agent, listed, []))
        except Exception as e:
            raise TransferError(errno.EFAULT, f"NIXL refuses the addresses: {e!r}") from e

    def drop(self, side: int) -> None:
        """Let go of a `prepare`d side."""
        self._agent.releasedDlistH(side)

    def make_read(self, local: int, remote: int, index: npt.NDArray[np.int32]) -> int:
        """A handle for reading the descriptors named by `index`; nothing moves yet."""
        try:
            request = self._agent.makeXferReq(
                self._bindings.NIXL_READ, local, index, remote, index, "", [], True
            )
        except Exception as e:
            raise TransferError(errno.ECONNRESET, f"NIXL cannot read: {e!r}") from e
        return int(request)

    def post(self, request: int) -> None:
        """Start it; poll with `ended`. Some of it may be under way even if this raises.

        Over CMA the bytes are copied before this returns.
        """
        try:
            self._agent.postXferReq(request, "")
        except Exception as e:
            raise TransferError(errno.ECONNRESET, f"the read failed: {e!r}") from e

    def ended(self, request: int) -> bool:
        """Whether the read has ended; TransferError if it has failed."""
        try:
            status = self._agent.getXferStatus(request)
        except Exception as e:
            raise TransferError(errno.ECONNRESET, f"the read failed: {e!r}") from e
        if status == self._bindings.NIXL_IN_PROG:
            return False
        if status != self._bindings.NIXL_SUCCESS:
            raise TransferError(errno.ECONNRESET, f"the read failed: {status!r}")
        return True

    def release(self, request: int) -> bool:
        """Let go of a read that has ended or failed; False if it is still active after all."""
        try:
            self._agent.releaseXferReq(request)
        except self._bindings.nixlRepostActiveError:
            return False
        return True

    def close(self) -> None:
        """Deregister the regions and end the agent. Nothing may be under way. Idempotent."""
        if self._agent is not None:
            self._agent.deregisterMem(self._registered, [])
            self._agent = None
