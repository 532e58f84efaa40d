"""Taking over what a dead engine left on an SSD that this one can read too.

A restore that wants an artifact whose owner's lease has ended reads it from the owner's SSD
directory into a DRAM slot of its own, as from a peer. It counts if its checksum is the record's and
nobody was seen to take the artifact over meanwhile. Then it is like one that was just computed
here: claimed, under a new fencing token if we are the first, and written to our own SSD. The dead
engine's directory is only read (`orphans`).

Files may be slow or hang, so they are touched on a thread beside the I/O thread, batch by batch. A
batch may take as long as one of a peer; what it has read by then counts. It then stops after the
artifact that it is at, and slots that this may fill stay in quarantine until it has. A storage that
hangs keeps its own thread and slots; others are read meanwhile.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.errors import StoreInUseError
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.jobs import Load
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.peers.orphaned_storage import open_orphans
from hetero_connector.store.peers.ports import Peers

logger = logging.getLogger("vllm.heterocache")

_BATCH_BYTES = 4 << 20
_AVOID_S = 1.0
"""How long a directory that could not be read is left alone."""
_MAX_LATE = 8
"""Storages that may hang at once; while so many do nothing is adopted from others."""


@dataclass(frozen=True, eq=False)
class _Read:
    load: Load
    copy: PeerCopy
    target: SlotRef
    into: npt.NDArray[np.uint8]
    """The slot."""


@dataclass(eq=False)
class _Batch:
    storage: str
    reads: list[_Read]
    started_s: float
    settled: int = 0
    """How many reads, from the first, nobody has to look at any more. Of the I/O thread."""
    ended: list[Failure | None] = field(default_factory=list)
    """How the first reads ended. The files' thread appends."""
    rest: Failure = Failure.IO_ERROR
    """Why the others did not begin. Final once `done`."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    """No other read shall begin."""
    done: threading.Event = field(default_factory=threading.Event)
    """Nothing touches files or slots for it any more."""


class Adopter:
    """Takes loads of orphans from the queue, one batch at a time. Runs on the I/O thread."""

    def __init__(self, state: StoreState, memory: npt.NDArray[np.uint8], peers: Peers) -> None:
        self._state = state
        self._memory = memory
        self._peers = peers
        self._batch: _Batch | None = None
        self._late: dict[str, _Batch] = {}
        """Given up and not done, by storage."""
        self._avoid_until_s: dict[str, float] = {}

    @property
    def active(self) -> bool:
        """Whether somebody waits for a read that has not ended."""
        return self._batch is not None

    def step(self) -> bool:
        """Start what is queued, end what has ended; True if anything moved."""
        moved = False
        for batch in [batch for batch in self._late.values() if batch.done.is_set()]:
            self._settle_rest(batch, Failure.GONE)
            del self._late[batch.storage]
            moved = True
        if self._batch is None and self._state.orphan_loads:
            self._start(self._take())
            moved = True
        if self._batch is not None:
            moved = self._poll(self._batch) or moved
        return moved

    def close(self, timeout_s: float) -> bool:
        """False if a read may still write into the arena: it must then stay mapped."""
        batches = [*self._late.values(), *([self._batch] if self._batch else [])]
        for batch in batches:
            batch.cancelled.set()
        until_s = time.monotonic() + timeout_s
        waits = [batch.done.wait(max(0.0, until_s - time.monotonic())) for batch in batches]
        return all(waits)

    def _take(self) -> list[_Read]:
        """The next loads, of one storage; what nobody waits for any more is settled here."""
        state, taken, size_bytes = self._state, list[_Read](), 0
        with state.lock:
            while state.orphan_loads and size_bytes < _BATCH_BYTES:
                copy, target = state.orphan_loads.first.copy, state.orphan_loads.first.target
                assert copy is not None
                assert target is not None
                if taken and copy.storage != taken[0].copy.storage:
                    break
                load = state.orphan_loads.popleft()
                state.tiers.dram.hold(target)
                read = _Read(load, copy, target, self._slot(target))
                if load.artifact.forgotten or not load.waiting:
                    self._settle_one(read, Failure.GONE)
                    continue
                size_bytes += copy.size_bytes
                taken.append(read)
        return taken

    def _slot(self, target: SlotRef) -> npt.NDArray[np.uint8]:
        dram = self._state.tiers.dram
        at = dram.offset(target)
        return self._memory[at : at + dram.geometry.stride_bytes[target.state_type]]

    def _start(self, reads: list[_Read]) -> None:
        if not reads:
            return
        storage, now_s = reads[0].copy.storage, self._state.clock()
        is_avoided = now_s < self._avoid_until_s.get(storage, 0.0)
        root = self._state.config.adopt_from
        if root is None or is_avoided or storage in self._late or len(self._late) >= _MAX_LATE:
            self._settle(reads, [Failure.UNREACHABLE] * len(reads))
            return
        self._batch = _Batch(storage, reads, now_s)
        # A daemon: an interpreter that exits does not wait for a file system that hangs.
        threading.Thread(
            target=_read_all, args=(self._batch, root), name="heterocache-adopt", daemon=True
        ).start()

    def _poll(self, batch: _Batch) -> bool:
        done = batch.done.is_set()  # asked first: then nothing ends behind our back
        moved = self._settle_ended(batch)
        if done:
            self._batch = None
            if batch.settled < len(batch.reads):
                self._avoid(batch.storage)
                self._settle_rest(batch, batch.rest)
            return True
        if self._state.clock() - batch.started_s < self._state.config.peer_deadline_s:
            return moved
        self._give_up(batch)
        return True

    def _avoid(self, storage: str) -> None:
        now_s = self._state.clock()
        self._avoid_until_s = {s: t for s, t in self._avoid_until_s.items() if t > now_s}
        self._avoid_until_s[storage] = now_s + _AVOID_S

    def _give_up(self, batch: _Batch) -> None:
        """At the deadline: nobody waits any more, but the slots are not free yet."""
        batch.cancelled.set()
        self._batch = None
        self._late[batch.storage] = batch
        self._avoid(batch.storage)
        state = self._state
        logger.warning("%s was not read in time", batch.storage)
        with state.lock:
            for read in batch.reads[batch.settled :]:
                state.disown(read.load, Failure.DEADLINE)
                state.fail(Failure.DEADLINE, Tier.SSD)
                if not read.load.artifact.forgotten:
                    # Else a save of the same chunk would wait for these bytes.
                    state.tiers.forget(read.load.artifact)

    def _settle_ended(self, batch: _Batch) -> bool:
        """Whether any read has ended since the last look."""
        failures = batch.ended[batch.settled :]
        begin, batch.settled = batch.settled, batch.settled + len(failures)
        if failures:
            self._settle(batch.reads[begin : batch.settled], failures)
        return bool(failures)

    def _settle_rest(self, batch: _Batch, failure: Failure) -> None:
        reads = batch.reads[batch.settled :]
        self._settle(reads, [failure] * len(reads))

    def _settle(self, reads: Sequence[_Read], failures: Sequence[Failure | None]) -> None:
        with self._state.lock:
            for read, failure in zip(reads, failures, strict=True):
                artifact = read.load.artifact
                if failure is None and not self._peers.may_adopt(artifact.id, read.copy):
                    failure = Failure.FENCED
                self._settle_one(read, failure)

    def _settle_one(self, read: _Read, failure: Failure | None) -> None:
        """Needs the lock. The read has ended, or never began."""
        state, artifact = self._state, read.load.artifact
        if state.settle_fetched(read.load, failure):
            kind = artifact.state_type.value
            state.recorder.add("heterocache_adopted_bytes", artifact.size_bytes, state_type=kind)
            state.offer(artifact)


def _read_all(batch: _Batch, root: Path) -> None:
    """On the thread that touches files."""
    try:
        with open_orphans(Path(batch.storage), root, batch.cancelled.is_set) as directory:
            for read in batch.reads:
                if batch.cancelled.is_set():
                    break
                artifact, copy = read.load.artifact.id, read.copy
                failure = directory.read(artifact, copy.checksum, copy.size_bytes, read.into)
                batch.ended.append(failure)
    except StoreInUseError as e:
        logger.info("nothing is adopted: %s", e)
        batch.rest = Failure.UNREACHABLE
    except Exception as e:  # whatever there is to read may be anybody's work
        logger.warning("%s cannot be read: %s", batch.storage, e)
    finally:
        batch.done.set()
