"""Whether the SSD tier is being written to: pauses after failures, gives up for good reason.

Runs on the I/O thread. Reading goes on in every case.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import StoreTakenError
from hetero_connector.store.base import Failure
from hetero_connector.store.state import StoreState

logger = logging.getLogger("vllm.heterocache")

_MAX_FAILURES = 3
"""Failures in a row after which writing pauses."""
_PAUSE_S = 60.0


class WriteHealth:
    """Counts failures and holds `StoreState.ssd_writable`."""

    def __init__(self, state: StoreState, path: Path | None) -> None:
        """`path`: the model's directory, for the log."""
        self._state = state
        self._path = path
        self._failures = 0
        self._resume_s = float("inf")

    def succeeded(self) -> None:
        """A batch is down."""
        self._failures = 0

    def failed(self, error: Exception) -> None:
        """Count a failure; after `_MAX_FAILURES` in a row pause, with one line in the log."""
        if isinstance(error, StoreTakenError):
            self.give_up(str(error))
            return
        state = self._state
        self._failures += 1
        state.fail(Failure.IO_ERROR, Tier.SSD)
        if self._failures < _MAX_FAILURES or not state.ssd_writable:
            return
        logger.error(
            "SSD tier %s: writing failed %d times, the last time with: %s. Artifacts stay in DRAM "
            "and what the tier holds is still read; writing is tried again every %.0f s",
            self._path,
            self._failures,
            error,
            _PAUSE_S,
        )
        self._stop()
        self._resume_s = state.clock() + _PAUSE_S

    def give_up(self, reason: str) -> None:
        """Never write again in this engine's life."""
        if self._state.ssd_writable:
            self._state.fail(Failure.IO_ERROR, Tier.SSD)
            logger.error("SSD tier %s: %s; nothing is written there any more", self._path, reason)
        self._resume_s = float("inf")
        self._stop()

    def probe(self) -> bool:
        """After a pause, write again; the next failure pauses at once. Whether a pause is over."""
        state = self._state
        if state.ssd_writable or state.clock() < self._resume_s:
            return False
        self._resume_s = float("inf")
        self._failures = _MAX_FAILURES - 1
        with state.lock:
            state.ssd_writable = True
        return True

    def _stop(self) -> None:
        state = self._state
        with state.lock:
            state.ssd_writable = False
            if not state.wants_checksums:
                state.spills.clear()
            state.lock.notify_all()
