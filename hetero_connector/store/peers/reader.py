"""Bringing artifacts from the DRAM of peers to ours. Runs on the I/O thread.

A read is one-sided: the bytes, the generation of their slot and the serving word of their owner
come in one transfer, and the owner knows nothing of it. What arrived counts only if

- the bytes have the checksum of the record, which is seeded with the artifact's id: whatever
  the slot held while it was read, a wrong byte is never accepted;
- the generation is the record's: else the slot holds something else by now;
- the serving word is that of the record's epoch and of the resets that we have seen, and the
  directory's fence still admits the epoch: else the owner has stopped serving, was taken over, or
  one of us was reset.

All else is a miss. A peer that does not answer by the deadline, or whose answers fail, is left
alone for a while; slots that a late read may still fill stay in quarantine until it has ended.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.errors import PeerError
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.jobs import Load
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.peers.card import PeerCard
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.slot_table import (
    SERVING_OFFSET,
    WORD_BYTES,
    generation_offset,
    serving_word,
)
from hetero_connector.store.ssd.reader import padded
from hetero_connector.transfer.base import Transfer, TransferState
from hetero_connector.transfer.checksum import checksum
from hetero_connector.transfer.peer_base import PeerExtent

logger = logging.getLogger("vllm.heterocache")

ARENA, TABLE = 0, 1
"""Regions that every engine exports."""
_BATCH_BYTES = 4 << 20
_IN_FLIGHT_BYTES = 64 << 20
_AVOID_S = 1.0
"""How long a peer that failed is left alone."""
_TEND_S = 1.0


@dataclass(frozen=True)
class _Read:
    load: Load
    copy: PeerCopy
    target: SlotRef


@dataclass(frozen=True)
class _Batch:
    holder: int
    transfer: Transfer
    reads: list[_Read]
    started_s: float

    @property
    def size_bytes(self) -> int:
        return sum(read.copy.size_bytes for read in self.reads)


class PeerReader:
    """Takes peer loads from the queue in order, reads them in batches, verifies, settles."""

    def __init__(
        self,
        state: StoreState,
        memory: npt.NDArray[np.uint8],
        port: PeerPort,
    ) -> None:
        self._state = state
        self._memory = memory
        self._table = port.table
        self._peers = port.peers
        self._port = port
        self._transfers = port.transfers
        self._published = port.transfers.metadata
        self._tend_at_s = 0.0
        self._active: list[_Batch] = []
        self._late: list[_Batch] = []
        self._cards: dict[int, tuple[bytes, PeerCard]] = {}
        """Peers that are connected, and the card that was used."""
        self._avoid_until_s: dict[int, float] = {}

    @property
    def active(self) -> bool:
        """Whether somebody waits for a transfer that has not ended."""
        return bool(self._active)

    def step(self) -> bool:
        """Start what fits, end what has ended; True if anything moved."""
        moved = False
        self._tend()
        while self._room() > 0 and (reads := self._take()):
            moved = True
            by_holder: defaultdict[int, list[_Read]] = defaultdict(list)
            for read in reads:
                by_holder[read.copy.holder].append(read)
            for holder, group in by_holder.items():
                self._start(holder, group)
        for batch in list(self._active):
            moved = self._poll(batch) or moved
        for batch in list(self._late):
            if batch.transfer.poll() is not TransferState.PENDING:
                self._late.remove(batch)
                self._settle_all(batch.reads, None)
                self._count_quarantined()
        return moved

    def forget_ended(self) -> None:
        """Disconnect peers whose lease has ended. Now and then."""
        for holder in [h for h in self._cards if self._peers.card(h) is None]:
            del self._cards[holder]
            self._transfers.disconnect(str(holder))
        now_s = self._state.clock()
        self._avoid_until_s = {h: t for h, t in self._avoid_until_s.items() if t > now_s}

    def close(self, timeout_s: float) -> bool:
        """False if a transfer may still write into the arena: it must then stay mapped."""
        return self._port.close(timeout_s)

    def _tend(self) -> None:
        """Once a second: what moves the bytes may have ended, or be back under another name."""
        now_s = self._state.clock()
        if now_s < self._tend_at_s:
            return
        self._tend_at_s = now_s + _TEND_S
        if self._transfers.maintain():
            self._state.recorder.add("heterocache_peer_process_exits")
        if self._transfers.metadata != self._published:
            self._published = self._transfers.metadata
            if self._port.card_changed is not None:
                self._port.card_changed()

    def _room(self) -> int:
        return _IN_FLIGHT_BYTES - sum(batch.size_bytes for batch in self._active)

    def _take(self) -> list[_Read]:
        """The next loads from the queue; what nobody waits for any more is settled here."""
        state, taken, size_bytes = self._state, [], 0
        with state.lock:
            while state.peer_loads and size_bytes < _BATCH_BYTES:
                load = state.peer_loads.popleft()
                assert load.copy is not None
                assert load.target is not None
                state.tiers.dram.hold(load.target)
                read = _Read(load, load.copy, load.target)
                if load.artifact.forgotten or not load.waiting:
                    self._settle(read, Failure.GONE)
                    continue
                size_bytes += load.artifact.size_bytes
                taken.append(read)
        return taken

    def _start(self, holder: int, reads: list[_Read]) -> None:
        """Post a batch; whatever cannot be read fails here."""
        card = None if self._avoided(holder) else self._connect(holder)
        if card is None:
            self._settle_all(reads, Failure.UNREACHABLE)
            return
        data: list[PeerExtent] = []
        words: list[PeerExtent] = []
        good: list[_Read] = []
        for read in reads:
            try:
                extents = self._extents(card, read)
            except PeerError as e:
                logger.warning("a record of a peer is refused: %s", e)
                self._settle_all([read], Failure.BAD_RECORD)
            else:
                good.append(read)
                data.append(extents[0])
                words.append(extents[1])
        if not good:
            return
        words.append(self._serving_extent(good[0]))
        try:
            transfer = self._transfers.submit(str(holder), data + words)
        except PeerError as e:  # its card promises more than its agent exports
            logger.warning("peer %d is not read: %s", holder, e)
            self._avoid(holder)
            self._settle_all(good, Failure.BAD_RECORD)
            return
        self._active.append(_Batch(holder, transfer, good, self._state.clock()))

    def _avoided(self, holder: int) -> bool:
        late = any(batch.holder == holder for batch in self._late)
        return late or self._state.clock() < self._avoid_until_s.get(holder, 0.0)

    def _avoid(self, holder: int) -> None:
        self._avoid_until_s[holder] = self._state.clock() + _AVOID_S

    def _connect(self, holder: int) -> PeerCard | None:
        data = self._peers.card(holder)
        if data is None:
            return None
        known = self._cards.get(holder)
        if known is not None and known[0] == data:
            return known[1]
        try:
            card = PeerCard.decode(data)
            self._transfers.connect(str(holder), card.agent)
        except PeerError as e:
            logger.warning("peer %d is not read: %s", holder, e)
            self._avoid(holder)
            return None
        self._cards[holder] = (data, card)
        return card

    def _extents(self, card: PeerCard, read: _Read) -> tuple[PeerExtent, PeerExtent]:
        """The bytes and their slot's generation; PeerError if the record makes no sense."""
        kind, copy = read.load.artifact.state_type, read.copy
        slot = card.slot_of(kind, copy)
        self._table.clear_landing(read.target)
        generation_at, _ = self._table.landing(read.target)
        at = self._state.tiers.dram.offset(read.target)
        # Whole blocks: artifacts in neighbouring slots are one run then.
        size = min(padded(copy.size_bytes), card.geometry.stride_bytes[kind])
        return (
            PeerExtent(ARENA, copy.dram_offset, ARENA, at, size),
            PeerExtent(
                TABLE,
                generation_offset(card.geometry, kind, slot),
                TABLE,
                generation_at,
                WORD_BYTES,
            ),
        )

    def _serving_extent(self, read: _Read) -> PeerExtent:
        """The peer's serving word: one read of a batch brings it for all."""
        _, serving_at = self._table.landing(read.target)
        return PeerExtent(TABLE, SERVING_OFFSET, TABLE, serving_at, WORD_BYTES)

    def _poll(self, batch: _Batch) -> bool:
        state = self._state
        if batch.transfer.poll() is TransferState.PENDING:
            if state.clock() - batch.started_s < state.config.peer_deadline_s:
                return False
            self._active.remove(batch)
            self._late.append(batch)
            self._give_up(batch)
            return True
        self._active.remove(batch)
        if batch.transfer.error is not None:
            logger.warning("peer %d cannot be read: %s", batch.holder, batch.transfer.error)
            self._avoid(batch.holder)
            self._settle_all(batch.reads, Failure.IO_ERROR)
            return True
        seconds = state.clock() - batch.started_s
        state.recorder.observe("heterocache_peer_read_seconds", seconds)
        _, serving = self._table.landed(batch.reads[0].target)
        for read in batch.reads:
            self._settle_all([read], self._verify(read, serving))
        return True

    def _give_up(self, batch: _Batch) -> None:
        """At the deadline: nobody waits any more, but the slots are not free yet."""
        state = self._state
        logger.warning("peer %d did not answer in time; it is left alone", batch.holder)
        with state.lock:
            for read in batch.reads:
                artifact = read.load.artifact
                state.disown(read.load, Failure.DEADLINE)
                state.fail(Failure.DEADLINE, Tier.PEER)
                if not artifact.forgotten:
                    # Else a save of the same chunk would wait for these bytes.
                    state.tiers.forget(artifact)

        self._count_quarantined()

    def _count_quarantined(self) -> None:
        self._state.recorder.set(
            "heterocache_peer_quarantined_bytes", sum(batch.size_bytes for batch in self._late)
        )

    def _verify(self, read: _Read, serving: int) -> Failure | None:
        artifact, copy = read.load.artifact, read.copy
        generation, _ = self._table.landed(read.target)
        expected = serving_word(copy.holder, self._state.generation.tag)
        if serving != expected or not self._peers.admits(artifact.id, copy):
            return Failure.FENCED
        if generation != copy.generation:
            return Failure.REUSED
        at = self._state.tiers.dram.offset(read.target)
        actual = checksum(self._memory[at : at + copy.size_bytes], artifact.id.seed)
        return None if actual == copy.checksum else Failure.CHECKSUM

    def _settle_all(self, reads: list[_Read], failure: Failure | None) -> None:
        with self._state.lock:
            for read in reads:
                self._settle(read, failure)

    def _settle(self, read: _Read, failure: Failure | None) -> None:
        """Needs the lock. The transfer has ended, or never began."""
        if self._state.settle_fetched(read.load, failure):
            self._state.replicas.add(read.load.artifact)
