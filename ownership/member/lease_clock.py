"""The clock that a worker's lease is measured by."""

from __future__ import annotations

import time

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def lease_clock() -> float:
    """Seconds that never go back, and go on while the machine is suspended where it can tell.

    `time.monotonic` stands still meanwhile: a worker would wake up with a lease that others have
    seen end.
    """
    return time.clock_gettime(_CLOCK)
