"""Pause writing to the SSD tier after failures, and while something hangs.

Runs on the I/O thread. Reading goes on in every case.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import StoreTakenError
from hetero_connector.store.base import Failure
from hetero_connector.store.breaker import Breaker
from hetero_connector.store.catalog.state import StoreState

logger = logging.getLogger("vllm.heterocache")

_PAUSE_S = 60.0


class WriteHealth:
    """Counts failures and holds `StoreState.ssd_writable`."""

    def __init__(self, state: StoreState, path: Path | None) -> None:
        """`path`: the model's directory, for the log."""
        self._state = state
        self._path = path
        self._breaker = Breaker()
        self._is_told = False
        """True if the log has a line of this pause: one for all attempts until one succeeds."""
        self._stalled = False
        self._given_up = False

    def succeeded(self) -> None:
        """A batch is down."""
        self._breaker.succeeded()
        self._is_told = False

    def failed(self, error: Exception) -> None:
        """Count a failure; after three in a row pause, with one line in the log."""
        state = self._state
        if isinstance(error, StoreTakenError):
            self.give_up(str(error))
            return
        state.fail(Failure.IO_ERROR, Tier.SSD)
        if not self._breaker.failed() or not state.ssd_writable:
            return
        if not self._is_told:
            logger.error(
                "SSD tier %s: writing failed %d times, the last time with: %s. Artifacts stay in "
                "DRAM and what the tier holds is still read; writing is tried again every %.0f s",
                self._path,
                self._breaker.failures,
                error,
                _PAUSE_S,
            )
        self._is_told = True
        self._stop(state.clock() + _PAUSE_S)

    def stalled(self, reason: str | None) -> None:
        """Something does not end: write nothing until it has. None: there is nothing like that."""
        if self._given_up or self._stalled == (reason is not None):
            return
        self._stalled = reason is not None
        if reason is not None:
            self._state.fail(Failure.IO_ERROR, Tier.SSD)
            logger.error(
                "SSD tier %s: %s; nothing more is written until it has ended", self._path, reason
            )
            self._stop(float("inf"))
        else:
            logger.warning("SSD tier %s: what hung has ended; writing goes on", self._path)
            self._state.write_again_s = self._state.clock()

    def give_up(self, reason: str) -> None:
        """Never write again in this engine's life."""
        if not self._given_up:
            self._given_up = True
            self._state.fail(Failure.IO_ERROR, Tier.SSD)
            logger.error("SSD tier %s: %s; nothing is written there any more", self._path, reason)
        self._stop(float("inf"))

    def probe(self, queue: Callable[[], None] = lambda: None) -> None:
        """End a pause whose time has come; the next failure pauses at once.

        `queue`: called with the lock held when one ends, to queue what was sealed meanwhile.
        """
        state = self._state
        if state.ssd_writable or state.clock() < state.write_again_s:
            return
        self._breaker.try_again()
        with state.lock:
            state.write_again_s = float("inf")
            state.ssd_writable = True
            queue()
            state.lock.notify_all()

    def _stop(self, again_s: float) -> None:
        state = self._state
        with state.lock:
            state.write_again_s = again_s
            state.ssd_writable = False
            state.stop_writing()
            state.lock.notify_all()
