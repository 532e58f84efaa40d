"""A NIXL agent with only the UCX backend: the calls that are needed to read a peer's memory.

It uses NIXL's bindings instead of its `nixl_agent` class, because that class starts UCX's progress
thread with a delay of zero: the thread polls without a pause and takes a whole core from an idle
engine. With a delay the thread sleeps until a file descriptor wakes it.

The progress thread answers peers that connect, and serves their reads if the transport cannot read
memory one-sidedly (plain TCP). No Python runs for either.

The user may choose the transport (`UCX_TLS`, `UCX_NET_DEVICES`). By default UCX takes RDMA between
hosts that have it, `process_vm_readv` (CMA) within a host, else TCP. It listens on every interface
in `UCX_NET_DEVICES`, whatever transport it takes; NIXL's own parameter `ucx_devices` does not
change that.
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
"""Set unless the user has set them. UCX would report every dead peer on stdout. CMA moves one
segment, 512 KiB by default, each time it is polled; with segments as large as our descriptors it
is done when the post returns."""
_PROGRESS_DELAY_US = 10_000
"""The progress thread checks at least that often, even if no descriptor wakes it."""


class UcxAgent:
    """One agent, used by one thread at a time; any thread may read `metadata`."""

    def __init__(self, name: str, regions: Sequence[tuple[int, int]]) -> None:
        """Register `regions` (address, bytes). Raises StoreError with the reason if that fails."""
        try:
            nixl = import_nixl()
            from nixl import _bindings as bindings
        except ImportError as e:
            raise StoreError(
                f"nixl cannot be imported ({e}): pip install nixl==1.5.1 (without a GPU: "
                "pip install --no-deps nixl==1.5.1 nixl-cu12==1.5.1)"
            ) from e
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
            self._agent.registerMem(bindings.nixlRegDList(bindings.DRAM_SEG, described), [])
            self.metadata = bytes(self._agent.getLocalMD())
        except Exception as e:  # nixl's exceptions derive from Exception only
            raise StoreError(
                f"NIXL's UCX backend does not start: {e!r}. If UCX_TLS or UCX_NET_DEVICES are "
                "set, they must allow at least one network transport, such as tcp"
            ) from e

    def load(self, metadata: bytes) -> str:
        """Load a peer's metadata; return its name. Raises TransferError if NIXL refuses them."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as e:
            raise TransferError(errno.ECONNREFUSED, f"NIXL refuses the metadata: {e!r}") from e
        return name.decode() if isinstance(name, bytes) else str(name)

    def unload(self, peer: str) -> None:
        """Forget a peer and close the connection. No read of it may be in flight."""
        # NIXL forgets a peer by itself when a read finds it dead.
        with contextlib.suppress(self._bindings.nixlNotFoundError):
            self._agent.invalidateRemoteMD(peer)

    def prepare(self, peer: str | None, descriptors: Descriptors) -> int:
        """Return a handle of one side's descriptors: those of a peer, or our own (None).

        Raises TransferError if one is outside the memory which that side registered.
        """
        agent = self._bindings.NIXL_INIT_AGENT if peer is None else peer
        try:
            listed = self._bindings.nixlXferDList(self._bindings.DRAM_SEG, descriptors)
            return int(self._agent.prepXferDlist(agent, listed, []))
        except Exception as e:
            raise TransferError(errno.EFAULT, f"NIXL refuses the addresses: {e!r}") from e

    def drop(self, side: int) -> None:
        """Release a handle made by `prepare`."""
        self._agent.releasedDlistH(side)

    def make_read(self, local: int, remote: int, index: npt.NDArray[np.int32]) -> int:
        """Return a handle for reading the descriptors named by `index`, without starting it."""
        try:
            request = self._agent.makeXferReq(
                self._bindings.NIXL_READ, local, index, remote, index, "", [], True
            )
        except Exception as e:
            raise TransferError(errno.ECONNRESET, f"NIXL cannot read: {e!r}") from e
        return int(request)

    def post(self, request: int) -> None:
        """Start a read; poll it with `has_ended`. A part may be in flight even if this raises.

        Over CMA the bytes are copied before this returns.
        """
        try:
            self._agent.postXferReq(request, "")
        except Exception as e:
            raise TransferError(errno.ECONNRESET, f"the read failed: {e!r}") from e

    def has_ended(self, request: int) -> bool:
        """True if the read has ended. Raises TransferError if it has failed."""
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
        """Release a read that has ended or failed. Returns False if NIXL still works on it."""
        try:
            self._agent.releaseXferReq(request)
        except self._bindings.nixlRepostActiveError:
            return False
        return True
