"""Taking over what a dead engine left on an SSD that this one can read too.

A restore that wants an artifact whose owner's lease has ended reads it from the owner's SSD
directory into a DRAM slot of its own, as from a peer. It counts if its checksum is the record's and
nobody was seen to take the artifact over meanwhile. Then it is like one that was just computed
here: claimed, under a new fencing token if we are the first, and written to our own SSD. The dead
engine's directory is only read (`orphans`).

Files may be slow or hang, so they are touched on a thread beside the I/O thread. A restore waits
for it as long as for a peer; slots that a late read may fill stay in quarantine until it has ended.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.peer_copy import PeerCopy
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.errors import StoreError, StoreInUseError
from hetero_connector.store.base import Failure
from hetero_connector.store.orphans import open_orphans
from hetero_connector.store.peers import Peers
from hetero_connector.store.state import Load, StoreState

logger = logging.getLogger("vllm.heterocache")

_AVOID_S = 1.0
"""How long a directory that could not be read is left alone."""


@dataclass(frozen=True, eq=False)
class _Read:
    load: Load
    copy: PeerCopy
    target: SlotRef
    into: npt.NDArray[np.uint8]
    """The slot."""


@dataclass(frozen=True)
class _Batch:
    storage: str
    reads: list[_Read]
    answer: Future[list[Failure | None]]
    started_s: float


class Adopter:
    """Takes loads of orphans from the queue, one batch at a time. Runs on the I/O thread."""

    def __init__(self, state: StoreState, memory: npt.NDArray[np.uint8], peers: Peers) -> None:
        self._state = state
        self._memory = memory
        self._peers = peers
        self._files = ThreadPoolExecutor(1, thread_name_prefix="heterocache-adopt")
        self._batch: _Batch | None = None
        self._late: list[_Batch] = []
        self._avoid_until_s: dict[str, float] = {}

    @property
    def active(self) -> bool:
        """Whether somebody waits for a read that has not ended."""
        return self._batch is not None

    def step(self) -> bool:
        """Start what is queued, end what has ended; True if anything moved."""
        moved = False
        for late in [b for b in self._late if b.answer.done()]:
            self._late.remove(late)
            self._settle(late.reads, [Failure.GONE] * len(late.reads))
            moved = True
        if self._batch is None and self._state.orphan_loads:
            self._start(self._take())
            moved = True
        if self._batch is not None:
            moved = self._poll(self._batch) or moved
        return moved

    def close(self, timeout_s: float) -> bool:
        """False if a read may still write into the arena: it must then stay mapped."""
        self._files.shutdown(wait=False, cancel_futures=True)
        under_way = [*self._late, *([self._batch] if self._batch else [])]
        for batch in under_way:
            if not batch.answer.cancelled():
                try:
                    batch.answer.result(timeout_s)
                except TimeoutError:
                    return False
        return True

    def _take(self) -> list[_Read]:
        """All that is queued of one storage; what nobody waits for any more is settled here."""
        state, reads, others = self._state, list[_Read](), list[Load]()
        with state.lock:
            while state.orphan_loads:
                load = state.orphan_loads.popleft()
                copy, target = load.copy, load.target
                assert copy is not None
                assert target is not None
                if reads and copy.storage != reads[0].copy.storage:
                    others.append(load)
                    continue
                state.tiers.dram.hold(target)
                reads.append(_Read(load, copy, target, self._slot(target)))
            state.orphan_loads.extend(others)
        unwanted = [r for r in reads if r.load.artifact.forgotten or not r.load.waiting]
        self._settle(unwanted, [Failure.GONE] * len(unwanted))
        return [r for r in reads if r not in unwanted]

    def _slot(self, target: SlotRef) -> npt.NDArray[np.uint8]:
        dram = self._state.tiers.dram
        at = dram.offset(target)
        return self._memory[at : at + dram.geometry.stride_bytes[target.state_type]]

    def _start(self, reads: list[_Read]) -> None:
        if not reads:
            return
        storage, now_s = reads[0].copy.storage, self._state.clock()
        if self._late or now_s < self._avoid_until_s.get(storage, 0.0):
            self._settle(reads, [Failure.UNREACHABLE] * len(reads))
            return
        answer = self._files.submit(_read_all, storage, reads)
        self._batch = _Batch(storage, reads, answer, now_s)

    def _poll(self, batch: _Batch) -> bool:
        state = self._state
        if not batch.answer.done():
            if state.clock() - batch.started_s < state.config.peer_deadline_s:
                return False
            self._give_up(batch)
            return True
        self._batch = None
        failures = batch.answer.result()
        if all(failure in (Failure.UNREACHABLE, Failure.IO_ERROR) for failure in failures):
            self._avoid(batch.storage)
        self._settle(batch.reads, failures)
        return True

    def _avoid(self, storage: str) -> None:
        now_s = self._state.clock()
        self._avoid_until_s = {s: t for s, t in self._avoid_until_s.items() if t > now_s}
        self._avoid_until_s[storage] = now_s + _AVOID_S

    def _give_up(self, batch: _Batch) -> None:
        """At the deadline: nobody waits any more, but the slots are not free yet."""
        self._batch = None
        self._late.append(batch)
        self._avoid(batch.storage)
        state = self._state
        logger.warning("%s was not read in time", batch.storage)
        with state.lock:
            for read in batch.reads:
                state.disown(read.load, Failure.DEADLINE)
                state.fail(Failure.DEADLINE, Tier.PEER)
                if not read.load.artifact.forgotten:
                    # Else a save of the same chunk would wait for these bytes.
                    state.tiers.forget(read.load.artifact)

    def _settle(self, reads: Sequence[_Read], failures: Sequence[Failure | None]) -> None:
        with self._state.lock:
            for read, failure in zip(reads, failures, strict=True):
                artifact = read.load.artifact
                if failure is None and not self._peers.may_adopt(artifact.id, read.copy):
                    failure = Failure.FENCED
                self._settle_one(read, failure)

    def _settle_one(self, read: _Read, failure: Failure | None) -> None:
        """Needs the lock. The read has ended, or never began."""
        state, artifact, tiers = self._state, read.load.artifact, self._state.tiers
        tiers.dram.unhold(read.target)
        if artifact.forgotten:
            failure = failure or Failure.GONE
        if failure is None:
            artifact.checksum = read.copy.checksum
            artifact.last_used = tiers.tick()
            tiers.attach(artifact, read.target)
            tiers.index.seal(artifact)
            state.count_read(Tier.PEER, artifact.state_type, artifact.size_bytes)
            kind = artifact.state_type.value
            state.recorder.add("heterocache_adopted_bytes", artifact.size_bytes, state_type=kind)
            state.offer(artifact)
        else:
            tiers.dram.give_back(read.target)
            if not artifact.forgotten:
                tiers.forget(artifact)
                if read.load.waiting:  # else whoever gave up waiting has counted it
                    state.fail(failure, Tier.PEER)
        if all(other.sealed for other in artifact.node.artifacts.values()):
            tiers.forget_remains(artifact.node)  # nothing more of the chunk is on its way
        state.settle(read.load, failure)


def _read_all(storage: str, reads: Sequence[_Read]) -> list[Failure | None]:
    """On the thread that touches files."""
    try:
        with open_orphans(Path(storage)) as directory:
            return [
                directory.read(
                    read.load.artifact.id, read.copy.checksum, read.copy.size_bytes, read.into
                )
                for read in reads
            ]
    except StoreInUseError as e:
        logger.info("nothing is adopted: %s", e)
        return [Failure.UNREACHABLE] * len(reads)
    except (StoreError, OSError, ValueError) as e:  # ValueError: no path at all
        logger.warning("%s cannot be read: %s", storage, e)
        return [Failure.IO_ERROR] * len(reads)
