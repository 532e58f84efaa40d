"""The port through which a fleet's member uses its worker's store.

A port, although there is one implementation, because `ownership` imports no store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey


class SharedStore(Protocol):
    """Implemented by `hetero_connector.store.peers.sharing.Sharing`. Methods return at once."""

    @property
    def card(self) -> bytes:
        """The data with which peers read from this store."""
        ...

    @property
    def storage(self) -> str:
        """Its SSD directory, for the workers that adopt it after this one ends; "" for none."""
        ...

    def may_adopt_from(self, storage: str) -> bool:
        """Return True if orphaned storage of this name may be read here."""
        ...

    def serve_under(self, epoch: int) -> None:
        """Let peers read the artifacts that were listed under this epoch; 0: let them read none."""
        ...

    @property
    def generation(self) -> Generation:
        """The generation of the artifacts it has."""
        ...

    @property
    def adopted(self) -> int:
        """The fleet's generation in which it durably shares state; 0: none."""
        ...

    def note_fleet_generation(self, number: int, asked_in: Generation) -> None:
        """Adopt the fleet's generation `number`, which was asked for in its own `asked_in`."""
        ...

    def take_exports(self) -> list[ExportChange]:
        """Return the artifacts that came, moved or left since the last call."""
        ...

    def take_export_loss(self) -> bool:
        """Return True if changes were dropped since the last call because too many waited."""
        ...

    def inventory(self) -> Iterator[list[ExportChange]]:
        """Iterate over all artifacts in batches, each as it is when it is taken."""
        ...

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], foreign: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Record the artifacts it owns, by token, and those that others own (`foreign`).

        Returns those of them that it does not have any more.
        """
        ...

    def find_gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Return those of the artifacts that it does not have any more."""
        ...

    def take_changed_users(self) -> Mapping[str, tuple[ChunkKey, ...]]:
        """Return the sessions that changed since the last call, with the ends of their chains.

        A session that has left has none.
        """
        ...

    def next_victims(self, count: int) -> list[ChunkKey]:
        """Return the chunks that leave DRAM next, at most twice `count`."""
        ...

    def set_foreign_users(self, has_users: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Record for `for_s` seconds whether other engines use the chains up to these chunks."""
        ...
