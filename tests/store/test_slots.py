import itertools
from array import array
from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slot_geometry import SlotGeometry
from hetero_connector.store.catalog.slots import SlotPool

A, B, C = StateType.DENSE_KV, StateType.WINDOW_SWA, StateType.MLA_LATENT


def test_geometry_rounds_slots_up_and_gives_every_type_the_same_number() -> None:
    geometry = SlotGeometry.fit({A: 4097, B: 1}, 5 * (8192 + 4096) + 4095)
    assert geometry == SlotGeometry(5, {A: 8192, B: 4096})
    assert geometry.size_bytes == 5 * 12288
    assert geometry.region_offsets == {A: 0, B: 5 * 8192}


@pytest.mark.parametrize("sizes", [{}, {A: 0}, {A: 4096, B: -1}])
def test_geometry_refuses_sizes_that_hold_nothing(sizes: dict[StateType, int]) -> None:
    with pytest.raises(ValueError, match="positive slot size"):
        SlotGeometry.fit(sizes, 1 << 20)


def test_offsets_of_distinct_slots_never_overlap() -> None:
    pool = SlotPool(Tier.DRAM, SlotGeometry.fit({A: 5000, B: 4096}, 10 * 12288))
    spans = []
    for kind, size in ((A, 8192), (B, 4096)):
        while (ref := pool.take(kind)) is not None:
            spans.append((pool.offset(ref), pool.offset(ref) + size))
    spans.sort()
    assert len(spans) == 20
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert spans[-1][1] <= pool.geometry.size_bytes


def test_a_slot_under_a_transfer_is_not_reused_until_it_ends() -> None:
    pool = SlotPool(Tier.DRAM, SlotGeometry(1, {A: 4096}))
    ref = pool.take(A)
    assert ref is not None
    pool.begin_transfer(ref)
    pool.begin_transfer(ref)
    pool.release(ref)
    pool.end_transfer(ref)
    assert pool.take(A) is None
    assert pool.num_quarantined(A) == 1
    pool.end_transfer(ref)
    again = pool.take(A)
    assert again == SlotRef(Tier.DRAM, A, 0, ref.generation + 1)


def test_a_stale_reference_is_refused() -> None:
    pool = SlotPool(Tier.DRAM, SlotGeometry(1, {A: 4096}))
    old = pool.take(A)
    assert old is not None
    pool.release(old)
    pool.take(A)
    with pytest.raises(AssertionError):
        pool.release(old)
    with pytest.raises(AssertionError):
        pool.begin_transfer(old)


def test_adopted_slots_are_never_handed_out() -> None:
    pool = SlotPool(Tier.SSD, SlotGeometry(4, {A: 4096}))
    assert pool.adopt(SlotRef(Tier.SSD, A, 2, 7))
    assert not pool.adopt(SlotRef(Tier.SSD, A, 2, 8)), "already taken"
    assert not pool.adopt(SlotRef(Tier.SSD, A, 4, 1)), "beyond the end"
    assert not pool.adopt(SlotRef(Tier.SSD, B, 0, 1)), "no such type"
    taken = []
    while (ref := pool.take(A)) is not None:
        taken.append(ref.slot)
    assert sorted(taken) == [0, 1, 3]
    pool.release(SlotRef(Tier.SSD, A, 2, 7))
    assert pool.take(A) == SlotRef(Tier.SSD, A, 2, 8)
    pool.check_integrity()


