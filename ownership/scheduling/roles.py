"""Soft roles: how much a worker leans to prefills or to decodes, from the work placed lately.

A decode step waits for the prefills of its batch, so prefills cost least where few requests decode.
A price of the next delay alone cannot gather them: placing one decode among future prefills, or one
prefill among future decodes, looks cheap each time. So as many workers as prefills keep busy lean
to prefills, of those that accept requests the first by name: decoding there looks dearer, and so
does delaying decodes elsewhere. These are prices, not pools. Any worker still does any work if that
is cheaper.

Gathered decodes cost little where a step takes hardly longer with more of them, as on a GPU that
reads its weights once for all. So a role is as strong as the part of a step that they share.
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

    def __init__(self) -> None:
        self._seen_s = -math.inf
        self._compute_s = 0.0

    def add(self, compute_s: float, now_s: float) -> None:
        """Add a prefill that takes one worker so many seconds."""
        self._forget(now_s)
        self._compute_s += compute_s

    def take_back(self, compute_s: float, added_s: float, now_s: float) -> None:
        """Take back a prefill that was added at `added_s` and not computed."""
        self._forget(now_s)
        left_s = compute_s * math.exp((added_s - self._seen_s) / _HORIZON_S)
        self._compute_s = max(0.0, self._compute_s - left_s)

    def workers(self, now_s: float) -> float:
        """Return the seconds of prefill per second."""
        self._forget(now_s)
        return self._compute_s / _HORIZON_S

    def _forget(self, now_s: float) -> None:
        if now_s > self._seen_s:
            self._compute_s *= math.exp((self._seen_s - now_s) / _HORIZON_S)
            self._seen_s = now_s


class Leaning:
    """The factors by which prices differ between workers, each `[workers]` and at least 1."""

    def __init__(self, strength: float, shared: Floats, demand: float, accepting: Floats) -> None:
        """`strength`: the largest factor; 1 means no roles. `demand`: of `PrefillDemand`.

        `shared`: `[workers]`, the part of a decode step that its requests share. `accepting`:
        `[workers]`, 1 or 0. One worker that accepts requests is left to decodes.
        """
        largest: Floats = 1.0 + (strength - 1.0) * shared
        able = np.flatnonzero(accepting)
        part, count = math.modf(min(demand, max(len(able) - 1.0, 0.0)))
        whole = int(count)
        self.decode: Floats = np.ones(len(shared))
        """On a decode: above 1 where prefills are to be."""
        self.decode[able[:whole]] = largest[able[:whole]]
        if part:
            self.decode[able[whole]] = largest.item(able.item(whole)) ** part
        self.delay: Floats = largest / self.decode
        """On the delay of decodes by a prefill: above 1 where they are to be undisturbed."""
