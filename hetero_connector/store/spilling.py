"""Writing sealed artifacts on to SSD, and the journal. Runs on the I/O thread.

Order of a batch: evict and make the journal forget the victims, write, `fdatasync`,
journal rows, and only then the SSD copy enters the index. A process killed anywhere in
between leaves no row whose bytes are not down.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.nodes import Artifact
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.errors import StoreError
from hetero_connector.store.admission import (
    Admission,
    deepest_on_ssd,
    parent_is_there,
    waits_for_parent,
)
from hetero_connector.store.base import Failure
from hetero_connector.store.journal_format import JournalRow
from hetero_connector.store.journal_rows import JournalRows
from hetero_connector.store.reading import padded
from hetero_connector.store.slots import SlotPool
from hetero_connector.store.spill_queue import SpillQueue
from hetero_connector.store.ssd import Ssd
from hetero_connector.store.state import StoreState
from hetero_connector.store.tiers import Forgotten
from hetero_connector.store.write_health import WriteHealth
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState
from hetero_connector.transfer.checksum import checksum

_WRITE_DEADLINE_S = 60.0
_SYNC_PATIENCE_S = 0.005
"""How long the I/O thread itself waits for a sync before it looks after reads again."""


@dataclass(frozen=True)
class _Write:
    artifact: Artifact
    source: SlotRef
    target: SlotRef


@dataclass(frozen=True)
class _Batch:
    transfer: Transfer
    writes: list[_Write]
    started_s: float


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
        self._batch: _Batch | None = None
        self._abandoned: list[_Batch] = []
        self._health = health
        self._admission = admission
        self._syncing: Future[None] | None = None

    @property
    def active(self) -> bool:
        """Whether a batch is being written."""
        return self._batch is not None

    @property
    def waits_for_rows(self) -> bool:
        """Whether nothing is written before the journal has forgotten what it should.

        A row that should be gone may name an artifact that was saved again since: its new row
        must not be there yet when the old one is deleted.
        """
        return self._rows.pending and self._state.ssd_writable

    def step(self, may_start: bool) -> bool:
        """End what has ended and, if `may_start`, begin the next batch; True if anything moved."""
        self._poll_abandoned()
        self._forget_rows()
        if self._health.probe():
            # Chunks that were sealed in the pause, or those below them would never be written.
            with self._state.lock:
                sealed = (a for a in self._state.tiers.index.artifacts() if a.sealed)
                self._queue.add(sealed)
        if self._state.unjudged:
            with self._state.lock:
                self._state.unjudged.offer_overdue(at_once=self._state.flushing)
        if self._batch is not None:
            return self._poll(self._batch)
        return may_start and not self.waits_for_rows and self._start()

    def _forget_rows(self, *, before_writing: bool = False) -> bool:
        """Whether the journal did it and, `before_writing`, the directory is still ours alone."""
        try:
            self._rows.forget()
            if before_writing and self._ssd is not None:
                self._ssd.directory.check_owner()
        except (StoreError, OSError) as e:
            self._health.failed(e)
            return False
        return True

    def _start(self) -> bool:
        artifacts = self._queue.take_due()
        for artifact in artifacts:
            if artifact.checksum is None:
                at = artifact.dram_offset
                view = self._memory[at : at + artifact.size_bytes]
                artifact.checksum = checksum(view, artifact.id.seed)
        self._state.export(artifacts)
        writes = self._place(artifacts)
        if writes:
            assert self._ssd is not None
            self._note_budget()
            extents = [self._extent(self._ssd, w) for w in writes]
            transfer = self._ssd.transfer.submit(Direction.WRITE, extents)
            self._batch = _Batch(transfer, writes, self._state.clock())
        return bool(artifacts)

    def _place(self, artifacts: list[Artifact]) -> list[_Write]:
        """Give each an SSD slot, evicting as needed; those without one stay in DRAM only."""
        state, ssd = self._state, self._state.tiers.ssd
        if ssd is None or not state.ssd_writable:
            self._queue.let_go(artifacts)
            return []
        artifacts = self._admit(artifacts)
        self._make_room(artifacts, ssd)
        if not self._forget_rows(before_writing=True):  # slots that were made free are not yet
            self._put_off(artifacts)
            return []
        writes: list[_Write] = []
        homeless: list[Artifact] = []
        num_refused = 0
        placed: set[Artifact] = set()
        with state.lock:
            for artifact in artifacts:
                target = None
                if not artifact.forgotten and parent_is_there(artifact, placed):
                    target = ssd.take(artifact.state_type)
                if target is None:
                    self._admission.refund(artifact)
                    homeless.append(artifact)
                    if waits_for_parent(artifact, (spill.artifact for spill in state.spills)):
                        state.offer(artifact)
                    else:
                        num_refused += not artifact.forgotten
                    continue
                assert artifact.dram is not None
                ssd.hold(target)
                state.tiers.dram.hold(artifact.dram)
                placed.add(artifact)
                writes.append(_Write(artifact, artifact.dram, target))
            if num_refused:
                state.fail(Failure.NO_SLOT, Tier.SSD, num_refused)
        self._queue.let_go(homeless)
        return writes

    def _admit(self, artifacts: list[Artifact]) -> list[Artifact]:
        """Those that are ours and worth their write; the others stay in DRAM only."""
        state = self._state
        with state.lock:
            ours = state.unjudged.sift(artifacts, at_once=state.flushing)
            admitted = self._admission.admit(ours)
            taken = set(admitted)
            for artifact in ours:
                if artifact in taken:
                    continue
                if waits_for_parent(artifact, (spill.artifact for spill in state.spills)):
                    state.offer(artifact)
                    continue
                state.recorder.add(
                    "heterocache_spills_refused", state_type=artifact.state_type.value
                )
        self._queue.let_go(list(set(artifacts).difference(admitted)))
        return admitted

    def _make_room(self, artifacts: list[Artifact], ssd: SlotPool) -> None:
        """Evict from SSD what the batch needs, but never what the batch continues."""
        state = self._state
        with state.lock:
            above = [x for x in map(deepest_on_ssd, artifacts) if x is not None]
            for artifact in above:
                artifact.pins += 1
            for kind, count in Counter(a.state_type for a in artifacts).items():
                short = count - ssd.free(kind)
                while short > 0 and state.tiers.evict_ssd(kind):
                    short -= 1
            for artifact in above:
                state.tiers.unpin(artifact)

    def _extent(self, ssd: Ssd, write: _Write) -> Extent:
        tiers = self._state.tiers
        assert tiers.ssd is not None
        return Extent(
            ssd.file_of(write.artifact.state_type),
            tiers.ssd.slab_offset(write.target),
            tiers.dram.offset(write.source),
            padded(write.artifact.size_bytes),
        )

    def _poll(self, batch: _Batch) -> bool:
        if batch.transfer.poll() is TransferState.PENDING:
            if self._state.clock() - batch.started_s < _WRITE_DEADLINE_S:
                return False
            self._abandon(batch)
        elif batch.transfer.error is not None:
            self._retry(batch, batch.transfer.error)
        elif not self._synced():
            if self._state.clock() - batch.started_s < _WRITE_DEADLINE_S:
                return False
            self._abandon(batch)
        else:
            self._commit(batch)
        self._batch = None
        return True

    def _synced(self) -> bool:
        """Whether the batch's fdatasync has ended; beside this thread, which restores need."""
        assert self._ssd is not None
        if self._syncing is None:
            self._syncing = _in_background(self._ssd.directory.sync)
        return bool(wait([self._syncing], timeout=_SYNC_PATIENCE_S).done)

    def _commit(self, batch: _Batch) -> None:
        """The bytes are written and synced: make them known."""
        assert self._syncing is not None
        syncing, self._syncing = self._syncing, None
        now = time.time()
        # After a reset the journal may have been cleared for another generation already.
        kept = [w for w in batch.writes if not w.artifact.forgotten]
        rows = [JournalRow.of(w.artifact, w.target, now) for w in kept]
        try:
            syncing.result()
            self._rows.record(rows)
        except (StoreError, OSError) as e:
            self._retry(batch, e)
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
                tiers.dram.unhold(write.source)
                tiers.ssd.unhold(write.target)
                if not journaled:
                    tiers.ssd.give_back(write.target)
                elif artifact.forgotten:
                    tiers.forgotten.append(Forgotten(artifact.id, write.target))
                else:
                    tiers.attach(artifact, write.target)
                    state.recorder.add(
                        "heterocache_spilled_bytes",
                        artifact.size_bytes,
                        state_type=artifact.state_type.value,
                    )
        self._queue.let_go([w.artifact for w in batch.writes])

    def _retry(self, batch: _Batch, error: Exception) -> None:
        """Put a failed batch back at the head of the queue: chunks below it depend on it."""
        self._queue.put_back([w.artifact for w in batch.writes])
        self._health.failed(error)
        self._release(batch, journaled=False)

    def _put_off(self, artifacts: list[Artifact]) -> None:
        """The same with what was admitted and not begun."""
        self._queue.put_back(artifacts)
        with self._state.lock:
            for artifact in artifacts:
                self._admission.refund(artifact)
        self._queue.let_go(artifacts)

    def _abandon(self, batch: _Batch) -> None:
        """A write that does not end: its slots stay in quarantine, and nothing more is written."""
        self._abandoned.append(batch)
        with self._state.lock:
            self._state.spilling -= len(batch.writes)
        self._health.give_up(f"a write has not ended after {_WRITE_DEADLINE_S:.0f} s")

    def ask_again(self) -> None:
        """Queue what restores used and only DRAM has: it is worth more than when it was refused."""
        state = self._state
        if self._admission.budget is None:
            return
        with state.lock:
            self._queue.add({a for used in state.used for a in used})

    def _note_budget(self) -> None:
        """Before a write, so that one cut short by a kill counts, too."""
        try:
            self._rows.note_budget(self._admission.budget)
        except StoreError as e:
            self._health.failed(e)

    def _poll_abandoned(self) -> None:
        for batch in list(self._abandoned):
            if batch.transfer.poll() is not TransferState.PENDING:
                self._abandoned.remove(batch)
                with self._state.lock:
                    self._state.spilling += len(batch.writes)
                self._release(batch, journaled=False)


def _in_background(call: Callable[[], None]) -> Future[None]:
    """On a daemon: one that hangs in the kernel does not keep the process from exiting."""
    ended = Future[None]()

    def run() -> None:
        try:
            call()
        except Exception as error:
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, name="heterocache-sync", daemon=True).start()
    return ended
