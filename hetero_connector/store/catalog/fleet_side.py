"""The calls of the fleet's thread: who owns which artifacts, and who uses which chains.

A part of `Catalog`, whose lock its methods take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from hetero_connector.artifacts.copies import ExportChange
from hetero_connector.artifacts.record import ArtifactId, ChunkKey
from hetero_connector.store.catalog.chain_users import ChainUsers
from hetero_connector.store.catalog.exports import as_it_stands
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.replicas import Replicas
from hetero_connector.store.catalog.tiers import Tiers
from hetero_connector.store.catalog.writes import Writes

_INVENTORY_CHUNKS = 64
"""Chunks of the inventory in one batch: the lock is held for one batch."""


class FleetSide:
    """See the module."""

    def __init__(
        self,
        lock: threading.Condition,
        tiers: Tiers,
        writes: Writes,
        replicas: Replicas,
        users: ChainUsers,
        clock: Callable[[], float],
        tick: Callable[[], int],
    ) -> None:
        """`lock`: the catalog's. `tick`: advances its logical clock."""
        self._lock = lock
        self._tiers = tiers
        self._writes = writes
        self._replicas = replicas
        self._users = users
        self._clock = clock
        self._tick = tick

    def resolve_claims(
        self, owned: Mapping[ArtifactId, int], foreign: Iterable[ArtifactId]
    ) -> list[ArtifactId]:
        """Note the fleet's answers: ours by fencing token, and those that others own.

        Returns the artifacts that are gone. Ours are written to SSD; others' are replicas.
        """
        with self._lock:
            gone = self._own(owned) + self._give_away(foreign)
            self._lock.notify_all()
        return gone

    def find_gone(self, artifacts: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Return those of the artifacts that are not stored here."""
        with self._lock:
            return [artifact for artifact in artifacts if self._find_sealed(artifact) is None]

    def inventory(self) -> Iterator[list[ExportChange]]:
        """Yield everything that is stored and has a checksum, in batches.

        Holds the lock for one batch at a time.
        """
        keys = list(self._tiers.index.nodes)
        for first in range(0, len(keys), _INVENTORY_CHUNKS):
            batch = self._inventory_of(keys[first : first + _INVENTORY_CHUNKS])
            if batch:
                yield batch

    def take_changed_users(self) -> Mapping[Hashable, tuple[ChunkKey, ...]]:
        """Return the sessions whose chains changed since the last call, with their chains' ends.

        The last chunk of each owner's, deepest first.
        """
        with self._lock:
            changed = self._users.take_changed()
            return {session: self._users.chain_ends(session) for session in changed}

    def next_victims(self, count: int) -> list[ChunkKey]:
        """Return chunks for which it matters now whether other engines use them.

        At most twice `count`: half of it for the next to leave DRAM, the rest for chunks with
        foreign users, those that were asked about longest ago.
        """
        with self._lock:
            soon = [node.key for node in self._tiers.next_victims(count)]
            foreign = self._users.foreign_ends()
        asked = dict.fromkeys([*foreign[:count], *soon, *foreign[count:]])
        return list(asked)[: 2 * count]

    def set_foreign_users(self, has_users: Mapping[ChunkKey, bool], for_s: float) -> None:
        """Say up to which chunks sessions of other engines use a chain, valid for so long.

        Takes the lock for one chunk at a time: each may end a chain of thousands.
        """
        for chunk, is_used in has_users.items():
            with self._lock:
                node = self._tiers.index.nodes.get(chunk)
                if is_used and node is not None:
                    self._users.add_foreign(node, self._clock() + for_s, self._tick())
                else:
                    self._users.remove_foreign(chunk)

    def _own(self, owned: Mapping[ArtifactId, int]) -> list[ArtifactId]:
        """Note what is ours, and have it written; return what is gone."""
        gone, ours, promoted = list[ArtifactId](), list[Artifact](), list[Artifact]()
        for artifact_id, token in owned.items():
            artifact = self._find_sealed(artifact_id)
            if artifact is None:
                gone.append(artifact_id)
                continue
            was_replica, artifact.replica = artifact.replica, False
            artifact.token = token
            (promoted if was_replica else ours).append(artifact)
        # Parents first: written before its parent an artifact would stay in DRAM alone.
        for artifact in sorted(promoted, key=lambda a: (a.node.chunk.end, a.node.key)):
            self._replicas.promote(artifact)
            self._writes.offer(artifact)
        for artifact in ours:
            self._writes.claims.resolve_owned(artifact)
        return gone

    def _give_away(self, foreign: Iterable[ArtifactId]) -> list[ArtifactId]:
        """Note what others own: here it is a replica; return what is gone."""
        gone: list[ArtifactId] = []
        for artifact_id in foreign:
            artifact = self._find_sealed(artifact_id)
            if artifact is None:
                gone.append(artifact_id)
                continue
            artifact.token = 0
            self._tiers.mark_replica(artifact)
            self._replicas.add(artifact)
            self._writes.claims.discard(artifact)
        return gone

    def _inventory_of(self, keys: Sequence[ChunkKey]) -> list[ExportChange]:
        with self._lock:
            nodes = filter(None, map(self._tiers.index.nodes.get, keys))
            sealed = (a for node in nodes for a in node.artifacts.values() if a.sealed)
            return [change for change in map(as_it_stands, sealed) if change is not None]

    def _find_sealed(self, artifact_id: ArtifactId) -> Artifact | None:
        artifact = self._tiers.index.find(artifact_id)
        return artifact if artifact is not None and artifact.sealed else None
