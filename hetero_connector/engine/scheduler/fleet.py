"""The port through which an engine uses the fleet that it shares its cache with.

The implementation is in `ownership`, which this package must not import: an engine without a fleet
runs without it. `startup.start` connects the two if the key `directory` is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.spec import StateType
from hetero_connector.store.peers.ports import Peers
from hetero_connector.store.peers.sharing import Sharing


class Lookup(Protocol):
    """A lookup in the fleet's directory."""

    def poll(self) -> bool:
        """Return True when the answer is there, or its deadline has passed. Never blocks."""
        ...

    @property
    def found(self) -> Sequence[Mapping[StateType, Sequence[PeerCopy]]]:
        """The copies at peers for each chunk, best first; empty without an answer."""
        ...


class Fleet(Protocol):
    """This engine's membership of a fleet. All methods except `close` return at once."""

    @property
    def peers(self) -> Peers:
        """The peers that the store can read from."""
        ...

    @property
    def accepts_claims(self) -> bool:
        """True if the directory takes claims, so that peers will find what is sealed now."""
        ...

    def start(self, store: Sharing) -> None:
        """Join the fleet with this store."""
        ...

    def wake(self) -> None:
        """Report changes of the store soon: there are some."""
        ...

    def find(self, chain: Sequence[ChunkKey]) -> Lookup:
        """Look up the peers' copies of these chunks."""
        ...

    def close(self) -> None:
        """Leave the fleet. Blocks for a few seconds at most."""
        ...
