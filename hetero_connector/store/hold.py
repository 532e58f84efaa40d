"""What a restore keeps in place while workers copy from it.

A long prompt has thousands of artifacts. To pin each one, and to unpin it, would cost the
scheduler's thread about a millisecond between two steps; so a restore holds its chunks as a
whole, and only an eviction or a reset that happens meanwhile looks inside.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetero_connector.artifacts.nodes import Artifact
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Wanted


class Hold:
    """The artifacts of some chunks, present or to come. Guarded by the store's lock."""

    def __init__(self, wanted: Sequence[Wanted]) -> None:
        self._wanted = wanted
        self._keys: dict[StateType, set[ChunkKey]] | None = None
        self.passed_over: set[Artifact] = set()
        """Those that would have been evicted or freed; to be looked at again afterwards."""

    def covers(self, artifact: Artifact) -> bool:
        """Whether the artifact's memory must stay as it is. The first call costs O(chunks)."""
        if self._keys is None:
            self._keys = {}
            for kind, chunks in self._wanted:
                self._keys.setdefault(kind, set()).update(s.chunk.key for s in chunks)
        return artifact.node.key in self._keys.get(artifact.state_type, ())
