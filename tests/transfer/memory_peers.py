"""`PeerTransfers` within one process, with faults on demand: for tests."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import PeerError, StoreClosedError, TransferError
from hetero_connector.transfer.base import TransferState
from hetero_connector.transfer.peer_base import PeerExtent, check_destination, check_source
from hetero_connector.transfer.shared_memory import SharedMemory

Bytes = npt.NDArray[np.uint8]


class MemoryNetwork:
    """The engines that can reach each other, by their metadata."""

    def __init__(self) -> None:
        self._exported: dict[bytes, tuple[Bytes, ...]] = {}
        self._names = 0
        self.stopped: set[bytes] = set()
        """Engines that do not answer: reads of them stay PENDING until they are removed here."""
        self.before_read: Callable[[bytes, PeerExtent], None] | None = None
        """Called before each extent moves, to play an owner that writes at that moment."""

    def join(self, regions: Sequence[Bytes]) -> bytes:
        """Export `regions` and return the metadata that name them."""
        self._names += 1
        metadata = f"engine {self._names}".encode()
        self._exported[metadata] = tuple(regions)
        return metadata

    def kill(self, metadata: bytes) -> None:
        """Remove an engine: reads of it fail."""
        self._exported.pop(metadata, None)
        self.stopped.discard(metadata)

    def regions(self, metadata: bytes) -> tuple[Bytes, ...] | None:
        """The regions that an engine exports; None if it is gone."""
        return self._exported.get(metadata)

    def knows(self, metadata: bytes) -> bool:
        """True if an engine, dead or alive, ever had these metadata."""
        name, _, number = metadata.partition(b" ")
        return name == b"engine" and number.isdigit() and 0 < int(number) <= self._names


class MemoryRead:
    """Moves its bytes when it is polled, never at submission, like a network."""

    def __init__(self, owner: MemoryPeers, source: bytes, extents: Sequence[PeerExtent]) -> None:
        self._owner = owner
        self._source = source
        self._extents = tuple(extents)
        self._state = TransferState.PENDING
        self.error: TransferError | None = None

    @property
    def terminal(self) -> bool:
        return self._state is not TransferState.PENDING

    def poll(self) -> TransferState:
        network = self._owner.network
        if not self.terminal and self._source not in network.stopped:
            self._move(network)
            self._state = TransferState.DONE if self.error is None else TransferState.FAILED
            self._owner._active.remove(self)
        return self._state

    def fail(self, error: TransferError) -> None:
        """End it without moving anything."""
        self.error, self._state = error, TransferState.FAILED
        self._owner._active.remove(self)

    def _move(self, network: MemoryNetwork) -> None:
        for e in self._extents:
            if network.before_read is not None:
                network.before_read(self._source, e)
            regions = network.regions(self._source)
            if regions is None:
                self.error = TransferError(errno.ECONNRESET, "the peer is gone")
                return
            remote = regions[e.remote_region][e.remote_offset : e.remote_offset + e.size]
            self._owner.memory[e.region][e.offset : e.offset + e.size] = remote


class MemoryPeers:
    """Implements `PeerTransfers` on a `MemoryNetwork`."""

    name = "memory"

    def __init__(self, network: MemoryNetwork, regions: Sequence[SharedMemory]) -> None:
        self.network = network
        self.memory = tuple(region.view for region in regions)
        self.metadata = network.join(self.memory)
        self._peers: dict[str, bytes] = {}
        self._active: list[MemoryRead] = []
        self._has_ended = False
        self._closed = False

    @property
    def in_flight(self) -> int:
        return len(self._active)

    def connect(self, peer: str, metadata: bytes) -> None:
        if not self.network.knows(metadata):
            raise PeerError(f"this is not the metadata of a peer: {metadata!r}")
        self._peers[peer] = metadata

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> MemoryRead:
        if self._closed:
            raise StoreClosedError("submit after close")
        source = self._peers.get(peer)
        if source is None:
            raise PeerError(f"{peer} was never connected")
        check_destination(extents, [len(r) for r in self.memory])
        regions = self.network.regions(source)
        if regions is not None:
            check_source(extents, [len(r) for r in regions])
        read = MemoryRead(self, source, extents)
        self._active.append(read)
        return read

    def disconnect(self, peer: str) -> None:
        self._peers.pop(peer, None)

    def restart(self) -> None:
        """Play the end of the process that moves the bytes, and the start of another."""
        for read in list(self._active):
            read.fail(TransferError(errno.ECONNRESET, "the process that moved the bytes has ended"))
        self.network.kill(self.metadata)
        self.metadata = self.network.join(self.memory)
        self._has_ended = True

    def maintain(self) -> bool:
        has_ended, self._has_ended = self._has_ended, False
        return has_ended

    def close(self, timeout_s: float = 10.0) -> bool:
        """Close without waiting: stuck reads stay in quarantine."""
        self._closed = True
        for read in list(self._active):
            read.poll()
        self.network.kill(self.metadata)
        return not self._active
