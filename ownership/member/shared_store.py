"""Define what a fleet's member asks of its store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

from hetero_connector.artifacts.exported import ExportChange
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId
from ownership.member.chain_users import ReadStore


class SharedStore(ReadStore, Protocol):
    """The worker's store: `hetero_connector.store.peers.sharing.Sharing`."""

    @property
    def card(self) -> bytes:
        """What peers need to read from it."""
        ...

    @property
    def storage(self) -> str:
        """Its SSD directory, for whoever takes over; "" for none."""
        ...

    def may_adopt_from(self, storage: str) -> bool:
        """Return whether what a dead worker left there may be read here."""
        ...

    def serve_under(self, epoch: int) -> None:
        """Peers accept what was listed under this epoch; 0: nothing."""
        ...

    @property
    def generation(self) -> Generation:
        """The generation of what it holds."""
        ...

    @property
    def adopted(self) -> int:
        """The fleet's generation that it shares state in, for good; 0: none."""
        ...

    def hear_generation(self, number: int, asked_in: Generation) -> None:
        """What the fleet's generation was, when it was asked in this one of its own."""
        ...

    def take_exports(self) -> list[ExportChange]:
        """What it holds, as it changed since the last call."""
        ...

    def exports_lost(self) -> bool:
        """Return whether changes were lost since the last call, for nobody took them."""
        ...

    def inventory(self) -> Iterator[list[ExportChange]]:
        """All it holds, in batches; each as it is when it is asked for."""
        ...

    def judged(
        self, owned: Mapping[ArtifactId, int], held: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Ours, by token, and others'; returns what it does not hold any more."""
        ...

    def gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Those that it does not hold any more."""
        ...
