"""The side of a store that its fleet sees: what is here, and who owns it.

Used by the fleet's thread. Each artifact has one owner, who keeps it on its SSD. So a sealed
artifact is written only once the fleet has answered that it is ours, or has not answered in time.
Another worker's artifact is a *replica* here, which stays in DRAM.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.peers.orphaned_storage import may_adopt_from
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.slot_table import serving_word
from hetero_connector.store.ssd.generation_file import GenerationKeeper

logger = logging.getLogger("vllm.heterocache")

_FLEET_S = 1.0


class Sharing:
    """The store as a member of the fleet uses it. Methods return at once."""

    def __init__(
        self, catalog: Catalog, generations: GenerationKeeper, port: PeerPort, storage: str = ""
    ) -> None:
        """`storage`: this model's SSD directory, "" for none."""
        self._catalog = catalog
        self._fleet_side = catalog.fleet_side
        self._generations = generations
        self._port = port
        self._epoch = 0
        catalog.on_generation = self._show_generation
        self.storage = storage
        """The directory in which others find this engine's state once it is dead; "" for none."""

    @property
    def card(self) -> bytes:
        """Return the `PeerCard` that peers need to read the DRAM tier, for the directory."""
        return self._port.card

    def may_adopt_from(self, storage: str) -> bool:
        """Return whether what an ended engine left there may be read here."""
        return storage != self.storage and may_adopt_from(self._catalog.config.adopt_from, storage)

    def serve_under(self, epoch: int) -> None:
        """Peers accept what they read from now if it was listed under this epoch; 0: nothing."""
        self._epoch = epoch
        self._catalog.set_joined(is_joined=bool(epoch))

    @property
    def generation(self) -> Generation:
        """Under which state is stored and found; see `ArtifactStore.generation`."""
        return self._generations.latest

    @property
    def adopted(self) -> int:
        """The fleet's generation that state is shared in, also after a kill; 0: none."""
        return self._generations.kept.adopted

    def note_fleet_generation(self, number: int, asked_in: Generation) -> None:
        """The fleet's generation was `number` when it was asked, in `asked_in` of ours.

        Another one is adopted: at once on disk, by the engine before its next request.
        """
        self._generations.note_fleet(number, asked_in)

    def wait_for_fleet(self) -> None:
        """After a reset: wait until the fleet has said which resets it has had by now.

        A second at most, and not where there is no answer to be expected.
        """
        generations = self._generations
        self._port.feed.wake()
        if self._epoch and not generations.wait_known(_FLEET_S):
            logger.warning(
                "the directory does not answer: a reset of the fleet that comes before it does is "
                "not adopted here; call it once more then"
            )

    def take_exports(self) -> list[ExportChange]:
        """Return what changed here since the last call; see `ExportFeed`."""
        return self._port.feed.take()

    def take_export_loss(self) -> bool:
        """Return whether changes were lost since the last call: only `inventory` tells all then."""
        return self._port.feed.take_loss()

    def inventory(self) -> Iterator[list[ExportChange]]:
        """Yield all that is here and has a checksum, a batch at a time."""
        return self._fleet_side.inventory()

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], foreign: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Note the fleet's answers: ours by fencing token, and those that others own.

        Returns those that are gone.
        """
        return self._fleet_side.resolve_claims(owned, foreign)

    def find_gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Return those that are not here any more."""
        return self._fleet_side.find_gone(artifacts)

    def take_changed_users(self) -> dict[str, tuple[ChunkKey, ...]]:
        """Return the sessions whose chain changed since the last call, with their chains' ends.

        The last chunk of each owner's, deepest first; empty for a session that uses none.
        """
        changed = self._fleet_side.take_changed_users()
        return {_name(session): ends for session, ends in changed.items()}

    def next_victims(self, count: int) -> list[ChunkKey]:
        """Return chunks for which it matters now whether others use them; see `FleetSide`."""
        return self._fleet_side.next_victims(count)

    def set_foreign_users(self, has_users: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Say whether other engines' sessions use chains up to these chunks, valid for so long."""
        self._fleet_side.set_foreign_users(has_users, for_s)

    def _show_generation(self, generation: Generation) -> None:
        """Let peers read that have seen the same resets, no others."""
        tag = generation.tag
        self._port.table.serve_under(serving_word(self._epoch, tag) if self._epoch else 0)


def _name(session: Hashable) -> str:
    """Return a session's name in the fleet: its id's digest, or this engine's number for it."""
    return session.hex() if isinstance(session, bytes) else str(session)
