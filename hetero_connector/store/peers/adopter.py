"""Adoption: reading what a dead engine left on an SSD that this one can read too.

A device of `BatchRunner`. A restore that wants an artifact whose owner's lease has ended reads it
from the owner's SSD directory into a DRAM slot of its own, as from a peer. It counts if its
checksum is the record's and no other engine was seen to take the artifact over meanwhile. Then it
is like one that was just computed here: claimed, under a new fencing token if we are the first,
and written to our own SSD. The dead engine's directory is only read (`orphaned_storage`).

Files may be slow or hang, so each batch has a thread of its own. A batch may take as long as one
of a peer; what it has read by then counts. It then stops after the artifact that it is at, whose
slot stays in quarantine until it has. A storage that hangs keeps its own thread and slots; others
are read meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.errors import StoreInUseError
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Load, Source
from hetero_connector.store.peers.orphaned_storage import open_orphans
from hetero_connector.store.peers.ports import Peers

logger = logging.getLogger("vllm.heterocache")

_BATCH_BYTES = 4 << 20
_AVOID_S = 1.0
"""A directory that could not be read is not read for so long."""
_MAX_LATE = 8
"""Storages that may hang at once; while so many do, nothing is adopted from others."""


class AdoptionBatch:
    """Reads of one storage, on a thread of their own."""

    def __init__(
        self, device: Adoption, storage: str, loads: Sequence[Load], root: Path, now_s: float
    ) -> None:
        """`root`: nothing outside of this folder is read."""
        self.storage = storage
        self.deadline_s = now_s + device.catalog.config.peer_deadline_s
        self.is_late = False
        self.cancelled = threading.Event()
        """No further read begins."""
        self.ended = threading.Event()
        """The thread touches no files and no slots any more."""
        self._device = device
        self._loads = loads
        self._slots = [device.slot(load) for load in loads]
        self._root = root
        self._num_settled = 0
        self._results: list[Failure | None] = []
        """The outcomes of the first reads; None for success. Appended by the thread."""
        self._rest = Failure.IO_ERROR
        """Why the others did not begin. Final once `ended`."""

    def start(self) -> None:
        """Start the thread: a daemon, so that a file system that hangs does not keep us alive."""
        threading.Thread(target=self._read, name="heterocache-adopt", daemon=True).start()

    @property
    def is_done(self) -> bool:
        """See `Batch.is_done`."""
        return self.ended.is_set() and self._num_settled == len(self._loads)

    @property
    def unsettled(self) -> Sequence[Load]:
        """Loads that have not ended."""
        return self._loads[self._num_settled :]

    def poll(self) -> bool:
        """See `Batch.poll`."""
        has_ended = self.ended.is_set()  # looked at first: all results are there then
        results = [] if self.is_late else self._results[self._num_settled :]
        if has_ended:
            missing = len(self._loads) - self._num_settled - len(results)
            if missing and not self.is_late:
                self._device.avoid(self.storage)
            results += [Failure.GONE if self.is_late else self._rest] * missing
        for load, failure in zip(self.unsettled, results, strict=False):
            self._num_settled += 1
            self._device.settle(load, failure)
        return bool(results) or has_ended

    def _read(self) -> None:
        try:
            with open_orphans(Path(self.storage), self._root, self.cancelled.is_set) as directory:
                for load, slot in zip(self._loads, self._slots, strict=True):
                    if self.cancelled.is_set():
                        break
                    copy = load.copy
                    assert copy is not None
                    failure = directory.read(load.artifact.id, copy.checksum, copy.size_bytes, slot)
                    self._results.append(failure)
        except StoreInUseError as e:
            logger.info("nothing is adopted: %s", e)
            self._rest = Failure.UNREACHABLE
        except Exception as e:  # the files may hold anything
            logger.warning("%s cannot be read: %s", self.storage, e)
        finally:
            self.ended.set()


class Adoption:
    """Reads orphaned storage, one storage at a time."""

    def __init__(self, catalog: Catalog, memory: npt.NDArray[np.uint8], peers: Peers) -> None:
        """`memory`: the arena, `[size_bytes] uint8`."""
        self.catalog = catalog
        self._memory = memory
        self._peers = peers
        self._batches: dict[str, AdoptionBatch] = {}
        """Batches that are not done, by storage."""
        self._avoid_until_s: dict[str, float] = {}

    def tend(self) -> bool:
        """See `Device.tend`."""
        return False

    def may_begin(self, active: Sequence[AdoptionBatch], late: Sequence[AdoptionBatch]) -> bool:
        """See `Device.may_begin`."""
        return not active

    def begin(self) -> list[AdoptionBatch]:
        """See `Device.begin`."""
        loads = self.catalog.next_loads(Source.ORPHANED, _BATCH_BYTES)
        if not loads:
            return []
        assert loads[0].copy is not None
        storage, now_s = loads[0].copy.storage, self.catalog.clock()
        root = self.catalog.config.adopt_from
        self._batches = {s: b for s, b in self._batches.items() if not b.is_done}
        is_avoided = now_s < self._avoid_until_s.get(storage, 0.0)
        is_busy = storage in self._batches or len(self._batches) >= _MAX_LATE
        if root is None or is_avoided or is_busy:
            for load in loads:
                self.catalog.finish_load(load, Failure.UNREACHABLE)
            return []
        batch = self._batches[storage] = AdoptionBatch(self, storage, loads, root, now_s)
        batch.start()
        return [batch]

    def give_up(self, batch: AdoptionBatch) -> None:
        """See `Device.give_up`."""
        batch.cancelled.set()
        batch.is_late = True
        self.avoid(batch.storage)
        logger.warning("%s was not read in time", batch.storage)
        for load in batch.unsettled:
            self.catalog.give_up_load(load)

    def on_late_end(self, batch: AdoptionBatch) -> None:
        """See `Device.on_late_end`."""

    def settle(self, load: Load, failure: Failure | None) -> None:
        """End a load, unless another engine has taken the artifact over meanwhile."""
        assert load.copy is not None
        if failure is None and not self._peers.may_adopt(load.artifact.id, load.copy):
            failure = Failure.FENCED
        self.catalog.finish_load(load, failure)

    def avoid(self, storage: str) -> None:
        """Do not read a storage for a while."""
        now_s = self.catalog.clock()
        self._avoid_until_s = {s: t for s, t in self._avoid_until_s.items() if t > now_s}
        self._avoid_until_s[storage] = now_s + _AVOID_S

    def slot(self, load: Load) -> npt.NDArray[np.uint8]:
        """Return the memory of the load's slot."""
        assert load.target is not None
        dram = self.catalog.tiers.dram
        at = dram.offset(load.target)
        return self._memory[at : at + dram.geometry.stride_bytes[load.target.state_type]]

    def close(self, timeout_s: float) -> bool:
        """Cancel all reads; False if one may still write into the arena."""
        for batch in self._batches.values():
            batch.cancelled.set()
        until_s = time.monotonic() + timeout_s
        waits = [b.ended.wait(max(0.0, until_s - time.monotonic())) for b in self._batches.values()]
        return all(waits)
