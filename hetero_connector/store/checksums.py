"""Checksums of what is in DRAM: making them, and checking bytes against them.

Runs on the I/O thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Source
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.transfer.checksum import checksum

_BATCH_BYTES = 4 << 20


class Checksums:
    """Makes and checks the checksums of artifacts in the arena."""

    def __init__(self, catalog: Catalog, memory: npt.NDArray[np.uint8]) -> None:
        """`memory`: the arena, `[size_bytes] uint8`."""
        self._catalog = catalog
        self._memory = memory

    def make(self, *, reading: bool) -> bool:
        """Give the next sealed artifacts their checksums; return whether there were any.

        `reading`: make few at a time, for reads are under way.
        """
        artifacts = self._catalog.next_sums(reading=reading)
        if artifacts:
            sums = [self._checksum(a, a.dram_offset) for a in artifacts]
            self._catalog.finish_sums(artifacts, sums)
        return bool(artifacts)

    def check(self) -> bool:
        """Check artifacts before they are served, and one that was; return whether there was one.

        See `StoreConfig.verify`. An artifact that has no checksum yet is trusted.
        """
        loads = self._catalog.next_loads(Source.DRAM, _BATCH_BYTES)
        for load in loads:
            artifact = load.artifact
            is_intact = not artifact.checksum or self.is_intact(artifact, artifact.dram_offset)
            self._catalog.finish_load(load, None if is_intact else Failure.CHECKSUM)
        sample = self._catalog.take_sample()
        if sample is not None:
            is_intact = self.is_intact(sample, sample.dram_offset)
            self._catalog.finish_sample(sample, is_intact=is_intact)
        return bool(loads) or sample is not None

    def is_intact(self, artifact: Artifact, offset: int) -> bool:
        """Return whether the bytes at an arena offset have the artifact's checksum."""
        return self._checksum(artifact, offset) == artifact.checksum

    def _checksum(self, artifact: Artifact, offset: int) -> bytes:
        return checksum(self._memory[offset : offset + artifact.size_bytes], artifact.id.seed)
