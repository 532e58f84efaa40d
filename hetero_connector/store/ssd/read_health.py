"""Pause reading from the SSD tier where reads fail or do not end. Runs on the I/O thread.

A read that does not end keeps its DRAM slots until it does. So reading also pauses while too many
of them are under way; it goes on when one has ended.
"""

from __future__ import annotations

import logging

from hetero_connector.store.breaker import Breaker
from hetero_connector.store.catalog.state import StoreState

logger = logging.getLogger("vllm.heterocache")

_PAUSE_S = 60.0
_MAX_LATE_BYTES = 64 << 20


class ReadHealth:
    """Counts failures and late reads and holds `StoreState.ssd_readable`."""

    def __init__(self, state: StoreState) -> None:
        self._state = state
        self._breaker = Breaker()
        self._again_s = float("inf")

    @property
    def on_trial(self) -> bool:
        """Return whether the next failure pauses reading: then little is begun at once."""
        return self._breaker.on_trial

    def succeeded(self) -> None:
        """A read has brought its bytes."""
        self._breaker.succeeded()

    def failed(self, error: str) -> None:
        """Count a read that failed, or that was given up."""
        state = self._state
        if self._breaker.failed() and state.ssd_readable:
            logger.error(
                "SSD tier: %d reads in a row failed, the last: %s; nothing is read there for %.0f s"
                ", what it holds is computed",
                self._breaker.failures,
                error,
                _PAUSE_S,
            )
            self._stop(state.clock() + _PAUSE_S)

    def late(self, size_bytes: int) -> None:
        """A read of so many bytes was given up; negative: one of those has ended."""
        state = self._state
        state.late_bytes += size_bytes
        if size_bytes < 0:
            self._again_s = min(self._again_s, state.clock())
        elif state.late_bytes >= _MAX_LATE_BYTES and state.ssd_readable:
            logger.error("SSD tier: too many reads do not end; nothing is read there until one has")
            self._stop(float("inf"))

    def probe(self) -> None:
        """End a pause whose time has come."""
        state = self._state
        if state.ssd_readable or state.clock() < self._again_s:
            return
        self._again_s = float("inf")
        if state.late_bytes < _MAX_LATE_BYTES:
            self._breaker.try_again()
            state.ssd_readable = True

    def _stop(self, again_s: float) -> None:
        self._state.ssd_readable = False
        self._again_s = again_s