class SlotMachine(RuleBasedStateMachine):
    """Against a model: a slot is handed out only if nobody uses or touches it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = SlotPool(Tier.DRAM, SlotGeometry(5, {A: 4096, B: 8192}))
        self.used: list[SlotRef] = []
        self.counts: list[SlotRef] = []
        self.last: dict[tuple[StateType, int], int] = {}

    def busy(self, kind: StateType) -> set[int]:
        return {r.slot for r in (*self.used, *self.counts) if r.state_type is kind}

    @rule(kind=st.sampled_from([A, B]))
    def take(self, kind: StateType) -> None:
        ref = self.pool.take(kind)
        if ref is None:
            assert len(self.busy(kind)) == 5
            return
        assert ref.slot not in self.busy(kind)
        assert ref.generation > self.last.get((kind, ref.slot), 0)
        self.last[kind, ref.slot] = ref.generation
        self.used.append(ref)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.used))
        self.used.remove(ref)
        self.pool.release(ref)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.used))
        self.counts.append(ref)
        self.pool.begin_transfer(ref)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.counts))
        self.counts.remove(ref)
        self.pool.end_transfer(ref)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        for kind in (A, B):
            assert self.pool.num_free(kind) == 5 - len(self.busy(kind))
            assert self.pool.num_used(kind) == sum(r.state_type is kind for r in self.used)


SlotMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestSlotMachine = SlotMachine.TestCase


class ZoneMachine(RuleBasedStateMachine):
    """Zones against a model: bytes have one user, and a slot that lost its bytes says so."""

    def __init__(self) -> None:
        super().__init__()
        self.geometry = SlotGeometry.by_use({A: 8192, C: 4096, B: 20_000}, 36_864 + 110_000)
        words = {t: memoryview(array("Q", [0] * self.geometry.num_slots(t))) for t in (A, B, C)}
        self.words = words
        self.pool = SlotPool(Tier.DRAM, self.geometry, words.__getitem__)
        self.used: list[SlotRef] = []
        self.holds: list[SlotRef] = []
        self.last: dict[tuple[StateType, int], int] = {}
        self.gone: list[SlotRef] = []
        """Released slots whose bytes another slot has been given since."""

    def span(self, kind: StateType, slot: int) -> tuple[int, int]:
        start = self.geometry.offset(kind, slot)
        return start, start + self.geometry.stride_bytes[kind]

    def overlapping(self, ref: SlotRef, others: Iterable[tuple[StateType, int]]) -> list[object]:
        start, end = self.span(ref.state_type, ref.slot)
        spans = ((other, self.span(*other)) for other in others)
        return [other for other, (low, high) in spans if low < end and start < high]

    def busy(self) -> set[tuple[StateType, int]]:
        return {(r.state_type, r.slot) for r in (*self.used, *self.holds)}

    def possible(self, kind: StateType) -> bool:
        """Return whether a slot of the type is free, by the model."""
        busy, geometry = self.busy(), self.geometry
        bundle = geometry.bundle_with(kind)
        in_zones: dict[int, set[StateType]] = {}
        for other, slot in busy:
            in_zones.setdefault(geometry.zone_of(other, slot), set()).add(other)
        return any(
            (kind, slot) not in busy and (zone < 0 or in_zones.get(zone, set()) <= set(bundle))
            for slot in range(geometry.num_slots(kind))
            for zone in (geometry.zone_of(kind, slot),)
        )

    @rule(kind=st.sampled_from([A, B, C]), data=st.data())
    def take(self, kind: StateType, data: st.DataObject) -> None:
        own = [r for r in self.used if r.state_type is kind]
        after = data.draw(st.sampled_from([None, *own]))
        possible, busy = self.possible(kind), self.busy()
        ref = self.pool.take(kind, after)
        assert (ref is not None) == possible
        if ref is None:
            return
        assert not self.overlapping(ref, busy), "two users of the same bytes"
        assert ref.generation > self.last.get((kind, ref.slot), 0)
        assert self.words[kind][ref.slot] == ref.generation
        if after is not None:
            zone = self.geometry.zone_of(kind, after.slot)
            following = (kind, after.slot + 1)
            slots = self.geometry.slots_in_zone(kind, zone)
            is_in_zone = 0 <= after.slot + 1 - self.geometry.first_slot(kind, zone) < slots
            if zone >= 0 and is_in_zone and following not in busy:
                assert ref.slot == after.slot + 1, "neighbours in a chain are neighbours here"
        others = [key for key in self.last if key != (kind, ref.slot)]
        self.gone += [
            SlotRef(Tier.DRAM, *key, self.last[key]) for key in self.overlapping(ref, others)
        ]
        self.last[kind, ref.slot] = ref.generation
        self.used.append(ref)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.used))
        self.used.remove(ref)
        self.pool.release(ref)

    @precondition(lambda self: self.used)
    @rule(data=st.data())
    def hold(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.used))
        self.holds.append(ref)
        self.pool.begin_transfer(ref)

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def unhold(self, data: st.DataObject) -> None:
        ref = data.draw(st.sampled_from(self.holds))
        self.holds.remove(ref)
        self.pool.end_transfer(ref)

    @invariant()
    def whoever_knows_an_old_generation_sees_another(self) -> None:
        for ref in self.gone:
            assert self.words[ref.state_type][ref.slot] > ref.generation

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity()
        for kind in (A, B, C):
            assert self.pool.num_used(kind) == sum(r.state_type is kind for r in self.used)
            assert (self.pool.num_free(kind) > 0) == self.possible(kind)


ZoneMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=60, deadline=None)
TestZoneMachine = ZoneMachine.TestCase
