"""Choose which artifacts are checked after they were served from DRAM.

A check before would have the request wait for the I/O thread, which costs more than the copy. So
a wrong byte is found after it was served once, perhaps more often, but is not served for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random

from hetero_connector.store.catalog.nodes import Artifact

ONE_IN = 128
"""Hits for one sample. A checksum takes half as long as a copy: half a percent of it in all."""
_MAX_WAITING = 64
"""Samples beyond are dropped: the I/O thread has better things to do."""


class HitSamples:
    """Chooses one in so many hits, at random distances: no pattern of use escapes it."""

    def __init__(self, one_in: int, random: Random) -> None:
        self._distances = 2 * one_in - 1
        self._random = random
        self._skip = random.randrange(one_in)
        """Hits before the next sample."""
        self._waiting: deque[Artifact] = deque(maxlen=_MAX_WAITING)

    def __len__(self) -> int:
        """Return how many wait for their check."""
        return len(self._waiting)

    def hit(self, artifacts: Sequence[Artifact]) -> None:
        """A restore used them. Costs a microsecond or two a sample."""
        at = self._skip
        while at < len(artifacts):
            self._waiting.append(artifacts[at])
            at += 1 + self._random.randrange(self._distances)
        self._skip = at - len(artifacts)

    def take(self) -> Artifact | None:
        """The next to be checked."""
        return self._waiting.popleft() if self._waiting else None
