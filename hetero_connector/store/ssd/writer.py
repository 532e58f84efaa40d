"""Writing sealed artifacts to our own SSD: a device of `BatchRunner`.

The order of a batch: evict, have the journal forget the victims, write, sync, add journal rows;
only then the catalog knows the SSD copies. A process that is killed anywhere in between leaves no
row whose bytes are not on the disk.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Callable, Sequence
from enum import Enum, auto

from hetero_connector.metrics import Recorder
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.catalog.writes import Write
from hetero_connector.store.ssd.health import WriteHealth
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.journal_rows import JournalRows
from hetero_connector.store.ssd.tier import SLAB, Ssd
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState

_DEADLINE_S = 60.0
"""A write, a sync or a call of the journal that takes longer is said to hang."""
_BAD_PLACE = {errno.EIO, errno.ENODATA, None}
"""Errors that may be of a place on the disk, not of all of it; ENODATA is Linux's for a bad medium,
None is NIXL's for any."""


class _Phase(Enum):
    PREPARING = auto()
    """The journal forgets the rows of what was evicted."""
    WRITING = auto()
    COMMITTING = auto()
    """The slab is synced and journal rows added."""
    DONE = auto()


class WriteBatch:
    """Artifacts that are written together."""

    def __init__(self, device: SsdWrites, admitted: Sequence[Write]) -> None:
        self.phase = _Phase.PREPARING
        self.writes: Sequence[Write] = ()
        self.is_late = False
        """True once it was given up: its artifacts are as if it had not begun."""
        self._device = device
        self._admitted = admitted
        self._began_s = math.inf
        self._transfer: Transfer
        self._is_prepared = False

    @property
    def deadline_s(self) -> float:
        """See `Batch.deadline_s`."""
        if self.phase is _Phase.WRITING:
            return self._began_s + _DEADLINE_S
        return (
            self._device.rows.began_s + _DEADLINE_S if self.phase is _Phase.COMMITTING else math.inf
        )

    @property
    def is_done(self) -> bool:
        """See `Batch.is_done`."""
        return self.phase is _Phase.DONE

    def poll(self) -> bool:
        """See `Batch.poll`. Goes from phase to phase."""
        before = self.phase
        if self.phase is _Phase.PREPARING:
            self._prepare()
        if self.phase is _Phase.WRITING and self._transfer.poll() is not TransferState.PENDING:
            self._commit()
        return self.phase is not before

    def on_prepared(self, error: Exception | None) -> None:
        """Called when the journal has forgotten, or could not."""
        self._is_prepared = True
        if error is not None:
            self._device.health.on_failure(error)
            if self.phase is _Phase.PREPARING:
                self._put_off()

    def _prepare(self) -> None:
        device = self._device
        if not device.catalog.writes.is_writable:
            self._put_off()
        elif not device.rows.is_busy:
            if device.rows.is_pending or not self._is_prepared:
                device.rows.prepare(self.on_prepared, device.catalog.writes.admission.budget)
                device.rows.poll(patiently=device.is_patient)
            if self._is_prepared and not (device.rows.is_busy or device.rows.is_pending):
                self._write()

    def _write(self) -> None:
        if self.phase is not _Phase.PREPARING:
            return
        self.writes = self._device.catalog.begin_writes(self._admitted)
        if not self.writes:
            self.phase = _Phase.DONE
            return
        self._began_s = self._device.catalog.clock()
        self._transfer = self._device.submit(self.writes)
        self.phase = _Phase.WRITING

    def _commit(self) -> None:
        """The device has ended: make it durable, unless it failed or is late."""
        device = self._device
        if self.is_late or self._transfer.error is not None:
            device.catalog.release_write_sources(self.writes)
            self._fail(None if self.is_late else self._transfer.error)
        elif not device.rows.is_busy:
            device.catalog.release_write_sources(self.writes)
            now = device.rows.stamp_use()
            # After a reset the journal may have been cleared for another generation already.
            kept = [w for w in self.writes if not w.artifact.forgotten]
            self.phase = _Phase.COMMITTING
            device.rows.record(
                [JournalRow.of(w.artifact, w.target, now) for w in kept], self._on_committed
            )
            device.rows.poll(patiently=device.is_patient)

    def _on_committed(self, error: Exception | None) -> None:
        if error is not None:
            self._fail(error)
            return
        self.phase = _Phase.DONE
        self._device.on_stored(self._began_s)
        self._device.catalog.finish_writes(self.writes, is_stored=True, is_late=self.is_late)

    def _fail(self, error: Exception | None) -> None:
        """End it. All is written again."""
        self.phase = _Phase.DONE
        failed = self._transfer.error
        self._device.catalog.finish_writes(
            self.writes,
            is_stored=False,
            is_late=self.is_late,
            may_be_bad=failed is not None and failed is error and failed.errno in _BAD_PLACE,
        )
        if error is not None:
            self._device.health.on_failure(error)

    def _put_off(self) -> None:
        self.phase = _Phase.DONE
        self._device.catalog.put_off_writes(self._admitted)


