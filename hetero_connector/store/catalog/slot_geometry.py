"""The cut of a tier's space into slots.

    slots of type a | slots of type b | ... | zone 0 | zone 1 | ... | the last zone, maybe shorter

First come `count` slots of every state type: that many are its own, whatever other types need. The
rest is cut into equal *zones*. A zone holds slots of one *bundle* of state types at a time, and
which one it is follows use: see `slots`. A bundle is what is always stored together, the
prefix-proportional types of a chunk, or else a single type. In a zone of a bundle the slots of each
of its types lie together, one type after the other.

So a slot's number, its place and its size never change. Slots are multiples of 4 KiB because
O_DIRECT needs that.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from hetero_connector.errors import ConfigError
from hetero_connector.spec.state_types import Family, StateType
from hetero_connector.units import GIB

SLOT_ALIGNMENT = 4096
_ZONE_BYTES = 32 << 20
"""Zones are that large where a bundle fits: hundreds of chunks move between types at once, and
neighbours in a chain are neighbours in the tier."""
_MIN_ZONES = 64
"""A small tier has so many zones, where a bundle fits: else a few of them would be all of it."""
_WASTE_STEP = 0.01

Bundle = tuple[StateType, ...]


@dataclass(frozen=True)
class SlotGeometry:
    """`count` slots of `stride_bytes[t]` for every state type t, then `zones_bytes` of zones."""

    count: int
    stride_bytes: Mapping[StateType, int]
    zone_bytes: int = 0
    """Bytes of each zone but the last. At least a slot of each type of any bundle fits."""
    zones_bytes: int = 0
    """Bytes of all zones; 0: there are none."""

    @classmethod
    def fit(cls, slot_bytes: Mapping[StateType, int], capacity_bytes: int) -> SlotGeometry:
        """Return as many equal-count slots as fit; `slot_bytes` are rounded up to 4 KiB."""
        strides = _strides(slot_bytes)
        return cls(max(0, capacity_bytes) // sum(strides.values()), strides)

    @classmethod
    def by_use(cls, slot_bytes: Mapping[StateType, int], capacity_bytes: int) -> SlotGeometry:
        """Return one slot of each type and zones for the rest; `count` is 0 if not even those fit.

        Where the capacities are large enough for zones of the same size, a slot is at the same
        place in all of them, but for the last zone of each.
        """
        strides = _strides(slot_bytes)
        sizes = [sum(strides[t] for t in bundle) for bundle in bundles_of(strides)]
        if capacity_bytes < sum(sizes):
            return cls(0, strides)
        room = _down(capacity_bytes - sum(sizes))
        zone = _zone_bytes(sizes, room)
        last = room % zone
        return cls(1, strides, zone, room if last >= min(sizes) else room - last)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one slot of each type."""
        return sum(self.stride_bytes.values())

    @property
    def size_bytes(self) -> int:
        """Bytes of all slots and zones."""
        return self.count * self.chunk_bytes + self.zones_bytes

    @property
    def num_chunks(self) -> int:
        """The number of chunks that fit if each has an artifact of every type, about."""
        return self.size_bytes // self.chunk_bytes

    @cached_property
    def region_offsets(self) -> dict[StateType, int]:
        """Return where the `count` slots of each type start."""
        offsets, at = {}, 0
        for kind, stride in self.stride_bytes.items():
            offsets[kind] = at
            at += self.count * stride
        return offsets

    @cached_property
    def bundles(self) -> tuple[Bundle, ...]:
        """Return the state types by what is stored together."""
        return bundles_of(self.stride_bytes)

    @cached_property
    def bundle_of(self) -> dict[StateType, int]:
        """Return the position in `bundles` of each type's."""
        return {t: at for at, bundle in enumerate(self.bundles) for t in bundle}

    def bundle_with(self, state_type: StateType) -> Bundle:
        """Return the bundle that a type is of."""
        return self.bundles[self.bundle_of[state_type]]

    @property
    def is_possible(self) -> bool:
        """Return False if it has no slots, or if a zone cannot hold one of each type of any bundle.

        To be asked of a cut that comes from outside.
        """
        strides, zones = self.stride_bytes.values(), (self.zone_bytes, self.zones_bytes)
        if self.count < 1 or min(strides, default=0) < 1 or min(zones) < 0:
            return False
        is_aligned = not any(n % SLOT_ALIGNMENT for n in (*strides, *zones))
        largest = max(self._bundle_bytes.values())
        return is_aligned and (not self.zones_bytes or self.zone_bytes >= largest)

    @cached_property
    def num_zones(self) -> int:
        """The number of zones, the last one included."""
        return -(-self.zones_bytes // self.zone_bytes) if self.zones_bytes else 0

    def slots_in_zone(self, state_type: StateType, zone: int) -> int:
        """Return how many slots of the type the zone has while it is its bundle's."""
        if zone < self.num_zones - 1:
            return self._per_zone[state_type]
        last = self.zones_bytes - zone * self.zone_bytes
        return last // self._bundle_bytes[state_type]

    def num_slots(self, state_type: StateType) -> int:
        """Return how many slots of the type there would be if all zones were its bundle's."""
        if not self.num_zones:
            return self.count
        last = self.num_zones - 1
        return self.first_slot(state_type, last) + self.slots_in_zone(state_type, last)

    def first_slot(self, state_type: StateType, zone: int) -> int:
        """Return the number of the type's first slot in a zone."""
        return self.count + zone * self._per_zone[state_type]

    def zone_of(self, state_type: StateType, slot: int) -> int:
        """Return the zone that a slot is in; -1 if it is none of a zone."""
        return -1 if slot < self.count else (slot - self.count) // self._per_zone[state_type]

    def offset(self, state_type: StateType, slot: int) -> int:
        """Return the byte at which a slot begins."""
        stride = self.stride_bytes[state_type]
        if slot < self.count:
            return self.region_offsets[state_type] + slot * stride
        zone, number = divmod(slot - self.count, self._per_zone[state_type])
        return self._begin(state_type, zone) + number * stride

    def num_slots_in(self, state_type: StateType, size_bytes: int) -> int:
        """Return how many slots of the type end within the first `size_bytes`: the first ones."""
        stride = self.stride_bytes[state_type]
        slots = range(self.num_slots(state_type))
        return bisect_right(slots, size_bytes, key=lambda n: self.offset(state_type, n) + stride)

    def common_bytes(self, other: SlotGeometry) -> int:
        """Return up to where all slots are at the same places in both."""
        if self == other:
            return self.size_bytes
        if replace(self, zones_bytes=0) != replace(other, zones_bytes=0) or not self.zone_bytes:
            return 0
        whole = min(self.zones_bytes, other.zones_bytes) // self.zone_bytes
        return self.count * self.chunk_bytes + whole * self.zone_bytes

    def slot_at(self, state_type: StateType, offset: int) -> int | None:
        """Return the number of the type's slot that begins at that byte; None if none does."""
        stride, fixed_bytes = self.stride_bytes[state_type], self.count * self.chunk_bytes
        if 0 <= offset < fixed_bytes:
            slot, rest = divmod(offset - self.region_offsets[state_type], stride)
            return None if rest or not 0 <= slot < self.count else slot
        zone = (offset - fixed_bytes) // self.zone_bytes if self.zone_bytes else -1
        if not 0 <= zone < self.num_zones:
            return None
        number, rest = divmod(offset - self._begin(state_type, zone), stride)
        if rest or not 0 <= number < self.slots_in_zone(state_type, zone):
            return None
        return self.first_slot(state_type, zone) + number

    def _begin(self, state_type: StateType, zone: int) -> int:
        """Return the byte at which the type's slots of a zone begin."""
        before = self._bytes_before[state_type] * self.slots_in_zone(state_type, zone)
        return self.count * self.chunk_bytes + zone * self.zone_bytes + before

    @cached_property
    def _bundle_bytes(self) -> dict[StateType, int]:
        """Return the bytes of one slot of each type of a type's bundle."""
        sizes = [sum(self.stride_bytes[t] for t in bundle) for bundle in self.bundles]
        return {t: sizes[at] for t, at in self.bundle_of.items()}

    @cached_property
    def _per_zone(self) -> dict[StateType, int]:
        """Return how many slots of each type a whole zone has."""
        return {t: max(1, self.zone_bytes // n) for t, n in self._bundle_bytes.items()}

    @cached_property
    def _bytes_before(self) -> dict[StateType, int]:
        """Return the bytes of one slot of each type that comes before a type in its bundle."""
        return {
            t: sum(self.stride_bytes[x] for x in bundle[:at])
            for bundle in self.bundles
            for at, t in enumerate(bundle)
        }


def dram_geometry(slot_bytes: Mapping[StateType, int], dram_bytes: int) -> SlotGeometry:
    """The DRAM tier's slots. Raises ConfigError (`dram_gib`) if they do not hold one chunk.

    One bundle needs no zones: its types are used equally.
    """
    has_one_bundle = len(bundles_of(slot_bytes)) == 1
    cut = SlotGeometry.fit if has_one_bundle else SlotGeometry.by_use
    geometry = cut(slot_bytes, dram_bytes)
    if not geometry.count:
        needed = geometry.chunk_bytes
        raise ConfigError(
            "dram_gib",
            f"{dram_bytes} bytes do not hold one chunk; a chunk of this model needs {needed} "
            f"bytes ({needed / GIB:.3f} GiB): ask for more, or for a smaller chunk_tokens",
        )
    return geometry


def bundles_of(state_types: Iterable[StateType]) -> tuple[Bundle, ...]:
    """Return the state types by what is stored together: all of a chunk, else each alone."""
    types = tuple(state_types)
    prefix = tuple(t for t in types if t.family is Family.PREFIX)
    alone = tuple((t,) for t in types if t.family is Family.BOUNDARY)
    return (prefix, *alone) if prefix else alone


def padded(size_bytes: int) -> int:
    """Return the bytes to move for an artifact: whole 4 KiB blocks, as O_DIRECT asks."""
    return -(-size_bytes // SLOT_ALIGNMENT) * SLOT_ALIGNMENT


def _strides(slot_bytes: Mapping[StateType, int]) -> dict[StateType, int]:
    if not slot_bytes or min(slot_bytes.values()) <= 0:
        raise ValueError(f"every state type needs a positive slot size, got {dict(slot_bytes)}")
    return {t: padded(n) for t, n in slot_bytes.items()}


def _zone_bytes(sizes: Collection[int], room: int) -> int:
    """Return the size of zones that wastes little, whichever bundle of these sizes has one.

    The smallest of those that are equally good, from the least to twice that.
    """
    least = max(*sizes, _down(min(_ZONE_BYTES, room // _MIN_ZONES)))
    multiples = (k * n for n in sizes for k in range(-(-least // n), 2 * least // n + 1))

    def rank(zone: int) -> tuple[int, int]:
        waste = max(zone % n for n in sizes) / zone
        return int(waste / _WASTE_STEP), zone

    return min(multiples, key=rank)


def _down(size_bytes: int) -> int:
    return size_bytes // SLOT_ALIGNMENT * SLOT_ALIGNMENT
