"""The side of a store that its fleet sees: what is here, and whose it is.

Used by the fleet's thread, beside the scheduler's. An artifact is the fleet's: one worker owns
it and keeps it on its SSD. So a sealed artifact is written only once the fleet has said that it
is ours, or has not answered in time; another's is a *replica* here, which stays in DRAM.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Iterable, Iterator, Mapping

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.generation import Generation
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.store.catalog.exports import as_it_stands
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.peers.orphaned_storage import may_adopt_from
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.slot_table import serving_word

logger = logging.getLogger("vllm.heterocache")

_FLEET_S = 1.0
_CHUNKS_AT_ONCE = 64
"""Of an inventory: the lock is held for one batch."""


class Sharing:
    """What a fleet's member asks of its store. Methods return at once."""

    def __init__(self, state: StoreState, port: PeerPort, storage: str = "") -> None:
        """`storage`: this model's SSD directory, "" for none."""
        self._state = state
        self._port = port
        self._epoch = 0
        state.show_generation = self._show_generation
        self.storage = storage
        """Where others find what this engine wrote, once it is dead; "" for nowhere."""

    @property
    def card(self) -> bytes:
        """What peers need to read the DRAM tier, for the directory: a `PeerCard`."""
        return self._port.card

    def may_adopt_from(self, storage: str) -> bool:
        """Return whether what an ended engine left there may be read here."""
        return storage != self.storage and may_adopt_from(self._state.config.adopt_from, storage)

    def serve_under(self, epoch: int) -> None:
        """Peers accept what they read from now if it was listed under this epoch; 0: nothing."""
        with self._state.lock:
            self._epoch = epoch
            self._state.unjudged.joined = bool(epoch)
            self._show_generation()

    @property
    def generation(self) -> Generation:
        """Under which state is stored and found; see `base.Store.generation`."""
        return self._state.generations.latest

    @property
    def adopted(self) -> int:
        """The fleet's generation that state is shared in, also after a kill; 0: none."""
        return self._state.generations.kept.adopted

    def hear_generation(self, number: int, asked_in: Generation) -> None:
        """The fleet's generation was `number` when it was asked, in `asked_in` of ours.

        Another one is adopted: at once on disk, by the engine before its next request.
        """
        self._state.generations.told(number, asked_in)

    def wait_for_fleet(self) -> None:
        """After a reset: wait until the fleet has said which resets it has had by now.

        A second at most, and not where there is no answer to be expected.
        """
        generations = self._state.generations
        self._port.feed.wake()
        if self._epoch and not generations.wait_known(_FLEET_S):
            logger.warning(
                "the directory does not answer: a reset of the fleet that comes before it does is "
                "not adopted here; call it once more then"
            )

    def take_exports(self) -> list[ExportChange]:
        """What is here, as it changed since the last call; see `ExportFeed`."""
        feed = self._state.tiers.feed
        return [] if feed is None else feed.take()

    def exports_lost(self) -> bool:
        """Whether changes were lost since the last call: only all that is here tells then."""
        feed = self._state.tiers.feed
        return feed is not None and feed.take_loss()

    def inventory(self) -> Iterator[list[ExportChange]]:
        """All that is here and may be told, a batch at a time, parents first."""
        nodes = self._state.tiers.index.nodes
        keys = list(nodes)
        for first in range(0, len(keys), _CHUNKS_AT_ONCE):
            batch = []
            with self._state.lock:
                nodes = self._state.tiers.index.nodes
                for key in keys[first : first + _CHUNKS_AT_ONCE]:
                    node = nodes.get(key)
                    for artifact in node.artifacts.values() if node else ():
                        change = as_it_stands(artifact) if artifact.sealed else None
                        if change is not None:
                            batch.append(change)
            if batch:
                yield batch

    def judged(
        self, owned: Mapping[ArtifactId, int], held: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """What the fleet says: ours, by fencing token; others' replicas. Those that are gone."""
        state, gone = self._state, []
        ours, promoted = list[Artifact](), list[Artifact]()
        with state.lock:
            for artifact_id, token in owned.items():
                artifact = self._find(artifact_id)
                if artifact is None:
                    gone.append(artifact_id)
                    continue
                was_replica, artifact.replica = artifact.replica, False
                artifact.token = token
                (promoted if was_replica else ours).append(artifact)
            # Nobody else keeps these any more. Written before what it continues, one would stay in
            # DRAM alone; and the fleet names them in no order.
            for artifact in sorted(promoted, key=lambda a: (a.node.chunk.end, a.node.key)):
                state.replicas.is_ours(artifact)
                state.offer(artifact)
            for artifact in ours:
                state.unjudged.is_ours(artifact)
            for artifact_id in held:
                artifact = self._find(artifact_id)
                if artifact is None:
                    gone.append(artifact_id)
                    continue
                artifact.token = 0
                state.tiers.is_theirs(artifact)
                state.replicas.add(artifact)
                state.unjudged.is_not_ours(artifact)
            state.lock.notify_all()
        return gone

    def gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Those that are not here any more."""
        with self._state.lock:
            return [artifact for artifact in artifacts if self._find(artifact) is None]

    def take_readers(self) -> dict[str, tuple[ChunkKey, ...]]:
        """Readers that came, went on or left since the last call: where their chains end.

        The last chunk of each owner's, deepest first; empty for one that left.
        """
        state = self._state
        with state.lock:
            changed, state.readers.changed = state.readers.changed, {}
        ends = {}
        for reader in changed:
            with state.lock:  # anew for each: long chains take a while
                ends[_name(reader)] = state.readers.ends(reader)
        return ends

    def soon_to_leave(self, count: int) -> list[ChunkKey]:
        """Chunks of which it matters now whether others read them, twice `count` or fewer.

        Half of that is room for what would leave next, the rest for what others read already: of
        that, what was asked longest ago.
        """
        state = self._state
        with state.lock:
            soon = [node.key for node in state.tiers.soon_to_leave(count)]
            elsewhere = state.readers.read_elsewhere()
        asked = dict.fromkeys([*elsewhere[:count], *soon, *elsewhere[count:]])
        return list(asked)[: 2 * count]

    def read_elsewhere(self, is_read: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Whether readers of other engines read up to these chunks: believed for so long."""
        state = self._state
        with state.lock:
            for chunk, has_readers in is_read.items():
                node = state.tiers.index.nodes.get(chunk)
                if has_readers and node is not None:
                    until_s = state.clock() + for_s
                    state.readers.reads_elsewhere(node, until_s, state.tick())
                else:
                    state.readers.leave_elsewhere(chunk)

    def _show_generation(self) -> None:
        """Let peers read that have seen the same resets, no others."""
        tag = self._state.generation.tag
        self._port.table.serve_under(serving_word(self._epoch, tag) if self._epoch else 0)

    def _find(self, artifact_id: ArtifactId) -> Artifact | None:
        artifact = self._state.tiers.index.find(artifact_id)
        return artifact if artifact is not None and artifact.sealed else None


def _name(reader: Hashable) -> str:
    """A session's name in the fleet: by its id's digest, or this engine's number for it."""
    return reader.hex() if isinstance(reader, bytes) else str(reader)