class SsdWrites:
    """Writes what the catalog admits, one batch at a time."""

    def __init__(
        self,
        catalog: Catalog,
        ssd: Ssd,
        rows: JournalRows,
        health: WriteHealth,
        recorder: Recorder,
        is_reading: Callable[[], bool],
    ) -> None:
        """`is_reading`: whether reads are under way, to which a batch yields for a second."""
        self.catalog = catalog
        self.rows = rows
        self.health = health
        self._ssd = ssd
        self._recorder = recorder
        self._is_reading = is_reading
        self._batch: WriteBatch | None = None
        """The batch that began last, until it is done."""

    @property
    def is_patient(self) -> bool:
        """Return whether the I/O thread may wait some milliseconds for the journal."""
        return not self._is_reading()

    def is_stalled(self) -> bool:
        """Return whether nothing can be written now, until an unknown time."""
        return self._why_stalled() is not None

    def tend(self) -> bool:
        """See `Device.tend`: the journal, and pauses of writing."""
        moved = self.rows.poll(patiently=self.is_patient)
        if self._batch is not None and self._batch.is_done:
            self._batch = None
        self.health.set_stalled(self._why_stalled())
        self.health.probe()
        is_preparing = self._batch is not None and self._batch.phase is _Phase.PREPARING
        if self.rows.due_s <= self.catalog.clock() and not is_preparing:
            self.rows.forget(self._on_forgot)
            moved = self.rows.poll(patiently=self.is_patient) or moved
        return moved

    def may_begin(self, active: Sequence[WriteBatch], late: Sequence[WriteBatch]) -> bool:
        """See `Device.may_begin`."""
        if active:
            return False
        yields = self._is_reading() and not self.catalog.has_overdue_write()
        return not (late or self.rows.is_pending or self.rows.is_busy or yields)

    def begin(self) -> list[WriteBatch]:
        """See `Device.begin`."""
        admitted = self.catalog.admit_writes()
        if not admitted:
            return []
        self._batch = WriteBatch(self, admitted)
        return [self._batch]

    def give_up(self, batch: WriteBatch) -> None:
        """See `Device.give_up`. Its slots stay protected; its artifacts are written again."""
        batch.is_late = True
        self.catalog.give_up_writes(batch.writes)

    def on_late_end(self, batch: WriteBatch) -> None:
        """See `Device.on_late_end`."""

    def submit(self, writes: Sequence[Write]) -> Transfer:
        """Begin the transfer of placed writes."""
        return self._ssd.transfer.submit(Direction.WRITE, [self._extent(w) for w in writes])

    def on_stored(self, began_s: float) -> None:
        """Learn from a batch that is durable."""
        self.health.on_success()
        self._recorder.observe("heterocache_ssd_write_seconds", self.catalog.clock() - began_s)

    def _on_forgot(self, error: Exception | None) -> None:
        if error is not None:
            self.health.on_failure(error)

    def _why_stalled(self) -> str | None:
        batch, now_s = self._batch, self.catalog.clock()
        if now_s - self.rows.began_s >= _DEADLINE_S:
            return f"a sync, or the journal, has not ended after {_DEADLINE_S:.0f} s"
        if batch is None or batch.phase is not _Phase.WRITING or now_s < batch.deadline_s:
            return None
        return f"a write has not ended after {_DEADLINE_S:.0f} s"

    def _extent(self, write: Write) -> Extent:
        tiers = self.catalog.tiers
        assert tiers.ssd is not None
        return Extent(
            SLAB,
            tiers.ssd.offset(write.target),
            tiers.dram.offset(write.source),
            padded(write.artifact.size_bytes),
        )
