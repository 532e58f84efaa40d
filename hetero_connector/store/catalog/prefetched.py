"""What was brought to DRAM ahead of a session's return and has not been used yet.

Every byte counted as prefetched is counted once more: as used, by whichever restore, or
as wasted, when it is evicted first or the session is not expected any more.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn


class Prefetched:
    """The caller holds the store's lock. Costs nothing while nothing is prefetched."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._waiting: dict[Artifact, ExpectedReturn] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def expected(self, artifact: Artifact) -> ExpectedReturn | None:
        """For whose return it waits."""
        return self._waiting.get(artifact)

    def add(self, artifact: Artifact, expected: ExpectedReturn) -> None:
        """It has arrived in DRAM."""
        self._waiting[artifact] = expected
        self._recorder.add(
            "heterocache_prefetched_bytes",
            artifact.size_bytes,
            state_type=artifact.state_type.value,
        )

    def used(self, artifacts: Iterable[Artifact]) -> None:
        """A restore used them."""
        if self._waiting:
            for artifact in artifacts:
                if self._waiting.pop(artifact, None) is not None:
                    self._recorder.add(
                        "heterocache_prefetch_used_bytes",
                        artifact.size_bytes,
                        state_type=artifact.state_type.value,
                    )

    def left(self, artifact: Artifact) -> bool:
        """It leaves DRAM, or nobody is expected to need it; True if it was still waiting."""
        if self._waiting.pop(artifact, None) is None:
            return False
        self._recorder.add(
            "heterocache_prefetch_wasted_bytes",
            artifact.size_bytes,
            state_type=artifact.state_type.value,
        )
        return True
