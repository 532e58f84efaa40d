"""The ports through which the store reads from the peers of its fleet.

The store asks on its I/O thread, between transfers: answers come from memory, at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.errors import StoreError
from hetero_connector.store.arena import Arena
from hetero_connector.store.catalog.exports import ExportFeed
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.peers.card import PeerCard
from hetero_connector.store.peers.slot_table import SlotTable
from hetero_connector.transfer.nixl_peers import NixlPeers
from hetero_connector.transfer.peer_base import PeerTransfers
from hetero_connector.transfer.shared_memory import SharedMemory

logger = logging.getLogger("vllm.heterocache")


class Peers(Protocol):
    """The workers of the fleet, and whether their copies may be used."""

    def card(self, holder: int) -> bytes | None:
        """Return the `PeerCard` of the worker of this epoch; None unless its lease lasts."""
        ...

    def may_use(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Return whether a copy may become visible now: its holder was not taken over meanwhile."""
        ...

    def may_adopt(self, artifact: ArtifactId, copy: PeerCopy) -> bool:
        """Return whether a dead holder's copy may become visible now: no other worker has it."""
        ...


@dataclass(frozen=True)
class PeerAccess:
    """The means by which a store reads from its peers, and lets them read from it."""

    peers: Peers
    open_transfers: Callable[[Sequence[SharedMemory]], PeerTransfers] = NixlPeers
    """Exports the regions given; StoreError if peers cannot be had on this machine."""
    changed: Callable[[], None] | None = None
    """Called when `Sharing.take_exports` has something to take again, or `Sharing.card` is another;
    returns at once."""


@dataclass(frozen=True)
class PeerPort:
    """The DRAM tier as peers see it, and the way to theirs."""

    peers: Peers
    table: SlotTable
    transfers: PeerTransfers
    feed: ExportFeed
    geometry: SlotGeometry
    card_changed: Callable[[], None] | None

    @property
    def card(self) -> bytes:
        """Return the `PeerCard` for the directory: a new one when `transfers` were restarted."""
        return PeerCard(self.geometry, self.transfers.metadata).encode()

    @classmethod
    def open(
        cls, access: PeerAccess | None, arena: Arena, geometry: SlotGeometry
    ) -> PeerPort | None:
        """Export the arena; None for an engine by itself.

        Raises StoreError if peers could not read from this engine: it would own state that no
        other engine can use.
        """
        if access is None:
            return None
        table = SlotTable(geometry)
        try:
            transfers = access.open_transfers([arena.shared, table.shared])
        except StoreError as error:
            table.close()
            raise StoreError(
                f"this engine cannot join the fleet of 'directory': {error}"
            ) from error
        logger.info("the DRAM tier can be read by peers through %s", transfers.name)
        feed = ExportFeed(access.changed)
        return cls(access.peers, table, transfers, feed, geometry, access.changed)

    def close(self, timeout_s: float) -> bool:
        """Close; False if a transfer may still write into the arena, which must stay mapped."""
        is_done = self.transfers.close(timeout_s)
        self.table.close()
        return is_done
