"""The store's I/O thread: it moves bytes between tiers, and makes and checks checksums.

Restores come first: a prefetch begins only while no read is queued or under way, a batch of writes
too, unless it has waited for a second. Both are small enough that a restore arriving meanwhile
does not wait long. Checksums, and with them what the fleet is shown, wait for no read.

Nothing here waits for the disk: transfers are polled, and what may hang in the kernel runs on
threads of its own: syncs and the journal (`ssd.journal_rows`), orphaned storage (`peers.adopter`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero_connector.metrics import Recorder
from hetero_connector.store.batch_runner import BatchRunner
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.checksums import Checksums
from hetero_connector.store.peers.adopter import Adoption, AdoptionBatch
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.reader import PeerReadBatch, PeerReads
from hetero_connector.store.ssd.health import WriteHealth
from hetero_connector.store.ssd.journal_rows import JournalRows
from hetero_connector.store.ssd.reader import SizeOf, SsdReadBatch, SsdReads
from hetero_connector.store.ssd.tier import Ssd
from hetero_connector.store.ssd.writer import SsdWrites, WriteBatch

logger = logging.getLogger("vllm.heterocache")

_MIN_POLL_S, _MAX_POLL_S = 20e-6, 2e-3
_IDLE_S = 1.0
_HOUSEKEEPING_S = 30.0
_JOURNAL_CLOSE_S = 0.5
_PEER_CLOSE_S = 0.5
"""A peer that was stopped is not waited for."""
_PROCESS_END_S = 5.0
"""The peer process, which is killed, has to unmap the DRAM tier."""


class SsdIo:
    """The two devices of the SSD tier, and its journal."""

    def __init__(
        self,
        catalog: Catalog,
        ssd: Ssd,
        checksums: Checksums,
        recorder: Recorder,
        size_of: SizeOf | None,
        is_reading: Callable[[], bool],
    ) -> None:
        """`is_reading`: whether reads are under way, to which writes yield."""
        self.rows = JournalRows(catalog, ssd.directory)
        self.health = WriteHealth(catalog, ssd.directory.path)
        self.read_device = SsdReads(catalog, ssd, checksums, size_of)
        self.reads = BatchRunner[SsdReadBatch](self.read_device, catalog.clock)
        self.write_device = SsdWrites(catalog, ssd, self.rows, self.health, recorder, is_reading)
        self.writes = BatchRunner[WriteBatch](self.write_device, catalog.clock)
        self._transfer = ssd.transfer

    def close(self, timeout_s: float) -> bool:
        """Close the files; False if a transfer may still touch the arena."""
        if not self._transfer.close(timeout_s):
            return False  # the files stay open, and so must the arena
        if not self.rows.close(max(timeout_s, _JOURNAL_CLOSE_S)):
            logger.error("the disk does not answer; the SSD tier's files stay open until exit")
        return True


class FleetIo:
    """The two devices of a fleet: peers and orphaned storage."""

    def __init__(
        self, catalog: Catalog, memory: npt.NDArray[np.uint8], port: PeerPort, recorder: Recorder
    ) -> None:
        self.peer_device = PeerReads(catalog, memory, port, recorder)
        self.peers = BatchRunner[PeerReadBatch](self.peer_device, catalog.clock)
        self.adoption_device = Adoption(catalog, memory, port.peers)
        self.adoption = BatchRunner[AdoptionBatch](self.adoption_device, catalog.clock)

    def close(self, timeout_s: float) -> bool:
        """End all reads; False if one may still write into the arena."""
        is_closed = self.peer_device.close(max(timeout_s, _PROCESS_END_S))
        return self.adoption_device.close(timeout_s) and is_closed


class IoThread:
    """Runs from `start` until `stop`. A daemon: an engine that dies without `stop` may exit."""

    def __init__(
        self,
        catalog: Catalog,
        memory: npt.NDArray[np.uint8],
        recorder: Recorder,
        ssd: Ssd | None = None,
        port: PeerPort | None = None,
        size_of: SizeOf | None = None,
    ) -> None:
        """`memory`: the arena, `[size_bytes] uint8`. `ssd` and `port`: None without such a tier."""
        self.checksums = Checksums(catalog, memory)
        self.ssd = (
            None
            if ssd is None
            else SsdIo(catalog, ssd, self.checksums, recorder, size_of, self._is_reading)
        )
        self.fleet = None if port is None else FleetIo(catalog, memory, port, recorder)
        self._catalog = catalog
        self._recorder = recorder
        self._thread = threading.Thread(target=self._run, name="heterocache-io", daemon=True)
        self._stop_by_s = math.inf
        self._is_clean = False

    @property
    def runners(self) -> Mapping[str, BatchRunner[Any]]:
        """Return what moves batches, by a name for people."""
        found: dict[str, BatchRunner[Any]] = {}
        if self.ssd is not None:
            found |= {"SSD reads": self.ssd.reads, "SSD writes": self.ssd.writes}
        if self.fleet is not None:
            found |= {"peer reads": self.fleet.peers, "adoption": self.fleet.adoption}
        return found

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, deadline_s: float) -> bool:
        """Fail pending restores, wait for transfers, close the files; within about `deadline_s`.

        In a fleet it may take 5 s more, in which the peer process ends.
        False if a transfer or the thread would not end: the arena must then stay mapped. If True,
        nothing that belongs to this thread keeps the arena mapped once the caller drops it.
        """
        self._stop_by_s = self._catalog.clock() + deadline_s
        self._catalog.begin_close()
        self._thread.join(deadline_s + _IDLE_S + (0.0 if self.fleet is None else _PROCESS_END_S))
        if self._thread.is_alive() or not self._is_clean:
            return False
        self.ssd = self.fleet = None  # they refer to this object: only a collection would end both
        return True

    def step(self) -> bool:
        """Do one round without waiting; return whether anything changed.

        Called by this thread, or by a test in its place.
        """
        catalog = self._catalog
        catalog.step_began_s = catalog.clock()
        moved = catalog.expire()
        if self.ssd is not None:
            moved = self.ssd.reads.step() or moved
        moved = self.checksums.check() or moved
        if self.fleet is not None:
            moved = self.fleet.peers.step() or moved
            moved = self.fleet.adoption.step() or moved
        moved = self.checksums.make(reading=self._is_reading()) or moved
        if self.ssd is not None:
            moved = self.ssd.writes.step() or moved
            moved = self._prefetch(self.ssd) or moved
        catalog.step_began_s = math.inf
        return moved

    def housekeep(self) -> None:
        """Do what is due twice a minute."""
        self._catalog.queue_used_writes()
        if self.fleet is not None:
            self.fleet.peer_device.forget_ended()
        budget = self._catalog.writes.admission.budget
        if budget is not None:
            self._recorder.set("heterocache_ssd_written_24h_bytes", budget.spent_today_bytes)
            self._recorder.set("heterocache_ssd_write_budget_bytes", budget.bytes_per_day)
        if self.ssd is not None:
            self.ssd.rows.touch(self.ssd.health.give_up)

    def _prefetch(self, ssd: SsdIo) -> bool:
        catalog = self._catalog
        is_idle = not (self._is_reading() or catalog.has_loads or catalog.closing)
        moved, loads = catalog.next_prefetch(may_start=is_idle and catalog.ssd_readable)
        if loads:
            ssd.reads.add(ssd.read_device.batch(loads))
        return moved

    def _is_reading(self) -> bool:
        """Return whether reads are under way that restores or prefetches may wait for."""
        fleet = self.fleet is not None and (self.fleet.peers.active or self.fleet.adoption.active)
        return bool(fleet or (self.ssd is not None and self.ssd.reads.active))

    def _is_writing(self) -> bool:
        """Return whether a write or a call of the journal is under way that will end soon."""
        ssd = self.ssd
        return (
            ssd is not None
            and bool(ssd.writes.active or ssd.rows.is_busy)
            and not ssd.write_device.is_stalled()
        )

    def _run(self) -> None:
        try:
            self._serve()
        except Exception:
            # A bug: say so, and let the engine go on with what is in DRAM.
            logger.exception("The store's I/O thread ended; SSD is not used any more")
            self._catalog.on_io_death()
        finally:
            self._is_clean = self._close()

    def _serve(self) -> None:
        catalog = self._catalog
        pause_s, housekeeping_due_s = _MIN_POLL_S, catalog.clock() + _HOUSEKEEPING_S
        while not self._has_finished():
            if self.step():
                pause_s = _MIN_POLL_S
            elif self._is_reading() or self._is_writing():
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _MAX_POLL_S)
            else:
                catalog.wait(_IDLE_S, self._rows_due_s)
            if catalog.clock() >= housekeeping_due_s:
                housekeeping_due_s = catalog.clock() + _HOUSEKEEPING_S
                self.housekeep()

    def _rows_due_s(self) -> float:
        return math.inf if self.ssd is None else self.ssd.rows.due_s

    def _has_finished(self) -> bool:
        catalog = self._catalog
        if not catalog.closing:
            return False
        is_busy = self._is_reading() or self._is_writing() or catalog.has_loads
        return not is_busy or catalog.clock() >= self._stop_by_s

    def _close(self) -> bool:
        is_clean = True
        if self.ssd is not None:
            remaining_s = max(0.1, min(10.0, self._stop_by_s - self._catalog.clock()))
            is_clean = self.ssd.close(remaining_s)
        if self.fleet is not None:
            is_clean = self.fleet.close(_PEER_CLOSE_S) and is_clean
        return is_clean
