"""A worker's own view of its lease: may it still act as an owner?

It asks its own clock, not the directory's, and counts from before it asked for the lease. The
directory's lease began later, so it ends later, however long the messages took. A margin allows
for clocks of different rates. So a worker has stopped before another may take over;
`docs/internals/directory.md` has the assumptions.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from ownership.directory import Lease
from ownership.directory.identifiers import Epoch

MARGIN = 0.1
"""Share of a lease that is not used: the rates of two clocks may differ by up to this much."""
RENEWALS_PER_LEASE = 3
"""Two renewals in a row may fail."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Return seconds that never go back and, if the system supports it, count while suspended.

    `time.monotonic` stops while the machine is suspended: a worker would wake up with a lease that
    had ended for all others.
    """
    return time.clock_gettime(_CLOCK)


class HeldLease:
    """One registration, seen from the worker. It acts as an owner only while `is_valid`."""

    def __init__(
        self, lease: Lease, asked_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`asked_s`: the time of `clock` (monotonic seconds) before `register` was called."""
        self.lease = lease
        self._clock = clock
        self._renewed_s = asked_s
        self._is_invalid = False

    @property
    def epoch(self) -> Epoch:
        """The epoch to call the directory with."""
        return self.lease.epoch

    @property
    def is_valid(self) -> bool:
        """True if the epoch is certainly live for the directory."""
        return self.left_s > 0.0

    @property
    def left_s(self) -> float:
        """Seconds for which it stays valid without a renewal; 0 if it is not valid."""
        if self._is_invalid:
            return 0.0
        until_s = self._renewed_s + self.lease.lease_s * (1.0 - MARGIN)
        return max(0.0, until_s - self._clock())

    @property
    def renew_in_s(self) -> float:
        """Seconds until the next renewal is due; 0 if it is due."""
        due_s = self._renewed_s + self.lease.lease_s / RENEWALS_PER_LEASE
        return max(0.0, due_s - self._clock())

    def on_renewed(self, asked_s: float) -> None:
        """Extend it: `renew_lease`, called at `asked_s`, has succeeded. Late answers are safe."""
        self._renewed_s = max(self._renewed_s, asked_s)

    def invalidate(self) -> None:
        """End it for good: the directory called the epoch stale, or the worker gives it up."""
        self._is_invalid = True
