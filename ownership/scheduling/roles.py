"""Soft roles: how much a worker leans to prefills or to decodes, from the work placed lately.

A decode step waits for the prefills of its batch, so prefills cost least where few requests decode.
A price of the next delay alone cannot gather them: placing one decode among future prefills, or one
prefill among future decodes, looks cheap each time. So as many workers as prefills keep busy lean
to prefills, the first by name: decoding there looks dearer, and so does delaying decodes elsewhere.
These are prices, not pools. Any worker still does any work if that is cheaper.
"""

from __future__ import annotations

import math

import numpy as np

from ownership.scheduling.fleet import Floats

_HORIZON_S = 60.0
"""Older work counts less by a factor e."""


class PrefillDemand:
    """The number of workers that the prefills placed lately keep busy. Not thread-safe.

    Nothing is known of the time before the first, so it is taken to have had none: a burst at the
    start makes no roles.
    """

    def __init__(self, horizon_s: float = _HORIZON_S) -> None:
        self._horizon_s = horizon_s
        self._seen_s = -math.inf
        self._compute_s = 0.0

    def add(self, compute_s: float, now_s: float) -> None:
        """Add a prefill that takes one worker so many seconds."""
        self._forget(now_s)
        self._compute_s += compute_s

    def workers(self, now_s: float) -> float:
        """Return the seconds of prefill per second."""
        self._forget(now_s)
        return self._compute_s / self._horizon_s

    def _forget(self, now_s: float) -> None:
        if now_s > self._seen_s:
            self._compute_s *= math.exp((self._seen_s - now_s) / self._horizon_s)
            self._seen_s = now_s


class Leaning:
    """The factors by which prices differ between workers, each `[workers]` and at least 1."""

    def __init__(self, strength: float, workers: int, demand: float) -> None:
        """`strength`: the largest factor; 1 means no roles. `demand`: of `PrefillDemand`."""
        whole, part = divmod(min(demand, workers - 1.0), 1.0)
        self.decode: Floats = np.ones(workers)
        """On a decode: above 1 where prefills are to be."""
        self.decode[: int(whole)] = strength
        if part:
            self.decode[int(whole)] = np.power(strength, part)
        self.delay: Floats = strength / self.decode
        """On the delay of decodes by a prefill: above 1 where they are to be undisturbed."""
