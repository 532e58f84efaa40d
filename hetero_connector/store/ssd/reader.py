"""Bringing artifacts from SSD to DRAM, and verifying bytes. Runs on the I/O thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.jobs import Load
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.slots import SLOT_ALIGNMENT
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.ssd.read_health import ReadHealth
from hetero_connector.store.ssd.tier import Ssd
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState
from hetero_connector.transfer.checksum import checksum

logger = logging.getLogger("vllm.heterocache")

SizeOf = Callable[[StateType, int, int], int]
"""`size_of(type, start, end)`: bytes of an artifact over these tokens."""
_BATCH_BYTES = 4 << 20
"""One transfer: small enough that the first chunks are verified while later ones are read."""
_IN_FLIGHT_BYTES = 64 << 20
"""Over all reads; a device is saturated by 4-16 MiB, the rest hides the verification."""
_AGAIN_S = 1.0
"""An error is believed when a read fails once more so much later."""
_MAX_SUSPECTS = 1024


@dataclass(frozen=True)
class HeldRead:
    """A read whose slots stay as they are until it has ended."""

    load: Load
    source: SlotRef
    target: SlotRef
    extent: Extent


@dataclass(frozen=True)
class _Batch:
    transfer: Transfer
    reads: Sequence[HeldRead]
    started_s: float
    is_retry: bool = False
    """True if a batch failed that it was in: that has been counted."""

    @property
    def size_bytes(self) -> int:
        return sum(r.extent.size for r in self.reads)


class Reader:
    """Takes loads from the queue in order, reads them in batches, verifies and settles them."""

    def __init__(
        self,
        state: StoreState,
        memory: npt.NDArray[np.uint8],
        ssd: Ssd | None,
        size_of: SizeOf | None = None,
    ) -> None:
        """`size_of`: bytes of an artifact of a type over a chunk; None: rows are believed."""
        self._state = state
        self._size_of = size_of
        self._memory = memory
        self._ssd = ssd
        self._health = ReadHealth(state)
        self._active: list[_Batch] = []
        self._late: list[_Batch] = []
        """Given up: nobody waits, but the device may still write into their slots."""
        self._suspects: dict[Artifact, float] = {}
        """Artifacts that could not be read, and when."""

    @property
    def active(self) -> bool:
        """Return whether a transfer is under way that somebody may wait for."""
        return bool(self._active)

    def step(self) -> bool:
        """Start what fits, end what has ended; True if anything moved."""
        moved = False
        self._health.probe()
        while self._room() > 0 or not self._state.ssd_readable:
            reads, checks = self._take()
            if not (reads or checks):
                break
            moved = True
            if reads:
                self.begin(reads)
            for load in checks:
                self._settle_check(load)
        now_s = self._state.clock()
        for batch in list(self._active):
            if batch.transfer.poll() is not TransferState.PENDING:
                self._active.remove(batch)
                self._end(batch)
                moved = True
            elif now_s - batch.started_s >= self._state.config.load_deadline_s:
                self._active.remove(batch)
                self._give_up(batch)
                moved = True
        for batch in list(self._late):
            if batch.transfer.poll() is not TransferState.PENDING:
                self._late.remove(batch)
                self._health.late(-batch.size_bytes)
                self._end_late(batch)
                moved = True
        return moved

    def check_sample(self) -> bool:
        """Check something that was served from DRAM; whether there was anything."""
        state = self._state
        with state.lock:
            artifact = state.samples.take()
            if artifact is None:
                return False
            if artifact.forgotten or artifact.dram is None or artifact.checksum is None:
                return True
            artifact.pins += 1
        intact = self._intact(artifact, artifact.dram_offset)
        with state.lock:
            if not intact:
                self._lose_from_dram(artifact)
            state.tiers.unpin(artifact)
        return True

    def begin(self, reads: Sequence[HeldRead], *, is_retry: bool = False) -> None:
        """Start reads."""
        assert self._ssd is not None
        transfer = self._ssd.transfer.submit(Direction.READ, [r.extent for r in reads])
        self._active.append(_Batch(transfer, reads, self._state.clock(), is_retry))

    def hold(self, load: Load) -> HeldRead:
        """Keep both slots of a read as they are until it has ended; needs the lock.

        From then on the artifact is not asked where it lies: it may be forgotten meanwhile.
        """
        tiers, artifact = self._state.tiers, load.artifact
        source, target = artifact.ssd, load.target
        assert self._ssd is not None
        assert target is not None
        assert source is not None
        assert tiers.ssd is not None
        tiers.dram.hold(target)
        tiers.ssd.hold(source)
        extent = Extent(
            self._ssd.file_of(artifact.state_type),
            tiers.ssd.slab_offset(source),
            tiers.dram.offset(target),
            padded(artifact.size_bytes),
        )
        return HeldRead(load, source, target, extent)

    def _room(self) -> int:
        """Bytes that may be started. A read past the load deadline no longer counts."""
        if not self._state.ssd_readable:
            return 0
        limit = _BATCH_BYTES if self._health.on_trial else _IN_FLIGHT_BYTES
        return limit - sum(batch.size_bytes for batch in self._active)

    def _take(self) -> tuple[list[HeldRead], list[Load]]:
        """The next batch from the queue: reads, and what lies in DRAM and is to be checked.

        What nobody waits for any more is settled here.
        """
        state, size_bytes = self._state, 0
        reads, checks = list[HeldRead](), list[Load]()
        with state.lock:
            while state.loads and size_bytes < _BATCH_BYTES:
                load = state.loads.popleft()
                artifact, target = load.artifact, load.target
                unreadable = target is not None and not state.ssd_readable
                if unreadable or artifact.forgotten or not load.waiting:
                    if target is not None:
                        state.tiers.dram.give_back(target)
                    if unreadable:
                        state.fail(Failure.IO_ERROR, Tier.SSD, len(load.waiting))
                    state.settle(load, Failure.IO_ERROR if unreadable else Failure.GONE)
                    continue
                if target is not None:
                    reads.append(self.hold(load))
                else:
                    checks.append(load)
                size_bytes += artifact.size_bytes
        return reads, checks

    def _end(self, batch: _Batch) -> None:
        error = batch.transfer.error
        if error is None:
            seconds = self._state.clock() - batch.started_s
            self._state.recorder.observe("heterocache_ssd_read_seconds", seconds)
            self._health.succeeded()
            self._state.read_pace.ended(batch.size_bytes, batch.started_s, self._state.clock())
        elif not batch.is_retry:
            self._health.failed(str(error))
        if error is not None and len(batch.reads) > 1:
            # Which of them failed is not known: each one again, alone.
            for read in batch.reads:
                self.begin([read], is_retry=True)
            return
        self._settle_all(batch, believed=True)

    def _give_up(self, batch: _Batch) -> None:
        """At the deadline: nobody waits any more, but the slots are not free yet."""
        state, size_bytes = self._state, batch.size_bytes
        seconds = state.config.load_deadline_s
        if not self._late:
            logger.warning(
                "SSD tier: a read has not ended after %g s; %d bytes of DRAM are kept back until "
                "it has",
                seconds,
                size_bytes,
            )
        self._late.append(batch)
        with state.lock:
            for read in batch.reads:
                read.load.late = True
                if read.load.waiting:
                    state.fail(Failure.DEADLINE, Tier.SSD, len(read.load.waiting))
                state.disown(read.load, Failure.DEADLINE)
        self._health.late(size_bytes)
        self._health.failed(f"it has not ended after {seconds:g} s")

    def _end_late(self, batch: _Batch) -> None:
        """What it brought stays; an error says nothing of what the disk will do from now."""
        self._settle_all(batch, believed=False)

    def _settle_all(self, batch: _Batch, *, believed: bool) -> None:
        for read in batch.reads:
            artifact, failure = read.load.artifact, None
            if batch.transfer.error is not None:
                failure = Failure.IO_ERROR
            elif not self._has_its_size(artifact):
                failure = Failure.BAD_RECORD
            elif not self._intact(artifact, read.extent.memory_offset):
                failure = Failure.CHECKSUM
            is_lost = failure is not None
            if failure is Failure.IO_ERROR:
                is_lost = believed and self._failed_again(artifact)
            self._settle_read(read, failure, is_lost)

    def _has_its_size(self, artifact: Artifact) -> bool:
        """Return whether its journal row said as many bytes as such an artifact has.

        A checksum says nothing of bytes behind the size that it was made for.
        """
        chunk = artifact.node.chunk
        size_of = self._size_of
        if size_of is None:
            return True
        return artifact.size_bytes == size_of(artifact.state_type, chunk.start, chunk.end)

    def _failed_again(self, artifact: Artifact) -> bool:
        """Whether its bytes could not be read before: one error may be the disk's bad moment."""
        now_s = self._state.clock()
        if artifact not in self._suspects and len(self._suspects) >= _MAX_SUSPECTS:
            del self._suspects[next(iter(self._suspects))]
        return now_s - self._suspects.setdefault(artifact, now_s) >= _AGAIN_S

    def _settle_read(self, read: HeldRead, failure: Failure | None, is_lost: bool) -> None:
        """`is_lost`: whether the artifact cannot be had from its slot any more."""
        state, tiers, artifact = self._state, self._state.tiers, read.load.artifact
        assert tiers.ssd is not None
        if failure is None or is_lost:
            self._suspects.pop(artifact, None)
        with state.lock:
            tiers.dram.unhold(read.target)
            tiers.ssd.unhold(read.source)
            if failure is not None:
                state.fail(failure, Tier.SSD)
            elif artifact.forgotten:
                failure = Failure.GONE
            if failure is None:
                tiers.attach(artifact, read.target)
                state.count_read(Tier.SSD, artifact.state_type, artifact.size_bytes)
            else:
                tiers.dram.give_back(read.target)
                if is_lost and not artifact.forgotten:
                    if failure is Failure.IO_ERROR:
                        tiers.ssd.retire(read.source)
                    tiers.lose(artifact)
            state.settle(read.load, failure)

    def _settle_check(self, load: Load) -> None:
        """`verify="all"`: bytes that lie in DRAM. Not yet summed ones are summed and trusted."""
        state, artifact = self._state, load.artifact
        intact = self._intact(artifact, artifact.dram_offset)
        with state.lock:
            if intact:
                state.count_read(Tier.DRAM, artifact.state_type, artifact.size_bytes)
                state.settle(load, None if not artifact.forgotten else Failure.GONE)
                return
            self._lose_from_dram(artifact)
            state.settle(load, Failure.CHECKSUM)

    def _lose_from_dram(self, artifact: Artifact) -> None:
        """Its bytes in DRAM are wrong; needs the lock."""
        self._state.fail(Failure.CHECKSUM, Tier.DRAM)
        if not artifact.forgotten:
            # Not even an SSD copy is kept: it may have been written from these bytes.
            self._state.tiers.lose(artifact)

    def _intact(self, artifact: Artifact, offset: int) -> bool:
        actual = checksum(self._memory[offset : offset + artifact.size_bytes], artifact.id.seed)
        if artifact.checksum is None:
            artifact.checksum = actual
        return actual == artifact.checksum


def padded(size_bytes: int) -> int:
    """Bytes to move for an artifact: whole 4 KiB blocks, as O_DIRECT asks."""
    return -(-size_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
