"""Reading artifacts from our own SSD: a device of `BatchRunner`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from hetero_connector.containers import BoundedDict
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Load, Source
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.checksums import Checksums
from hetero_connector.store.ssd.health import ReadHealth
from hetero_connector.store.ssd.tier import SLAB, Ssd
from hetero_connector.transfer.base import Direction, Extent, Transfer, TransferState

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


class SsdReadBatch:
    """Reads from SSD that began together."""

    def __init__(self, device: SsdReads, loads: Sequence[Load], now_s: float) -> None:
        self.loads = loads
        self.size_bytes = sum(padded(load.size_bytes) for load in loads)
        self.deadline_s = now_s + device.deadline_s
        self.is_late = False
        """True once it was given up: an error then says nothing of the disk as it is now."""
        self._device = device
        self._began_s = now_s
        self._parts: list[tuple[Transfer, Sequence[Load]]] = [(device.submit(loads), loads)]

    @property
    def is_done(self) -> bool:
        """See `Batch.is_done`."""
        return not self._parts

    @property
    def unsettled(self) -> list[Load]:
        """Loads that have not ended."""
        return [load for _, loads in self._parts for load in loads]

    def poll(self) -> bool:
        """See `Batch.poll`. Loads of a transfer that failed are read again one by one."""
        ended = [p for p in self._parts if p[0].poll() is not TransferState.PENDING]
        for part in ended:
            self._parts.remove(part)
            transfer, loads = part
            is_retry = len(loads) < len(self.loads)
            self._device.on_end(self, transfer.error, self._began_s, is_retry=is_retry)
            if transfer.error is not None and len(loads) > 1 and not self.is_late:
                self._parts += ((self._device.submit([load]), [load]) for load in loads)
            else:
                for load in loads:
                    self._device.settle(load, transfer.error, believed=not self.is_late)
        return bool(ended)


class SsdReads:
    """Reads slots into DRAM and verifies them."""

    def __init__(
        self, catalog: Catalog, ssd: Ssd, checksums: Checksums, size_of: SizeOf | None
    ) -> None:
        """`size_of`: bytes of an artifact of a type over a chunk; None: rows are believed."""
        self.deadline_s = catalog.config.load_deadline_s
        self._catalog = catalog
        self._ssd = ssd
        self._checksums = checksums
        self._size_of = size_of
        self._health = ReadHealth(catalog)
        self._suspects = BoundedDict[Artifact, float](_MAX_SUSPECTS)
        """Artifacts that could not be read, and when."""

    def tend(self) -> bool:
        """See `Device.tend`. While nothing is read, what is queued fails."""
        self._health.probe()
        if not self._catalog.ssd_readable and self._catalog.loads.num_queued(Source.SSD):
            self._catalog.next_loads(Source.SSD, 0)
            return True
        return False

    def may_begin(self, active: Sequence[SsdReadBatch], late: Sequence[SsdReadBatch]) -> bool:
        """See `Device.may_begin`. Reads past their deadline do not count."""
        limit = _BATCH_BYTES if self._health.on_trial else _IN_FLIGHT_BYTES
        return self._catalog.ssd_readable and sum(b.size_bytes for b in active) < limit

    def begin(self) -> list[SsdReadBatch]:
        """See `Device.begin`."""
        loads = self._catalog.next_loads(Source.SSD, _BATCH_BYTES)
        return [self.batch(loads)] if loads else []

    def batch(self, loads: Sequence[Load]) -> SsdReadBatch:
        """Begin reads whose slots are protected already."""
        return SsdReadBatch(self, loads, self._catalog.clock())

    def give_up(self, batch: SsdReadBatch) -> None:
        """See `Device.give_up`."""
        batch.is_late = True
        if not self._catalog.late_bytes:
            logger.warning(
                "SSD tier: a read has not ended after %g s; %d bytes of DRAM are kept back until "
                "it has",
                self.deadline_s,
                batch.size_bytes,
            )
        for load in batch.unsettled:
            self._catalog.give_up_load(load)
        self._health.add_late(batch.size_bytes)
        self._health.on_failure(f"it has not ended after {self.deadline_s:g} s")

    def on_late_end(self, batch: SsdReadBatch) -> None:
        """See `Device.on_late_end`."""
        self._health.add_late(-batch.size_bytes)

    def submit(self, loads: Sequence[Load]) -> Transfer:
        """Begin the transfer of some loads."""
        return self._ssd.transfer.submit(Direction.READ, [self._extent(load) for load in loads])

    def on_end(
        self, batch: SsdReadBatch, error: Exception | None, began_s: float, *, is_retry: bool
    ) -> None:
        """Learn from a transfer that has ended."""
        if batch.is_late:
            return
        if error is None:
            self._health.on_success()
            if not is_retry:
                self._catalog.on_ssd_read(batch.size_bytes, began_s)
        elif not is_retry:
            self._health.on_failure(str(error))

    def settle(self, load: Load, error: Exception | None, *, believed: bool) -> None:
        """Verify what arrived, and end the load.

        `believed`: a second error of the artifact means that its slot is bad.
        """
        assert load.target is not None
        artifact, failure = load.artifact, None
        if error is not None:
            failure = Failure.IO_ERROR
        elif not self._has_its_size(artifact):
            failure = Failure.BAD_RECORD
        elif not self._checksums.is_intact(artifact, self._catalog.tiers.dram.offset(load.target)):
            failure = Failure.CHECKSUM
        is_lost = failure is not None
        if failure is Failure.IO_ERROR:
            is_lost = believed and self._note_failure(artifact)
        if failure is None or is_lost:
            self._suspects.pop(artifact, None)
        self._catalog.finish_load(load, failure, is_lost=is_lost)

    def _extent(self, load: Load) -> Extent:
        tiers = self._catalog.tiers
        assert load.origin is not None
        assert load.target is not None
        assert tiers.ssd is not None
        return Extent(
            SLAB,
            tiers.ssd.offset(load.origin),
            tiers.dram.offset(load.target),
            padded(load.size_bytes),
        )

    def _has_its_size(self, artifact: Artifact) -> bool:
        """Return whether the journal row had the size that such an artifact has.

        A checksum says nothing of bytes beyond the size that it was made for.
        """
        chunk = artifact.node.chunk
        if self._size_of is None:
            return True
        return artifact.size_bytes == self._size_of(artifact.state_type, chunk.start, chunk.end)

    def _note_failure(self, artifact: Artifact) -> bool:
        """Note that it could not be read; return whether it could not a while ago either."""
        now_s = self._catalog.clock()
        return now_s - self._suspects.setdefault(artifact, now_s) >= _AGAIN_S
