"""Writing sealed artifacts on to SSD, and the journal. Runs on the I/O thread.

Order of a batch: evict and make the journal forget the victims, write, `fdatasync`,
journal rows, and only then the SSD copy enters the index. A process killed anywhere in
between leaves no row whose bytes are not down.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.store.catalog.jobs import Forgotten
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.ssd.admission import (
    Admission,
)
from hetero_connector.store.ssd.journal_format import JournalRow
from hetero_connector.store.ssd.journal_rows import JournalRows
from hetero_connector.store.ssd.placement import Placement, Write
from hetero_connector.store.ssd.reader import padded
from hetero_connector.store.ssd.tier import Ssd
from hetero_connector.store.ssd.write_health import WriteHealth
from hetero_connector.store.ssd.write_queue import SpillQueue
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState
from hetero_connector.transfer.checksum import checksum

_DEADLINE_S = 60.0
"""From when on a write, a sync or a call of the journal is said to hang."""


@dataclass(eq=False)
class _Batch:
    transfer: Transfer
    writes: list[Write]
    started_s: float
    is_written: bool = False
    """True if the device is done with its DRAM slots."""
    is_late: bool = False
    """True if it was given up: its artifacts are as if it had not begun."""


class Spiller:
    """Takes due artifacts from the queue, oldest first, one batch at a time."""

    def __init__(
        self,
        state: StoreState,
        memory: npt.NDArray[np.uint8],
        ssd: Ssd | None,
        rows: JournalRows,
        health: WriteHealth,
        admission: Admission,
    ) -> None:
        self._state = state
        self._queue = SpillQueue(state)
        self._memory = memory
        self._ssd = ssd
        self._rows = rows
        self._admitted: list[Artifact] = []
        """Waits for the journal to forget what made way for it."""
        self._prepared = False
        """True if the journal has been told of these."""
        self._batch: _Batch | None = None
        self._late: _Batch | None = None
        """Given up, and not ended: until it has, nothing is written."""
        self._committing: _Batch | None = None
        self._health = health
        self._admission = admission
        self._placement = Placement(state, self._queue, admission)

    @property
    def active(self) -> bool:
        """Return whether something is under way that will soon have ended."""
        begun = self._batch is not None or self._admitted or self._rows.busy
        return bool(begun) and self._what_hangs() is None

    @property
    def waits_for_rows(self) -> bool:
        """Whether nothing is written before the journal has forgotten what it should.

        A row that should be gone may name an artifact that was saved again since: its new row
        must not be there yet when the old one is deleted.
        """
        return self._rows.pending and self._state.ssd_writable

    def step(self, reading: bool) -> bool:
        """End what has ended, and begin the next batch; True if anything moved.

        `reading`: a batch lets reads go first, for a second at most. Checksums do not wait.
        """
        patiently = not reading
        moved = self._rows.poll(patiently=patiently)
        self._poll_late()
        reason = self._what_hangs()
        if reason is not None and self._batch is not None:
            self._give_up(self._batch)
        self._health.stalled(reason)
        self._health.probe(self._queue_sealed)
        if self._state.unjudged:
            with self._state.lock:
                self._state.unjudged.offer_overdue(at_once=self._state.flushing)
        moved = self._sum(reading) or moved
        if self._rows.due and not self._admitted:
            self._rows.forget(self._forgot)
            moved = self._rows.poll(patiently=patiently) or moved
        if self._batch is not None:
            return self._poll(self._batch, patiently) or moved
        if self._admitted:
            return self._write(patiently) or moved
        waits = self._rows.pending or self._rows.busy or self._lets_go_first(reading)
        if waits and self._state.ssd_writable:
            return moved
        return self._start(patiently) or moved

    def _queue_sealed(self) -> None:
        """After a pause, else nothing below what was sealed in it would ever be written."""
        self._queue.add(a for a in self._state.tiers.index.artifacts() if a.sealed)

    def _lets_go_first(self, reading: bool) -> bool:
        return reading and not self._queue.waits_too_long

    def _what_hangs(self) -> str | None:
        """Why nothing can be written now and nobody knows until when; None: nothing hangs."""
        batch, now_s = self._late or self._batch, self._state.clock()
        if self._rows.seconds >= _DEADLINE_S:
            return f"a sync, or the journal, has not ended after {_DEADLINE_S:.0f} s"
        if batch is None or batch.is_written or now_s - batch.started_s < _DEADLINE_S:
            return None
        return f"a write has not ended after {_DEADLINE_S:.0f} s"

    def _give_up(self, batch: _Batch) -> None:
        """Its slots stay in quarantine; its artifacts are as if it had not begun."""
        self._batch, self._late, batch.is_late = None, batch, True
        self._queue.let_go([w.artifact for w in batch.writes])

    def _poll_late(self) -> None:
        """A write that ended too late does not count: what is still here is written again."""
        batch = self._late
        if batch is None or batch.transfer.poll() is TransferState.PENDING:
            return
        self._written(batch)
        if self._committing is not batch:
            self._late = None
            self._release(batch, journaled=False)

    def _forgot(self, error: Exception) -> None:
        """The journal could not forget: slots that were to be free are not yet."""
        self._health.failed(error)
        self._put_off()

    def _sum(self, reading: bool) -> bool:
        """Give artifacts their checksums, and show them to the fleet."""
        artifacts = self._queue.take_unsummed(reading)
        for artifact in artifacts:
            at = artifact.dram_offset
            view = self._memory[at : at + artifact.size_bytes]
            artifact.checksum = checksum(view, artifact.id.seed)
        if artifacts:
            self._queue.summed(artifacts)
        return bool(artifacts)

    def _start(self, patiently: bool) -> bool:
        """Take the next batch; make room for what of it is worth its write."""
        artifacts = self._queue.take_due()
        if not artifacts:
            return False
        self._admitted, self._prepared = self._placement.choose(artifacts), False
        if self._admitted:
            self._write(patiently)
        return True

    def _write(self, patiently: bool) -> bool:
        """Submit what was admitted, once the rows of what made way for it are gone."""
        if not self._state.ssd_writable:
            self._put_off()
            return True
        if self._rows.busy:
            return False
        if self._rows.pending or not self._prepared:
            self._prepared = True
            self._rows.prepare(self._forgot, self._admission.budget)
            if self._rows.poll(patiently=patiently) and self._admitted:
                self._write(patiently)
            return True
        admitted, self._admitted = self._admitted, []
        writes = self._placement.place(admitted)
        if writes:
            assert self._ssd is not None
            extents = [self._extent(self._ssd, w) for w in writes]
            transfer = self._ssd.transfer.submit(Direction.WRITE, extents)
            self._batch = _Batch(transfer, writes, self._state.clock())
        return True

    def _extent(self, ssd: Ssd, write: Write) -> Extent:
        tiers = self._state.tiers
        assert tiers.ssd is not None
        return Extent(
            ssd.file_of(write.artifact.state_type),
            tiers.ssd.slab_offset(write.target),
            tiers.dram.offset(write.source),
            padded(write.artifact.size_bytes),
        )

    def _poll(self, batch: _Batch, patiently: bool) -> bool:
        """See how far the batch is: written, then synced and journaled."""
        if self._committing is batch or batch.transfer.poll() is TransferState.PENDING:
            return False
        self._written(batch)
        if batch.transfer.error is not None:
            self._batch = None
            self._retry(batch, batch.transfer.error)
        elif self._rows.busy:
            return False
        else:
            now = time.time()
            # After a reset the journal may have been cleared for another generation already.
            kept = [w for w in batch.writes if not w.artifact.forgotten]
            rows = [JournalRow.of(w.artifact, w.target, now) for w in kept]
            self._committing = batch
            self._rows.record(rows, self._committed)
            self._rows.poll(patiently=patiently)
        return True

    def _written(self, batch: _Batch) -> None:
        """The device does not touch its DRAM slots any more."""
        if batch.is_written:
            return
        batch.is_written = True
        with self._state.lock:
            for write in batch.writes:
                self._state.tiers.dram.unhold(write.source)

    def _committed(self, error: Exception | None) -> None:
        """The bytes are synced and journaled, unless there was an error: make them known."""
        batch, self._committing = self._committing, None
        assert batch is not None
        if batch.is_late:
            self._late = None
        else:
            self._batch = None
        if error is not None:
            self._retry(batch, error)
            return
        self._health.succeeded()
        self._state.recorder.observe(
            "heterocache_ssd_write_seconds", self._state.clock() - batch.started_s
        )
        self._release(batch, journaled=True)

    def _release(self, batch: _Batch, *, journaled: bool) -> None:
        """Drop holds and pins of an ended batch; what was journaled is on SSD from now."""
        state, tiers = self._state, self._state.tiers
        assert tiers.ssd is not None
        with state.lock:
            for write in batch.writes:
                artifact = write.artifact
                tiers.ssd.unhold(write.target)
                if not journaled:
                    tiers.ssd.give_back(write.target)
                elif artifact.forgotten:
                    tiers.forgotten.append(Forgotten(artifact.id, write.target))
                else:
                    tiers.attach(artifact, write.target)
                    state.spills.discard(artifact)
                    state.recorder.add(
                        "heterocache_ssd_written_bytes",
                        artifact.size_bytes,
                        state_type=artifact.state_type.value,
                    )
        if not batch.is_late:
            self._queue.let_go([w.artifact for w in batch.writes])

    def _retry(self, batch: _Batch, error: Exception) -> None:
        """Put a failed batch back at the head of the queue: chunks below it depend on it."""
        if not batch.is_late:
            self._queue.put_back([w.artifact for w in batch.writes])
        self._health.failed(error)
        self._release(batch, journaled=False)

    def _put_off(self) -> None:
        """The same with what was admitted and not begun."""
        artifacts, self._admitted = self._admitted, []
        self._queue.put_back(artifacts)
        with self._state.lock:
            for artifact in artifacts:
                self._admission.refund(artifact)
        self._queue.let_go(artifacts)

    def ask_again(self) -> None:
        """Queue what restores used and only DRAM has: it is worth more than when it was refused."""
        state = self._state
        if self._admission.budget is None:
            return
        with state.lock:
            self._queue.add(list(state.used))
