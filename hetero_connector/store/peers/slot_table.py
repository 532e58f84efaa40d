"""The slot table: the words that tell peers who serves the slots, and their generations.

    offset              bytes
    0                   8       `serving_word` of the epoch under which this engine serves, and of
                                the resets it has seen; 0: it does not serve
    64                  8 n     generation of each of the n slots, types in the geometry's order
    64 + 8 n            8 n     for our own reads, slot by slot: the peer's generation
    64 + 16 n           8 n     the same: the peer's serving word

Native little-endian 64-bit words. The memory is registered for peers like the arena; they
read the words one-sidedly with the bytes, so serving costs the owner nothing. A slot's
generation grows before the slot's bytes change, because taking the slot sets it. Whoever reaches
the port that serves them can write the words, too: only what a read landed is read back here.

The landing place of a read's words belongs to the slot the read fills, and so is in
quarantine as long as that slot.
"""

from __future__ import annotations

import hashlib
import os
import struct

from hetero_connector.artifacts.record import SlotRef
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.transfer.shared_memory import SharedMemory, create_shared

WORD_BYTES = 8
SERVING_OFFSET = 0
_GENERATIONS = 64


class SlotTable:
    """The words of one engine's slots. Written under the store's lock."""

    def __init__(self, geometry: SlotGeometry) -> None:
        self._geometry = geometry
        count = _num_slots(geometry)
        self._landing = _GENERATIONS + WORD_BYTES * count
        self._serving_landing = self._landing + WORD_BYTES * count
        self._closed = False
        self.shared: SharedMemory = create_shared("heterocache-slots", table_bytes(geometry))
        """All of it, to be registered for peers."""
        self._words = memoryview(self.shared.view.data).cast("Q")

    def serve_under(self, word: int) -> None:
        """Show the `serving_word` under which this engine serves; 0: it does not."""
        self._words[SERVING_OFFSET // WORD_BYTES] = word

    def close(self) -> None:
        """Close the descriptor; the words stay as long as anything has them. Idempotent."""
        if not self._closed:
            self._closed = True
            os.close(self.shared.fd)

    def generations(self, state_type: StateType) -> memoryview:
        """The words of one type's slots, where `SlotPool` publishes. Indexed by slot number."""
        first = (_GENERATIONS // WORD_BYTES) + _first(self._geometry, state_type)
        return self._words[first : first + self._geometry.num_slots(state_type)]

    def landing(self, ref: SlotRef) -> tuple[int, int]:
        """Byte offsets at which a read into `ref` lands the peer's generation and serving word."""
        at = WORD_BYTES * (_first(self._geometry, ref.state_type) + ref.slot)
        return self._landing + at, self._serving_landing + at

    def landed(self, ref: SlotRef) -> tuple[int, int]:
        """Return the peer's generation and serving word that a read into `ref` brought."""
        generation_at, serving_at = self.landing(ref)
        return self._words[generation_at // WORD_BYTES], self._words[serving_at // WORD_BYTES]

    def clear_landing(self, ref: SlotRef) -> None:
        """Before a read: nothing of an earlier one may pass for its answer."""
        for at in self.landing(ref):
            self._words[at // WORD_BYTES] = 0


def serving_word(epoch: int, generation: bytes) -> int:
    """Return the word that an engine of this epoch shows to peers with the same resets; never 0."""
    digest = hashlib.blake2b(struct.pack("<Q", epoch) + generation, digest_size=WORD_BYTES).digest()
    return int.from_bytes(digest, "little") or 1


def table_bytes(geometry: SlotGeometry) -> int:
    """Size of the table of a geometry."""
    return _GENERATIONS + 3 * WORD_BYTES * _num_slots(geometry)


def generation_offset(geometry: SlotGeometry, state_type: StateType, slot: int) -> int:
    """Byte offset of a slot's generation in the table of an engine with this geometry."""
    return _GENERATIONS + WORD_BYTES * (_first(geometry, state_type) + slot)


def _first(geometry: SlotGeometry, state_type: StateType) -> int:
    types = list(geometry.stride_bytes)
    return sum(map(geometry.num_slots, types[: types.index(state_type)]))


def _num_slots(geometry: SlotGeometry) -> int:
    return sum(map(geometry.num_slots, geometry.stride_bytes))
