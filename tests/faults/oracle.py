"""Which bytes a store may serve."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import ArtifactId
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog.restore import Restore
from tests.store.filling import SIZES


def contents(artifact: ArtifactId, weights: int) -> npt.NDArray[np.uint8]:
    """The bytes of an artifact that was computed with these weights, `[size_bytes] uint8`."""
    kind = list(StateType).index(artifact.state_type)
    seed = [int.from_bytes(artifact.chunk, "little"), kind, weights]
    size = SIZES[artifact.state_type]
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


class Oracle:
    """Knows an artifact's bytes by its id and by the weights they were computed with.

    A reset stands for new weights: what was sealed before it has other bytes under the same ids.
    """

    def __init__(self) -> None:
        self.weights = 0
        """The number of resets that have answered."""
        self._may_return: dict[bytes, int] = {}
        """Generations that the disk could not be told the end of, and their weights."""

    def on_reset(self, before: bytes, *, is_kept: bool) -> None:
        """Expect nothing of the generation `before` it, unless the process ends and `is_kept` is
        not: the store has said then that a reset was in vain."""
        if is_kept:
            self._may_return.clear()
        else:
            self._may_return[before] = self.weights
        self.weights += 1

    def on_start(self, generation: bytes) -> None:
        """Go on with what the disk told a new process."""
        self.weights = self._may_return.get(generation, self.weights)

    def contents(self, artifact: ArtifactId) -> npt.NDArray[np.uint8]:
        """The only right bytes of an artifact that is computed now."""
        return contents(artifact, self.weights)

    def judge(self, store: ArtifactStore, restore: Restore, weights: int) -> list[str]:
        """Say what is wrong with the bytes that a restore hands out.

        `weights`: those of the moment at which it began.
        """
        wrong = []
        for artifact, at in restore.offsets.items():
            found = store.arena.view[at : at + SIZES[artifact.state_type]]
            if np.array_equal(found, contents(artifact, weights)):
                continue
            of = [w for w in range(weights) if np.array_equal(found, contents(artifact, w))]
            what = "of before a reset" if of else "of something else"
            wrong.append(f"{artifact.state_type} {artifact.chunk.hex()[:8]}: bytes {what}")
        return wrong
