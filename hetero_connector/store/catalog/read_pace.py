"""The pace of the SSD, and so how much may wait for it. Pure: time comes in."""

from __future__ import annotations

import math

_KEPT = 0.9
"""The weight of earlier batches, at each further one: about ten of them count."""
_USABLE = 0.5
"""The usable share of the deadline: reads that are queued beyond it would come too late."""


class ReadPace:
    """Bytes per second over the last batches, as long as there was something to read."""

    def __init__(self, deadline_s: float) -> None:
        self._usable_s = _USABLE * deadline_s
        self._bytes = 0.0
        self._seconds = 0.0
        self._ended_s = -math.inf
        self.most_bytes = math.inf
        """Bytes that may be queued: more would come after the deadline. Infinite until known."""

    def ended(self, size_bytes: int, began_s: float, now_s: float) -> None:
        """A batch of so many bytes has been read. It waited for those before it."""
        self._bytes = _KEPT * self._bytes + size_bytes
        self._seconds = _KEPT * self._seconds + now_s - max(began_s, self._ended_s)
        self._ended_s = now_s
        if self._seconds > 0:
            self.most_bytes = self._usable_s * self._bytes / self._seconds
