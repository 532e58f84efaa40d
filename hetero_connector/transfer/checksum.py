"""The checksum of an artifact's bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

CHECKSUM_BYTES = 16


def checksum(view: npt.NDArray[np.uint8], seed: int) -> bytes:
    """Return the xxh3-128 of `view` ([n] uint8, contiguous): 16 bytes, big-endian.

    `seed`: 64 bits, the `ArtifactId.seed`, so that intact bytes of another artifact do not verify.
    """
    return xxhash.xxh3_128_digest(view, seed=seed)  # type: ignore[arg-type]
