"""Exports: changes of what this engine stores, for its member of the fleet to publish."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

from hetero_connector.artifacts.copies import ExportChange, ExportedCopy
from hetero_connector.store.base import ChunkCopies
from hetero_connector.store.catalog.nodes import Artifact, Node

_MAX_CHANGES = 1 << 16


def as_it_stands(artifact: Artifact) -> ExportChange | None:
    """Return the artifact's places; None before its checksum is known. Needs the lock."""
    if artifact.checksum is None or not (artifact.dram or artifact.ssd):
        return None
    copy = ExportedCopy(
        artifact.dram_offset,
        0 if artifact.dram is None else artifact.dram.generation,
        artifact.size_bytes,
        artifact.checksum,
        artifact.ssd is not None,
    )
    return ExportChange(artifact.node.chunk, artifact.state_type, copy, artifact.token)


def sealed_copies(node: Node) -> ChunkCopies:
    """Return the tiers of a chunk's sealed artifacts. Needs the lock."""
    sealed = [artifact for artifact in node.artifacts.values() if artifact.sealed]
    return ChunkCopies(
        frozenset(a.state_type for a in sealed if a.dram is not None),
        frozenset(a.state_type for a in sealed if a.ssd is not None),
        bool(node.artifacts),
    )


class ExportFeed:
    """Changes in the order they happened. Written under the store's lock.

    Bounded: if they are not taken the oldest are lost, and `take_loss` returns True.
    """

    def __init__(self, changed: Callable[[], None] | None = None) -> None:
        """`changed`: called when there is something to take again; must return at once."""
        self._changes: deque[ExportChange] = deque(maxlen=_MAX_CHANGES)
        self._changed = changed
        self._has_lost = False

    def on_changed(self, artifact: Artifact) -> None:
        """Note an artifact that was added, moved or lost a copy, once its checksum is known."""
        change = as_it_stands(artifact)
        if change is not None:
            self._append(change)

    def on_forgotten(self, artifact: Artifact) -> None:
        """Note an artifact that leaves the store."""
        if artifact.checksum is not None:
            node = artifact.node
            self._append(ExportChange(node.chunk, artifact.state_type, None, artifact.token))

    def take(self) -> list[ExportChange]:
        """Return every change since the last call, oldest first. Needs no lock."""
        taken: list[ExportChange] = []
        # Until it is empty: only then does the next change call `changed` again.
        with contextlib.suppress(IndexError):
            while True:
                taken.append(self._changes.popleft())
        return taken

    def wake(self) -> None:
        """Have the fleet look at this store soon."""
        if self._changed is not None:
            self._changed()

    def take_loss(self) -> bool:
        """Return whether changes were lost since the last call. Needs no lock."""
        if not self._has_lost:  # else a loss that is noted right now would be wiped out
            return False
        self._has_lost = False
        return True

    def _append(self, change: ExportChange) -> None:
        if len(self._changes) == self._changes.maxlen:
            self._has_lost = True
        self._changes.append(change)
        if len(self._changes) == 1:
            self.wake()
