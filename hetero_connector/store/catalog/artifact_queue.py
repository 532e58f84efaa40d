"""A queue with at most one entry an artifact, any of which may leave before its turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from hetero_connector.store.catalog.nodes import Artifact

Entry = TypeVar("Entry")


class ArtifactQueue(Generic[Entry]):
    """First in, first out. Guarded by the store's lock. Every call is O(1).

    What the store forgets is discarded, so even a queue that is not served is bounded by the index.
    """

    def __init__(self) -> None:
        self._entries: OrderedDict[Artifact, Entry] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, artifact: object) -> bool:
        return artifact in self._entries

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    @property
    def first(self) -> Entry:
        """The entry whose turn it is. IndexError if the queue is empty."""
        for entry in self._entries.values():
            return entry
        raise IndexError("the queue is empty")

    def append(self, artifact: Artifact, entry: Entry) -> None:
        """Queue the artifact; one that is queued keeps its entry and its place."""
        self._entries.setdefault(artifact, entry)

    def append_first(self, artifact: Artifact, entry: Entry) -> None:
        """Queue the artifact before all others."""
        self._entries[artifact] = entry
        self._entries.move_to_end(artifact, last=False)

    def popleft(self) -> Entry:
        """Take the entry whose turn it is. KeyError if the queue is empty."""
        return self._entries.popitem(last=False)[1]

    def discard(self, artifact: Artifact) -> bool:
        """Take the artifact out; False if it is not queued."""
        return self._entries.pop(artifact, None) is not None

    def clear(self) -> None:
        """Take everything out."""
        self._entries.clear()
