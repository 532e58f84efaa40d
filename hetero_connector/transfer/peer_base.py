"""The port through which an engine reads the memory of its peers.

Every engine exports the same kind of memory: its regions, registered once, and
`metadata`, some bytes that a peer needs to read them. Reads are one-sided: the owner
of the memory takes no part in one and cannot know of it.

So a read proves nothing: while it runs the owner may put other bytes in the place. Whoever
reads must verify what arrived.

Threads: the methods belong to one I/O thread; none waits for a peer, except `close`.

Memory: as in `base`. A peer that was stopped may answer minutes later, so what a
read was to fill stays in quarantine until its transfer is `terminal`, or for good.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_connector.errors import PeerError
from hetero_connector.transfer.base import Transfer


@dataclass(frozen=True, slots=True)
class PeerExtent:
    """A run of bytes in a peer's memory and its place in ours. All in bytes, any alignment."""

    remote_region: int
    """Index into the regions the peer exports."""
    remote_offset: int
    region: int
    """Index into our own regions."""
    offset: int
    size: int


class PeerTransfers(Protocol):
    """Exports memory to peers and reads theirs."""

    @property
    def name(self) -> str:
        """For logs: `nixl-ucx`, `memory`."""
        ...

    @property
    def metadata(self) -> bytes:
        """What a peer needs to `connect` to this engine; another one at times, see `tend`."""
        ...

    @property
    def in_flight(self) -> int:
        """Transfers that are not terminal, abandoned ones included."""
        ...

    def connect(self, peer: str, metadata: bytes) -> None:
        """Reads of `peer` use this metadata from now. Nothing to do if they do already.

        Other metadata than before means that the peer was started anew: the old connection is
        dropped, transfers on it end by themselves. Raises PeerError if the metadata is not
        what `metadata` makes; whether the peer lives shows when reading.
        """
        ...

    def submit(self, peer: str, extents: Sequence[PeerExtent]) -> Transfer:
        """Start reading; poll the result. A dead or unreachable peer shows as FAILED.

        Raises PeerError if an extent is outside what the peer exports or it was never connected,
        ValueError if one is empty or outside our own memory, StoreClosedError after `close`.
        """
        ...

    def disconnect(self, peer: str) -> None:
        """Forget a peer: it is dead, or its answers make no sense. Idempotent."""
        ...

    def tend(self) -> bool:
        """Look after whatever moves the bytes; call it once a second or so.

        True if that has ended since the last call: reads under way have failed, new ones fail for
        a while, and when it is back `metadata` is another.
        """
        ...

    def close(self, timeout_s: float = 10.0) -> bool:
        """Wait for what is under way, then let go of the memory. Idempotent.

        False if something was still under way at the timeout: then the memory must be kept for
        the life of the process.
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
    """Raise PeerError for the first extent outside what the peer exports."""
    for extent in extents:
        if not within(extent.remote_region, extent.remote_offset, extent.size, region_bytes):
            raise PeerError(f"outside the peer's memory: {extent}; {list(region_bytes)}")


def within(region: int, offset: int, size: int, region_bytes: Sequence[int]) -> bool:
    """Whether a run of bytes lies inside one of the regions."""
    return 0 <= region < len(region_bytes) and 0 <= offset <= region_bytes[region] - size
