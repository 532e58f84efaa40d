"""Pause reading from the SSD tier where reads fail or do not end. Runs on the I/O thread.

A read that does not end keeps its DRAM slots until it does. So reading also pauses while too many
of them are under way; it goes on when one has ended.
"""

from __future__ import annotations

import logging

from hetero_connector.store.breaker import Breaker
from hetero_connector.store.catalog.catalog import Catalog

logger = logging.getLogger("vllm.heterocache")

_PAUSE_S = 60.0
_MAX_LATE_BYTES = 64 << 20


class ReadHealth:
    """Counts failures and late reads and sets `Catalog.ssd_readable`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._breaker = Breaker()
        self._again_s = float("inf")

    @property
    def on_trial(self) -> bool:
        """Return whether the next failure pauses reading: then little is begun at once."""
        return self._breaker.on_trial

    def on_success(self) -> None:
        """Note a read that brought its bytes."""
        self._breaker.reset()

    def on_failure(self, error: str) -> None:
        """Count a read that failed, or that was given up."""
        catalog = self._catalog
        if self._breaker.count_failure() and catalog.ssd_readable:
            logger.error(
                "SSD tier: %d reads in a row failed, the last: %s; nothing is read there for %.0f s"
                ", what it holds is computed",
                self._breaker.failures,
                error,
                _PAUSE_S,
            )
            self._stop(catalog.clock() + _PAUSE_S)

    def add_late(self, size_bytes: int) -> None:
        """Note a read of so many bytes that was given up; negative: one that has ended."""
        catalog = self._catalog
        catalog.late_bytes += size_bytes
        if size_bytes < 0:
            self._again_s = min(self._again_s, catalog.clock())
        elif catalog.late_bytes >= _MAX_LATE_BYTES and catalog.ssd_readable:
            logger.error("SSD tier: too many reads do not end; nothing is read there until one has")
            self._stop(float("inf"))

    def probe(self) -> None:
        """End a pause whose time has come."""
        catalog = self._catalog
        if catalog.ssd_readable or catalog.clock() < self._again_s:
            return
        self._again_s = float("inf")
        if catalog.late_bytes < _MAX_LATE_BYTES:
            self._breaker.allow_one()
            catalog.ssd_readable = True

    def _stop(self, again_s: float) -> None:
        self._catalog.ssd_readable = False
        self._again_s = again_s
