"""Times a restore's reads, tier by tier, for the cost model to learn from.

From when the restore begins to its last verified byte: queue, transfers, checksums and the
I/O thread's own pauses. That is what a request waits for; the transfers alone are less.

What is given up at the deadline tells the most: a tier that became slow would be waited for again
and again. Its bytes that arrived by then say how long all would have taken, but what has lasted so
long is given no more than as long again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetero_connector.artifacts.record import Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import ReadTiming


@dataclass
class _Reads:
    bytes_by_type: Counter[StateType] = field(default_factory=Counter)
    arrived_bytes: int = 0
    left: int = 0
    is_representative: bool = True
    """False if the time is not that of these bytes."""


class StagingTimer:
    """One per restore."""

    def __init__(self, started_s: float, ahead_bytes: Mapping[Tier, int]) -> None:
        """`ahead_bytes`: bytes that others wait for when it begins, by tier."""
        self.started_s = started_s
        self._ahead_bytes = dict(ahead_bytes)
        self._reads: dict[Tier, _Reads] = {}

    def add(self, tier: Tier, state_type: StateType, size_bytes: int) -> None:
        """Add a read that the restore began."""
        reads = self._reads.setdefault(tier, _Reads())
        reads.bytes_by_type[state_type] += size_bytes
        reads.left += 1

    def add_foreign(self, tier: Tier) -> None:
        """Add a read whose time is not that of the tier: it began earlier, or is from elsewhere."""
        reads = self._reads.setdefault(tier, _Reads())
        reads.left += 1
        reads.is_representative = False

    def end(self, tier: Tier, size_bytes: int, now_s: float, *, failed: bool) -> ReadTiming | None:
        """Note that a read has ended; return a timing if it was the tier's last."""
        reads = self._reads[tier]
        reads.left -= 1
        if not failed:
            reads.arrived_bytes += size_bytes
        elif tier is Tier.PEER:  # it has its own deadline, and the other peers are not it
            reads.is_representative = False
        return None if reads.left else self._timing(tier, now_s)

    def give_up(self, now_s: float) -> list[ReadTiming]:
        """Wait no longer; return a timing of each tier that has not ended."""
        timings = [self._timing(tier, now_s) for tier, reads in self._reads.items() if reads.left]
        return [timing for timing in timings if timing is not None]

    def _timing(self, tier: Tier, now_s: float) -> ReadTiming | None:
        reads = self._reads[tier]
        if not reads.is_representative or tier is Tier.DRAM:
            return None
        asked_bytes = reads.bytes_by_type.total()
        part = max(reads.arrived_bytes / asked_bytes, 0.5)
        return ReadTiming(
            tier,
            reads.bytes_by_type,
            self._ahead_bytes.get(tier, 0),
            (now_s - self.started_s) / part,
            whole=reads.arrived_bytes == asked_bytes,
        )
