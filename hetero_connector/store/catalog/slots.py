"""Fixed-size slots of one tier: free, used, quarantined or retired.

A tier is cut into one region per state type with the same number of slots in each, as
many as the capacity holds: a chunk needs one slot of each type, so equal counts run
out together. Slots are multiples of 4 KiB because O_DIRECT needs that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.errors import ConfigError
from hetero_connector.spec.state_types import StateType
from hetero_connector.units import GIB

SLOT_ALIGNMENT = 4096
_FREE, _USED, _QUARANTINED, _RETIRED = range(4)
Generations = Callable[[StateType], memoryview]
"""The words that hold the generations of one type's slots."""


@dataclass(frozen=True)
class SlotGeometry:
    """The cut of a capacity: `count` slots of `stride_bytes[t]` for every state type t."""

    count: int
    stride_bytes: Mapping[StateType, int]

    @classmethod
    def fit(cls, slot_bytes: Mapping[StateType, int], capacity_bytes: int) -> SlotGeometry:
        """Return as many equal-count slots as fit; `slot_bytes` are rounded up to 4 KiB."""
        if not slot_bytes or min(slot_bytes.values()) <= 0:
            raise ValueError(f"every state type needs a positive slot size, got {dict(slot_bytes)}")
        stride = {t: -(-n // SLOT_ALIGNMENT) * SLOT_ALIGNMENT for t, n in slot_bytes.items()}
        return cls(max(0, capacity_bytes) // sum(stride.values()), stride)

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots."""
        return self.count * sum(self.stride_bytes.values())

    @property
    def region_offsets(self) -> dict[StateType, int]:
        """Return where each type's region starts if the regions lie one after the other."""
        offsets, at = {}, 0
        for kind, stride in self.stride_bytes.items():
            offsets[kind] = at
            at += self.count * stride
        return offsets


def dram_geometry(slot_bytes: Mapping[StateType, int], dram_bytes: int) -> SlotGeometry:
    """The DRAM tier's slots. Raises ConfigError (`dram_gib`) if they do not hold one chunk."""
    geometry = SlotGeometry.fit(slot_bytes, dram_bytes)
    if not geometry.count:
        needed = sum(geometry.stride_bytes.values())
        raise ConfigError(
            "dram_gib",
            f"{dram_bytes} bytes do not hold one chunk; a chunk of this model needs {needed} "
            f"bytes ({needed / GIB:.3f} GiB): ask for more, or for a smaller chunk_tokens",
        )
    return geometry


def padded(size_bytes: int) -> int:
    """Return the bytes to move for an artifact: whole 4 KiB blocks, as O_DIRECT asks."""
    return -(-size_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


class SlotPool:
    """Free and used slots of one tier. A private part of `Catalog`, which holds the lock.

    A slot that is released while a transfer touches it is quarantined: it becomes free when the
    last transfer ends.
    """

    def __init__(
        self, tier: Tier, geometry: SlotGeometry, generations: Generations | None = None
    ) -> None:
        """`generations`: where the slots' generations are published; None: nowhere."""
        self.tier = tier
        self.geometry = geometry
        self._regions = {
            t: _Region(geometry.count, None if generations is None else generations(t))
            for t in geometry.stride_bytes
        }
        self._offsets = geometry.region_offsets

    def take(self, state_type: StateType) -> SlotRef | None:
        """Take a free slot, with its next generation; None if there is none."""
        region = self._regions[state_type]
        slot = region.pop_free()
        if slot is None:
            return None
        region.set_generation(slot, region.generations[slot] + 1)
        return SlotRef(self.tier, state_type, slot, region.generations[slot])

    def adopt(self, ref: SlotRef) -> bool:
        """Mark a slot known from a journal as used; False if it does not exist or is taken."""
        region = self._regions.get(ref.state_type)
        if region is None or not 0 <= ref.slot < self.geometry.count:
            return False
        if region.state[ref.slot] != _FREE:
            return False
        region.adopt(ref.slot)
        region.set_generation(ref.slot, ref.generation)
        return True

    def release(self, ref: SlotRef) -> None:
        """Free a slot; while a transfer touches it, it is quarantined."""
        region = self._current(ref)
        region.release(ref.slot, quarantined=ref.slot in region.transfers)

    def retire(self, ref: SlotRef) -> None:
        """Never use the slot again once it is released: its place on the device is bad."""
        self._current(ref)
        self._regions[ref.state_type].bad.add(ref.slot)

    def begin_transfer(self, ref: SlotRef) -> None:
        """Note that a transfer touches the slot from now."""
        region = self._current(ref)
        region.transfers[ref.slot] = region.transfers.get(ref.slot, 0) + 1

    def end_transfer(self, ref: SlotRef) -> None:
        """Note that a transfer does not touch the slot any more."""
        region = self._regions[ref.state_type]
        assert region.generations[ref.slot] == ref.generation, "a slot was reused during a transfer"
        region.transfers[ref.slot] -= 1
        if not region.transfers[ref.slot]:
            del region.transfers[ref.slot]
            region.end_quarantine(ref.slot)

    def offset(self, ref: SlotRef) -> int:
        """Byte offset in a tier whose regions lie one after the other (the arena)."""
        return self._offsets[ref.state_type] + self.slab_offset(ref)

    def slab_offset(self, ref: SlotRef) -> int:
        """Byte offset inside the region of its own type (a slab file)."""
        return ref.slot * self.geometry.stride_bytes[ref.state_type]

    def num_used(self, state_type: StateType) -> int:
        """Return the number of slots that hold an artifact or are reserved for one."""
        return self._regions[state_type].num_used

    def num_free(self, state_type: StateType) -> int:
        """Return the number of slots that `take` can still hand out."""
        region = self._regions[state_type]
        return self.geometry.count - region.num_used - len(region.quarantined) - region.num_retired

    def num_quarantined(self, state_type: StateType) -> int:
        """Return the number of released slots that a transfer still touches."""
        return len(self._regions[state_type].quarantined)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        for region in self._regions.values():
            region.check_integrity()

    def _current(self, ref: SlotRef) -> _Region:
        region = self._regions[ref.state_type]
        assert ref.tier is self.tier, ref
        assert region.state[ref.slot] == _USED, f"{ref} is not in use"
        assert region.generations[ref.slot] == ref.generation, f"{ref} was reused"
        return region


class _Region:
    """Slots of one state type: free, used, quarantined or retired. A byte each says which."""

    def __init__(self, count: int, published: memoryview | None) -> None:
        self.state = bytearray(count)
        self.num_used = 0
        self.released: list[int] = []
        """Free slots that were used before: the first to be used again."""
        self.fresh = 0
        """From here on no slot was ever handed out: a big tier costs nothing to open."""
        self.quarantined: set[int] = set()
        self.bad: set[int] = set()
        """Retired when they are released."""
        self.num_retired = 0
        self.transfers: dict[int, int] = {}
        self.generations = array("Q", bytes(8 * count))
        """64-bit words, grown before the slot's bytes may change."""
        self._published = published
        """The same for peers to read. Never read here: others can write it, too."""

    def set_generation(self, slot: int, generation: int) -> None:
        self.generations[slot] = generation
        if self._published is not None:
            self._published[slot] = generation

    def pop_free(self) -> int | None:
        if self.released:
            slot = self.released.pop()
        else:
            slot = self.state.find(_FREE, self.fresh)
            self.fresh = len(self.state) if slot < 0 else slot + 1
            if slot < 0:
                return None
        self._use(slot)
        return slot

    def adopt(self, slot: int) -> None:
        if slot in self.released:
            self.released.remove(slot)
        self._use(slot)

    def release(self, slot: int, *, quarantined: bool) -> None:
        self.num_used -= 1
        if quarantined:
            self.state[slot] = _QUARANTINED
            self.quarantined.add(slot)
        else:
            self._free(slot)

    def end_quarantine(self, slot: int) -> None:
        if slot in self.quarantined:
            self.quarantined.remove(slot)
            self._free(slot)

    def _use(self, slot: int) -> None:
        self.state[slot] = _USED
        self.num_used += 1

    def _free(self, slot: int) -> None:
        if slot in self.bad:
            self.state[slot] = _RETIRED
            self.num_retired += 1
            return
        self.state[slot] = _FREE
        self.released.append(slot)

    def check_integrity(self) -> None:
        used, quarantined = self.state.count(_USED), self.state.count(_QUARANTINED)
        assert (used, quarantined) == (self.num_used, len(self.quarantined))
        assert self.state.count(_RETIRED) == self.num_retired <= len(self.bad)
        assert len(self.released) == len(set(self.released)), "a slot is free twice"
        assert all(self.state[slot] == _FREE for slot in self.released)
        below = {slot for slot, x in enumerate(self.state[: self.fresh]) if x == _FREE}
        assert below <= set(self.released), "a slot was lost"
        assert all(self.state[slot] == _QUARANTINED for slot in self.quarantined)
        assert self.quarantined <= set(self.transfers)
        assert all(self.state[slot] != _FREE for slot in self.transfers)
        assert all(n > 0 for n in self.transfers.values())
