"""Bringing artifacts from SSD to DRAM, and verifying bytes. Runs on the I/O thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.nodes import Artifact
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.store.base import Failure
from hetero_connector.store.slots import SLOT_ALIGNMENT
from hetero_connector.store.ssd import Ssd
from hetero_connector.store.state import Load, StoreState
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState
from hetero_connector.transfer.checksum import checksum

_BATCH_BYTES = 4 << 20
"""One transfer: small enough that the first chunks are verified while later ones are read."""
_IN_FLIGHT_BYTES = 64 << 20
"""Over all reads; a device is saturated by 4-16 MiB, the rest hides the verification."""


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

    @property
    def size_bytes(self) -> int:
        return sum(r.extent.size for r in self.reads)


class Reader:
    """Takes loads from the queue in order, reads them in batches, verifies and settles them."""

    def __init__(self, state: StoreState, memory: npt.NDArray[np.uint8], ssd: Ssd | None) -> None:
        self._state = state
        self._memory = memory
        self._ssd = ssd
        self._active: list[_Batch] = []

    @property
    def active(self) -> bool:
        """Whether a transfer has not ended."""
        return bool(self._active)

    def step(self) -> bool:
        """Start what fits, end what has ended; True if anything moved."""
        moved = False
        while self._room() > 0:
            reads, checks = self._take()
            if not (reads or checks):
                break
            moved = True
            if reads:
                self.begin(reads)
            for load in checks:
                self._settle_check(load)
        for batch in list(self._active):
            if batch.transfer.poll() is not TransferState.PENDING:
                self._active.remove(batch)
                self._end(batch)
                moved = True
        return moved

    def begin(self, reads: Sequence[HeldRead]) -> None:
        """Start reads."""
        assert self._ssd is not None
        transfer = self._ssd.transfer.submit(Direction.READ, [r.extent for r in reads])
        self._active.append(_Batch(transfer, reads, self._state.clock()))

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
        late_s = self._state.clock() - self._state.config.load_deadline_s
        fresh = (b.size_bytes for b in self._active if b.started_s > late_s)
        return _IN_FLIGHT_BYTES - sum(fresh)

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
                if artifact.forgotten or not load.waiting:
                    if target is not None:
                        state.tiers.dram.give_back(target)
                    state.settle(load, Failure.GONE)
                    continue
                if target is not None:
                    reads.append(self.hold(load))
                else:
                    checks.append(load)
                size_bytes += artifact.size_bytes
        return reads, checks

    def _end(self, batch: _Batch) -> None:
        failed = batch.transfer.error is not None
        if not failed:
            seconds = self._state.clock() - batch.started_s
            self._state.recorder.observe("heterocache_ssd_read_seconds", seconds)
        elif len(batch.reads) > 1:
            # Which of them failed is not known: each one again, alone.
            for read in batch.reads:
                self.begin([read])
            return
        for read in batch.reads:
            if failed:
                failure: Failure | None = Failure.IO_ERROR
            else:
                intact = self._intact(read.load.artifact, read.extent.memory_offset)
                failure = None if intact else Failure.CHECKSUM
            self._settle_read(read, failure)

    def _settle_read(self, read: HeldRead, failure: Failure | None) -> None:
        state, tiers, artifact = self._state, self._state.tiers, read.load.artifact
        assert tiers.ssd is not None
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
                if not artifact.forgotten:
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
            state.fail(Failure.CHECKSUM, Tier.DRAM)
            if not artifact.forgotten:
                # Not even an SSD copy is kept: it may have been written from these bytes.
                state.tiers.lose(artifact)
            state.settle(load, Failure.CHECKSUM)

    def _intact(self, artifact: Artifact, offset: int) -> bool:
        actual = checksum(self._memory[offset : offset + artifact.size_bytes], artifact.id.seed)
        if artifact.checksum is None:
            artifact.checksum = actual
        return actual == artifact.checksum


def padded(size_bytes: int) -> int:
    """Bytes to move for an artifact: whole 4 KiB blocks, as O_DIRECT asks."""
    return -(-size_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT
