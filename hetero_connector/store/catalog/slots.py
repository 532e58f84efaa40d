"""Slots of one tier: free, used, quarantined or retired; and the zones that follow use.

A zone belongs to one bundle of state types at a time, or to none. A bundle gets one when it needs a
slot and has no free one. A zone whose slots are all free belongs to none again, so space that one
type leaves is another type's. How it is cut: `slot_geometry`.

A slot that continues a chain is taken right after the slot before it where that can be: copies are
fastest between neighbours, and a chain that leaves the tier leaves whole zones.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry

_FREE, _USED, _QUARANTINED, _RETIRED, _ABSENT = range(5)
"""States of a slot. Absent: it is in a zone that another bundle or none has."""
_NONE = 255
"""The bundle of a zone that belongs to none."""
Generations = Callable[[StateType], memoryview]
"""The words that hold the generations of one type's slots."""


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
            t: _Region(geometry, t, None if generations is None else generations(t))
            for t in geometry.stride_bytes
        }
        self._bundles = bytearray([_NONE]) * geometry.num_zones
        """The bundle that has each zone."""
        self._former = bytearray(self._bundles)
        """The bundle that had each zone last."""
        self._taken = [0] * geometry.num_zones
        """The slots of each zone that are not free."""

    def take(self, state_type: StateType, after: SlotRef | None = None) -> SlotRef | None:
        """Take a free slot, with its next generation; None if there is none.

        `after`: the slot of what the artifact continues, if it is in this tier.
        """
        region = self._regions[state_type]
        near = -1 if after is None else after.slot
        slot = region.pop_free(near)
        if slot is None:
            zone = self._free_zone(state_type, near)
            if zone is None:
                return None
            self._give(zone, state_type)
            slot = region.pop_in_zone(self.geometry.first_slot(state_type, zone))
            assert slot is not None
        zone = self.geometry.zone_of(state_type, slot)
        if zone >= 0:
            self._taken[zone] += 1
        region.set_generation(slot, region.generations[slot] + 1)
        return SlotRef(self.tier, state_type, slot, region.generations[slot])

    def adopt(self, ref: SlotRef) -> bool:
        """Mark a slot known from a journal as used.

        False if it does not exist, or if it is taken: by itself, or its zone by another bundle.
        """
        region, slot = self._regions.get(ref.state_type), ref.slot
        if region is None or not 0 <= slot < len(region.state):
            return False
        zone = self.geometry.zone_of(ref.state_type, slot)
        if zone >= 0 and self._bundles[zone] == _NONE:
            self._give(zone, ref.state_type)
        if region.state[slot] != _FREE:
            return False
        region.adopt(slot, zone)
        if zone >= 0:
            self._taken[zone] += 1
        region.set_generation(slot, ref.generation)
        return True

    def release(self, ref: SlotRef) -> None:
        """Free a slot; while a transfer touches it, it is quarantined."""
        region = self._current(ref)
        if region.release(ref.slot, quarantined=ref.slot in region.transfers):
            self._on_freed(ref)

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
            if region.end_quarantine(ref.slot):
                self._on_freed(ref)

    def offset(self, ref: SlotRef) -> int:
        """Byte offset in the arena, or in the slab file."""
        return self.geometry.offset(ref.state_type, ref.slot)

    def num_used(self, state_type: StateType) -> int:
        """Return the number of slots that hold an artifact or are reserved for one."""
        return self._regions[state_type].num_used

    def num_free(self, state_type: StateType) -> int:
        """Return the number of slots that `take` can still hand out, if it is asked for no other.

        Those of free zones count for every type.
        """
        region, geometry = self._regions[state_type], self.geometry
        free = region.num_free
        if geometry.num_zones:
            last = geometry.num_zones - 1
            free += self._bundles.count(_NONE, 0, last) * geometry.slots_in_zone(state_type, 0)
            if self._bundles[last] == _NONE:
                free += geometry.slots_in_zone(state_type, last)
        return free

    def num_quarantined(self, state_type: StateType) -> int:
        """Return the number of released slots that a transfer still touches."""
        return len(self._regions[state_type].quarantined)

    def check_integrity(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        for region in self._regions.values():
            region.check_integrity()
        taken = [0] * self.geometry.num_zones
        for kind, region in self._regions.items():
            bundle = self.geometry.bundle_of[kind]
            for zone, has in enumerate(self._bundles):
                slots = region.slots_of(zone)
                present = [slot for slot in slots if region.state[slot] != _ABSENT]
                assert len(present) == (len(slots) if has == bundle else 0), "a zone has two owners"
                assert has == _NONE or has == self._former[zone]
                taken[zone] += sum(region.state[slot] != _FREE for slot in present)
        assert taken == self._taken
        assert all((n > 0) == (has != _NONE) for n, has in zip(taken, self._bundles, strict=True))

    def _current(self, ref: SlotRef) -> _Region:
        region = self._regions[ref.state_type]
        assert ref.tier is self.tier, ref
        assert region.state[ref.slot] == _USED, f"{ref} is not in use"
        assert region.generations[ref.slot] == ref.generation, f"{ref} was reused"
        return region

    def _free_zone(self, state_type: StateType, near: int) -> int | None:
        """Return a free zone for the type: after the zone of slot `near`, or else from its end.

        The first bundle grows from the bottom and the others from the top, so that each has
        neighbouring zones.
        """
        geometry, zones = self.geometry, self._bundles
        after = geometry.zone_of(state_type, near) + 1 if near >= 0 else 0
        if after < len(zones) and zones[after] == _NONE:
            found = after
        elif geometry.bundle_of[state_type] == 0:
            found = zones.find(_NONE)
        else:
            found = zones.rfind(_NONE)
        if found >= 0 and not geometry.slots_in_zone(state_type, found):  # the last, a short one
            found = zones.rfind(_NONE, 0, found)
        return None if found < 0 else found

    def _give(self, zone: int, state_type: StateType) -> None:
        """Give a free zone to the bundle of a type.

        No slot that another bundle had there keeps its generation: whoever knows it by that must
        not take new bytes for the old ones.
        """
        bundle, former = self.geometry.bundle_of[state_type], self._former[zone]
        if former not in (_NONE, bundle):
            for kind in self.geometry.bundles[former]:
                self._regions[kind].outdate(zone)
        self._bundles[zone] = self._former[zone] = bundle
        for kind in self.geometry.bundles[bundle]:
            self._regions[kind].add_zone(zone)

    def _on_freed(self, ref: SlotRef) -> None:
        """Take the zone of a slot that became free from its bundle, if it is empty now."""
        zone = self.geometry.zone_of(ref.state_type, ref.slot)
        if zone < 0:
            return
        self._taken[zone] -= 1
        if not self._taken[zone]:
            for kind in self.geometry.bundles[self._bundles[zone]]:
                self._regions[kind].remove_zone(zone)
            self._bundles[zone] = _NONE


class _Region:
    """Slots of one state type. A byte each says in which state it is."""

    def __init__(
        self, geometry: SlotGeometry, state_type: StateType, published: memoryview | None
    ) -> None:
        total = geometry.num_slots(state_type)
        self.state = bytearray(geometry.count) + bytes([_ABSENT]) * (total - geometry.count)
        self.num_used = 0
        self.num_free = geometry.count
        """Free slots of its own and of its bundle's zones."""
        self.released: list[int] = []
        """Free slots outside zones that were used before: the first of them to be used again."""
        self.fresh = 0
        """From here on none of them was ever handed out: a big tier costs nothing to open."""
        self.open: dict[int, None] = {}
        """Zones with a free slot; the one that got its last one most recently is last."""
        self.quarantined: set[int] = set()
        self.bad: set[int] = set()
        """Retired when they are released."""
        self.num_retired = 0
        self.transfers: dict[int, int] = {}
        self.generations = array("Q", bytes(8 * total))
        """64-bit words, grown before the slot's bytes may change."""
        self._published = published
        """The same for peers to read. Never read here: others can write it, too."""
        self._geometry = geometry
        self._type = state_type
        # A slot's zone is asked for several times in each save.
        self._count = geometry.count
        self._per_zone = geometry.first_slot(state_type, 1) - geometry.first_slot(state_type, 0)
        """Slots in a whole zone; the last zone may have fewer, and then `state` ends before."""

    def set_generation(self, slot: int, generation: int) -> None:
        self.generations[slot] = generation
        if self._published is not None:
            self._published[slot] = generation

    def pop_free(self, near: int) -> int | None:
        """Take a free slot, the best one after slot `near` (-1: none); None if there is none."""
        if not self.num_free:
            return None
        if self.open:
            latest = self._count + next(reversed(self.open)) * self._per_zone
            for place in (latest,) if near < 0 else (near + 1, near, latest):
                if (slot := self.pop_in_zone(place)) is not None:
                    return slot
        if self.released:
            slot = self.released.pop()
        else:
            slot = self.state.find(_FREE, self.fresh, self._count)
            self.fresh = slot + 1
        self._use(slot)
        return slot

    def pop_in_zone(self, place: int) -> int | None:
        """Take a free slot of the zone of slot `place`: that one, or one after it if it can be."""
        zone = self._zone_of(place)
        if zone not in self.open:
            return None
        first = self._count + zone * self._per_zone
        slot = self.state.find(_FREE, place, first + self._per_zone)
        if slot < 0:
            slot = self.state.find(_FREE, first, place)
        self._use_in_zone(slot, zone)
        return slot

    def adopt(self, slot: int, zone: int) -> None:
        if zone >= 0:
            self._use_in_zone(slot, zone)
            return
        if slot in self.released:
            self.released.remove(slot)
        self._use(slot)

    def release(self, slot: int, *, quarantined: bool) -> bool:
        """Return whether the slot is free now."""
        self.num_used -= 1
        if quarantined:
            self.state[slot] = _QUARANTINED
            self.quarantined.add(slot)
            return False
        return self._free(slot)

    def end_quarantine(self, slot: int) -> bool:
        """Return whether the slot was in quarantine and is free now."""
        if slot not in self.quarantined:
            return False
        self.quarantined.remove(slot)
        return self._free(slot)

    def slots_of(self, zone: int) -> range:
        """Return the numbers of the type's slots in a zone."""
        first = self._geometry.first_slot(self._type, zone)
        return range(first, first + self._geometry.slots_in_zone(self._type, zone))

    def add_zone(self, zone: int) -> None:
        """Make the slots of a zone free ones of this type."""
        self._set_zone(zone, _FREE)
        self.open[zone] = None

    def remove_zone(self, zone: int) -> None:
        """Have no slots in the zone any more; all of them are free."""
        self._set_zone(zone, _ABSENT)
        del self.open[zone]

    def outdate(self, zone: int) -> None:
        """Give every slot of a zone that ever had an artifact its next generation."""
        for slot in self.slots_of(zone):
            if self.generations[slot]:
                self.set_generation(slot, self.generations[slot] + 1)

    def _set_zone(self, zone: int, state: int) -> None:
        slots = self.slots_of(zone)
        self.state[slots.start : slots.stop] = bytes([state]) * len(slots)
        self.num_free += len(slots) if state == _FREE else -len(slots)

    def _zone_of(self, slot: int) -> int:
        return -1 if slot < self._count else (slot - self._count) // self._per_zone

    def _use_in_zone(self, slot: int, zone: int) -> None:
        self._use(slot)
        first = self._count + zone * self._per_zone
        if self.state.find(_FREE, first, first + self._per_zone) < 0:
            del self.open[zone]

    def _use(self, slot: int) -> None:
        self.state[slot] = _USED
        self.num_used += 1
        self.num_free -= 1

    def _free(self, slot: int) -> bool:
        """Make a slot free, or retire it; return whether it is free."""
        if slot in self.bad:
            self.state[slot] = _RETIRED
            self.num_retired += 1
            return False
        self.state[slot] = _FREE
        self.num_free += 1
        zone = self._zone_of(slot)
        if zone < 0:
            self.released.append(slot)
        else:
            self.open.pop(zone, None)
            self.open[zone] = None
        return True

    def check_integrity(self) -> None:
        count = self._geometry.count
        used, quarantined = self.state.count(_USED), self.state.count(_QUARANTINED)
        assert (used, quarantined) == (self.num_used, len(self.quarantined))
        assert self.state.count(_FREE) == self.num_free
        assert self.state.count(_RETIRED) == self.num_retired <= len(self.bad)
        assert len(self.released) == len(set(self.released)), "a slot is free twice"
        assert all(self.state[slot] == _FREE for slot in self.released)
        below = {slot for slot, x in enumerate(self.state[: min(self.fresh, count)]) if x == _FREE}
        assert below <= set(self.released), "a slot was lost"
        free = (slot for slot in range(count, len(self.state)) if self.state[slot] == _FREE)
        assert {self._geometry.zone_of(self._type, slot) for slot in free} == set(self.open)
        assert all(self.state[slot] == _QUARANTINED for slot in self.quarantined)
        assert self.quarantined <= set(self.transfers)
        assert all(self.state[slot] != _FREE for slot in self.transfers)
        assert all(n > 0 for n in self.transfers.values())
