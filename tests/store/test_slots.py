import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.slots import SlotGeometry, SlotPool

A, B = StateType.DENSE_KV, StateType.WINDOW_SWA


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
