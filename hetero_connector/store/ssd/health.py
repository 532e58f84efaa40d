"""Pause reading or writing the SSD tier after failures, and while something hangs.

Each pauses alone: while nothing is written what is stored is still read. A read that does not end
keeps its DRAM slots until it does, so reading also pauses while too many of them are under way.
Runs on the I/O thread.
"""

from __future__ import annotations

import logging
from pathlib import Path

from hetero_connector.artifacts.record import Tier
from hetero_connector.errors import StoreTakenError
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.ssd.journal_format import CorruptJournalError

logger = logging.getLogger("vllm.heterocache")

_PAUSE_S = 60.0
"""A pause lasts so long, seconds."""
_MAX_LATE_BYTES = 64 << 20
MAX_FAILURES = 3
"""Failures in a row after which there is a pause."""


class Breaker:
    """Counts failures in a row. After a pause one more is enough."""

    def __init__(self) -> None:
        self.failures = 0

    @property
    def on_trial(self) -> bool:
        """Return whether the next failure is one too many."""
        return self.failures == MAX_FAILURES - 1

    def reset(self) -> None:
        """End the row of failures: a success."""
        self.failures = 0

    def count_failure(self) -> bool:
        """Count a failure; return whether it is one too many."""
        self.failures += 1
        return self.failures >= MAX_FAILURES

    def allow_one(self) -> None:
        """End a pause: the next attempt decides."""
        self.failures = MAX_FAILURES - 1


class ReadHealth:
    """Counts failures and late reads and sets `Catalog.ssd_readable`."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._breaker = Breaker()
        self._is_logged = False
        """True if the log has its line about failures: one until an attempt succeeds."""
        self._again_s = float("inf")

    @property
    def on_trial(self) -> bool:
        """Return whether the next failure pauses reading: then little is begun at once."""
        return self._breaker.on_trial

    def on_success(self) -> None:
        """Note a read that brought its bytes."""
        self._breaker.reset()
        self._is_logged = False

    def on_failure(self, error: str) -> None:
        """Count a read that failed, or was given up; after three in a row pause: one log line."""
        catalog = self._catalog
        if self._breaker.count_failure() and catalog.ssd_readable:
            self._stop(
                catalog.clock() + _PAUSE_S,
                f"{self._breaker.failures} reads in a row failed, the last: {error}; what is "
                f"stored there is computed, and reading is tried again every {_PAUSE_S:.0f} s",
            )

    def add_late(self, size_bytes: int) -> None:
        """Note a read of so many bytes that was given up; negative: one that has ended."""
        catalog = self._catalog
        catalog.late_bytes += size_bytes
        if size_bytes < 0:
            self._again_s = min(self._again_s, catalog.clock())
        elif catalog.late_bytes >= _MAX_LATE_BYTES and catalog.ssd_readable:
            self._stop(
                float("inf"), "too many reads do not end; nothing is read there until one has"
            )

    def probe(self) -> None:
        """End a pause whose time has come."""
        catalog = self._catalog
        if catalog.ssd_readable or catalog.clock() < self._again_s:
            return
        self._again_s = float("inf")
        if catalog.late_bytes < _MAX_LATE_BYTES:
            self._breaker.allow_one()
            catalog.ssd_readable = True

    def _stop(self, again_s: float, why: str) -> None:
        """Read nothing until then by the clock."""
        if not self._is_logged:
            logger.error("SSD tier: %s", why)
        self._is_logged = True
        self._catalog.ssd_readable = False
        self._again_s = again_s


class WriteHealth:
    """Counts failures and pauses the catalog's writes."""

    def __init__(self, catalog: Catalog, path: Path | None) -> None:
        """`path`: the model's directory, for the log."""
        self._catalog = catalog
        self._path = path
        self._breaker = Breaker()
        self._is_logged = False
        """True if the log has its line about this pause: one until an attempt succeeds."""
        self._stalled = False
        self._given_up = False

    def on_success(self) -> None:
        """Note a batch that was stored."""
        self._breaker.reset()
        self._is_logged = False

    def on_failure(self, error: Exception) -> None:
        """Count a failure; after three in a row pause, with one line in the log."""
        catalog = self._catalog
        if isinstance(error, StoreTakenError | CorruptJournalError):
            self.give_up(str(error))
            return
        catalog.loads.count_failure(Failure.IO_ERROR, Tier.SSD)
        if not self._breaker.count_failure() or not catalog.writes.is_writable:
            return
        if not self._is_logged:
            logger.error(
                "SSD tier %s: writing failed %d times, the last time with: %s. Artifacts stay in "
                "DRAM and what the tier holds is still read; writing is tried again every %.0f s",
                self._path,
                self._breaker.failures,
                error,
                _PAUSE_S,
            )
        self._is_logged = True
        self._stop(catalog.clock() + _PAUSE_S)

    def set_stalled(self, reason: str | None) -> None:
        """Write nothing while something does not end; None if there is nothing like that."""
        if self._given_up or self._stalled == (reason is not None):
            return
        self._stalled = reason is not None
        if reason is not None:
            self._catalog.loads.count_failure(Failure.IO_ERROR, Tier.SSD)
            logger.error(
                "SSD tier %s: %s; nothing more is written until it has ended", self._path, reason
            )
            self._stop(float("inf"))
        else:
            logger.warning("SSD tier %s: what hung has ended; writing goes on", self._path)
            self._catalog.write_again_s = self._catalog.clock()

    def give_up(self, reason: str) -> None:
        """Never write again in this engine's life."""
        if not self._given_up:
            self._given_up = True
            self._catalog.loads.count_failure(Failure.IO_ERROR, Tier.SSD)
            logger.error(
                "SSD tier %s: %s; SSD writes are disabled until restart", self._path, reason
            )
        self._stop(float("inf"))

    def probe(self) -> None:
        """End a pause whose time has come; the next failure pauses at once."""
        catalog = self._catalog
        if not catalog.writes.is_writable and catalog.clock() >= catalog.write_again_s:
            self._breaker.allow_one()
            catalog.resume_writing()

    def _stop(self, again_s: float) -> None:
        self._catalog.pause_writing(again_s)
