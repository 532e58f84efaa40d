"""A worker's own view of its lease: may it still act as an owner?

It asks its own monotonic clock, not the directory's, and counts from before it asked for the
lease: the directory's lease began later, so it ends later, however long the messages took. The
margin is for clocks of different rates. So a worker has stopped before anyone may take over;
`docs/directory.md` has the assumptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ownership.directory import Lease
from ownership.directory.identifiers import Epoch

MARGIN = 0.1
"""Share of a lease that is given away: clocks may differ in rate by up to this much."""
RENEWALS_PER_LEASE = 3
"""Two renewals in a row may fail."""


class HeldLease:
    """One registration, seen from the worker. Ask `is_valid` last, right before acting."""

    def __init__(
        self, lease: Lease, asked_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`asked_s`: what `clock` (monotonic seconds) said before `register` was called."""
        self.lease = lease
        self._clock = clock
        self._renewed_s = asked_s
        self._is_lost = False

    @property
    def epoch(self) -> Epoch:
        """What to call the directory with."""
        return self.lease.epoch

    @property
    def is_valid(self) -> bool:
        """Whether the directory is sure to know this epoch as live."""
        return self.left_s > 0.0

    @property
    def left_s(self) -> float:
        """For how many seconds more, if it is not renewed; 0 when it is not."""
        if self._is_lost:
            return 0.0
        until_s = self._renewed_s + self.lease.lease_s * (1.0 - MARGIN)
        return max(0.0, until_s - self._clock())

    @property
    def renew_in_s(self) -> float:
        """Seconds until the next renewal is due; 0 if it is."""
        due_s = self._renewed_s + self.lease.lease_s / RENEWALS_PER_LEASE
        return max(0.0, due_s - self._clock())

    def renewed(self, asked_s: float) -> None:
        """`renew_lease`, called at `asked_s`, has succeeded. Late answers do no harm."""
        self._renewed_s = max(self._renewed_s, asked_s)

    def lost(self) -> None:
        """The directory said that the epoch is stale: it is, for good."""
        self._is_lost = True
