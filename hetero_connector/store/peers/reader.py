"""Reading artifacts from the DRAM of peers: a device of `BatchRunner`.

A read is one-sided: the bytes, the generation of their slot and the serving word of their owner
come in one transfer, and the owner takes no part in it. What arrived counts only if

- the bytes have the checksum of the record, which is seeded with the artifact's id: whatever the
  slot held while it was read, a wrong byte is never accepted;
- the generation is the record's: else the slot holds something else by now;
- the serving word is that of the record's epoch and of the resets that we have seen, and the
  directory's fence still allows the epoch: else the owner has stopped serving, was taken over, or
  one of us was reset.

Everything else is a miss. A peer that does not answer by the deadline, or whose answers fail, is
not read from for a while. Slots that a late read may still fill stay in quarantine until it has
ended.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import SlotRef
from hetero_connector.errors import PeerError
from hetero_connector.metrics import Recorder
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Load, Source
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.peers.card import PeerCard
from hetero_connector.store.peers.ports import PeerPort
from hetero_connector.store.peers.slot_table import (
    SERVING_OFFSET,
    WORD_BYTES,
    generation_offset,
    serving_word,
)
from hetero_connector.transfer.base import Transfer, TransferState
from hetero_connector.transfer.checksum import checksum
from hetero_connector.transfer.peer_base import PeerExtent

logger = logging.getLogger("vllm.heterocache")

ARENA, TABLE = 0, 1
"""Regions that every engine exports."""
_BATCH_BYTES = 4 << 20
_IN_FLIGHT_BYTES = 64 << 20
_AVOID_S = 1.0
"""A peer that failed is not read from for so long."""
_TEND_S = 1.0


class PeerReadBatch:
    """Reads from one peer that began together."""

    def __init__(
        self, device: PeerReads, holder: int, loads: Sequence[Load], transfer: Transfer
    ) -> None:
        self.holder = holder
        self.loads = loads
        self.size_bytes = sum(load.size_bytes for load in loads)
        self.began_s = device.catalog.clock()
        self.deadline_s = self.began_s + device.catalog.config.peer_deadline_s
        self.is_late = False
        self.is_done = False
        self.transfer = transfer
        self._device = device

    def poll(self) -> bool:
        """See `Batch.poll`."""
        if self.transfer.poll() is TransferState.PENDING:
            return False
        self.is_done = True
        self._device.settle(self)
        return True


class PeerReads:
    """Reads peers' slots into ours and verifies them."""

    def __init__(
        self,
        catalog: Catalog,
        memory: npt.NDArray[np.uint8],
        port: PeerPort,
        recorder: Recorder,
    ) -> None:
        """`memory`: the arena, `[size_bytes] uint8`."""
        self.catalog = catalog
        self._memory = memory
        self._port = port
        self._recorder = recorder
        self._transfers = port.transfers
        self._published = port.transfers.metadata
        self._tend_at_s = 0.0
        self._cards: dict[int, tuple[bytes, PeerCard]] = {}
        """Connected peers, with the card that was used."""
        self._avoid_until_s: dict[int, float] = {}
        self._late: list[PeerReadBatch] = []

    def tend(self) -> bool:
        """See `Device.tend`. Once a second: the peer process may have ended, or be back."""
        now_s = self.catalog.clock()
        if now_s < self._tend_at_s:
            return False
        self._tend_at_s = now_s + _TEND_S
        if self._transfers.maintain():
            self._recorder.add("heterocache_peer_process_exits")
        if self._transfers.metadata != self._published:
            self._published = self._transfers.metadata
            if self._port.card_changed is not None:
                self._port.card_changed()
        return False

    def may_begin(self, active: Sequence[PeerReadBatch], late: Sequence[PeerReadBatch]) -> bool:
        """See `Device.may_begin`."""
        return sum(batch.size_bytes for batch in active) < _IN_FLIGHT_BYTES

    def begin(self) -> list[PeerReadBatch]:
        """See `Device.begin`. A batch for each peer; what cannot be read fails here."""
        loads = self.catalog.next_loads(Source.PEER, _BATCH_BYTES)
        by_holder: defaultdict[int, list[Load]] = defaultdict(list)
        for load in loads:
            by_holder[_copy(load).holder].append(load)
        batches = (self._start(holder, group) for holder, group in by_holder.items())
        return [batch for batch in batches if batch is not None]

    def give_up(self, batch: PeerReadBatch) -> None:
        """See `Device.give_up`."""
        logger.warning("peer %d did not answer in time; it is not read from", batch.holder)
        batch.is_late = True
        self._late.append(batch)
        for load in batch.loads:
            self.catalog.give_up_load(load)
        self._count_quarantined()

    def on_late_end(self, batch: PeerReadBatch) -> None:
        """See `Device.on_late_end`."""
        self._late.remove(batch)
        self._count_quarantined()

    def settle(self, batch: PeerReadBatch) -> None:
        """Verify what arrived, and end the batch's loads."""
        if batch.is_late:
            self._fail(batch.loads, Failure.GONE)
        elif batch.transfer.error is not None:
            logger.warning("peer %d cannot be read: %s", batch.holder, batch.transfer.error)
            self._avoid(batch.holder)
            self._fail(batch.loads, Failure.IO_ERROR)
        else:
            seconds = self.catalog.clock() - batch.began_s
            self._recorder.observe("heterocache_peer_read_seconds", seconds)
            _, serving = self._port.table.landed(_target(batch.loads[0]))
            for load in batch.loads:
                self.catalog.finish_load(load, self._verify(load, serving))

    def forget_ended(self) -> None:
        """Disconnect peers whose lease has ended. Call it now and then."""
        for holder in [h for h in self._cards if self._port.peers.card(h) is None]:
            del self._cards[holder]
            self._transfers.disconnect(str(holder))
        now_s = self.catalog.clock()
        self._avoid_until_s = {h: t for h, t in self._avoid_until_s.items() if t > now_s}

    def close(self, timeout_s: float) -> bool:
        """Close the port; False if a transfer may still write into the arena."""
        return self._port.close(timeout_s)

    def _start(self, holder: int, loads: Sequence[Load]) -> PeerReadBatch | None:
        """Begin to read from one peer; None if nothing of it can be."""
        card = None if self._is_avoided(holder) else self._connect(holder)
        if card is None:
            self._fail(loads, Failure.UNREACHABLE)
            return None
        data, words, good = list[PeerExtent](), list[PeerExtent](), list[Load]()
        for load in loads:
            try:
                extents = self._extents(card, load)
            except PeerError as e:
                logger.warning("a record of a peer is refused: %s", e)
                self._fail([load], Failure.BAD_RECORD)
            else:
                good.append(load)
                data.append(extents[0])
                words.append(extents[1])
        if not good:
            return None
        words.append(self._serving_extent(good[0]))
        try:
            transfer = self._transfers.submit(str(holder), data + words)
        except PeerError as e:  # its card promises more than its agent exports
            logger.warning("peer %d is not read: %s", holder, e)
            self._avoid(holder)
            self._fail(good, Failure.BAD_RECORD)
            return None
        return PeerReadBatch(self, holder, good, transfer)

    def _is_avoided(self, holder: int) -> bool:
        is_late = any(batch.holder == holder for batch in self._late)
        return is_late or self.catalog.clock() < self._avoid_until_s.get(holder, 0.0)

    def _avoid(self, holder: int) -> None:
        self._avoid_until_s[holder] = self.catalog.clock() + _AVOID_S

    def _connect(self, holder: int) -> PeerCard | None:
        """Return the card of a peer that is connected; None if it cannot be."""
        data = self._port.peers.card(holder)
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

    def _extents(self, card: PeerCard, load: Load) -> tuple[PeerExtent, PeerExtent]:
        """Return the bytes and their slot's generation; PeerError if the record makes no sense."""
        kind, copy, target = load.artifact.state_type, _copy(load), _target(load)
        slot = card.slot_of(kind, copy)
        self._port.table.clear_landing(target)
        generation_at, _ = self._port.table.landing(target)
        at = self.catalog.tiers.dram.offset(target)
        # Whole blocks: artifacts in neighbouring slots are one run then.
        size = min(padded(copy.size_bytes), card.geometry.stride_bytes[kind])
        source_at = generation_offset(card.geometry, kind, slot)
        return (
            PeerExtent(ARENA, copy.dram_offset, ARENA, at, size),
            PeerExtent(TABLE, source_at, TABLE, generation_at, WORD_BYTES),
        )

    def _serving_extent(self, load: Load) -> PeerExtent:
        """Return the peer's serving word: one read of a batch brings it for all."""
        _, serving_at = self._port.table.landing(_target(load))
        return PeerExtent(TABLE, SERVING_OFFSET, TABLE, serving_at, WORD_BYTES)

    def _verify(self, load: Load, serving: int) -> Failure | None:
        artifact, copy, target = load.artifact, _copy(load), _target(load)
        generation, _ = self._port.table.landed(target)
        expected = serving_word(copy.holder, self.catalog.generation.tag)
        if serving != expected or not self._port.peers.may_use(artifact.id, copy):
            return Failure.FENCED
        if generation != copy.generation:
            return Failure.REUSED
        at = self.catalog.tiers.dram.offset(target)
        actual = checksum(self._memory[at : at + copy.size_bytes], artifact.id.seed)
        return None if actual == copy.checksum else Failure.CHECKSUM

    def _fail(self, loads: Sequence[Load], failure: Failure) -> None:
        for load in loads:
            self.catalog.finish_load(load, failure)

    def _count_quarantined(self) -> None:
        self._recorder.set(
            "heterocache_peer_quarantined_bytes", sum(batch.size_bytes for batch in self._late)
        )


def _copy(load: Load) -> PeerCopy:
    assert load.copy is not None
    return load.copy


def _target(load: Load) -> SlotRef:
    assert load.target is not None
    return load.target
