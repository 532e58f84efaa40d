"""The port through which an engine reads the memory of its peers.

Every engine exports regions of memory, registered once, and `metadata`: the bytes that a peer
needs to read them. Reads are one-sided: the owner of the memory takes no part in them and does not
notice them. The owner may overwrite the bytes while they are read, so the reader must verify what
arrived.

Threads: the methods belong to one I/O thread; none waits for a peer.

Memory: as in `base`. A stopped peer may answer minutes later, so the destination of a read stays
in quarantine until its transfer is `terminal`, possibly for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_connector.errors import PeerError
from hetero_connector.transfer.base import Transfer


@dataclass(frozen=True, slots=True)
class PeerExtent:
    """A run of bytes in a peer's memory, and its place in ours. In bytes, any alignment."""

    remote_region: int
    """Index into the peer's regions."""
    remote_offset: int
    region: int
    """Index into our own regions."""
    offset: int
    size: int


class PeerTransfers(Protocol):
    """Exports memory to peers and reads theirs."""

    @property
    def name(self) -> str:
        """Its name in logs: `nixl-ucx`, `memory`."""
        ...

    @property
    def metadata(self) -> bytes:
        """The bytes with which a peer can `connect` to this engine; may change, see `maintain`."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Use these metadata for reads of `peer` from now on. Idempotent.

        Metadata that differ from earlier ones mean that the peer has restarted: the old connection
        is dropped, and its transfers end by themselves. Raises PeerError if they are malformed. A
        dead peer is noticed only by reading.
        """
        ...

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> Transfer:
        """Start reading, and return a transfer to poll. A dead or unreachable peer makes it FAILED.

        Raises PeerError if an extent is outside the peer's regions or the peer was never connected,
        ValueError if one is empty or outside our own regions, StoreClosedError after `close`.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Drop a peer that is dead or sends malformed answers. Idempotent."""
        ...

    def maintain(self) -> bool:
        """Check the process that moves the bytes, and restart it if needed; call it every second.

        Returns True if the process has ended since the last call. Its reads have then failed, new
        ones fail for a while, and `metadata` change when another process is ready.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """End the transfers, then release the memory. Idempotent.

        Returns False if one may go on, because it could not be ended: then the memory must be kept
        for the life of the process.
        """
        ...


def check_destination(extents: Sequence[PeerExtent], region_bytes: Sequence[int]) -> None:
    """Raise ValueError for the first extent that is empty or outside our own regions."""
    if not extents:
        raise ValueError("a transfer needs at least one extent")
    for extent in extents:
        if extent.size <= 0 or not within(extent.region, extent.offset, extent.size, region_bytes):
            raise ValueError(f"empty or outside our own memory: {extent}; {list(region_bytes)}")


def check_source(extents: Sequence[PeerExtent], region_bytes: Sequence[int]) -> None:
    """Raise PeerError for the first extent outside the peer's regions."""
    for extent in extents:
        if not within(extent.remote_region, extent.remote_offset, extent.size, region_bytes):
            raise PeerError(f"outside the peer's memory: {extent}; {list(region_bytes)}")


def within(region: int, offset: int, size: int, region_bytes: Sequence[int]) -> bool:
    """True if a run of bytes lies inside the region."""
    return 0 <= region < len(region_bytes) and 0 <= offset <= region_bytes[region] - size
