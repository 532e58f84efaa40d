"""Every eviction policy keeps one contract; each has tests of its own beyond it."""

import gc
import random
from collections.abc import Callable
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog import eviction
from hetero_connector.store.catalog.evictability import Evictability
from hetero_connector.store.catalog.eviction import EvictionPolicy, LeafLru, Value, make_policy
from hetero_connector.store.catalog.nodes import Artifact, Life, Node
from hetero_connector.store.catalog.seconds_saved import (
    SecondsSaved,
    default_prefill_seconds,
    default_seconds_saved,
)

NAMES: tuple[EvictionName, ...] = get_args(EvictionName)
POLICIES: dict[EvictionName, type[EvictionPolicy]] = {
    "leaf_lru": LeafLru,
    "value": Value,
}


def make(name: EvictionName, now: Callable[[], int] = lambda: 0) -> EvictionPolicy:
    return make_policy(name, default_seconds_saved, now)


@pytest.fixture(params=NAMES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return make(request.param)


def artifact(end: int = 256, last_used: int = 0) -> Artifact:
    chunk = ChunkRange(ChunkKey(random.randbytes(16)), ROOT, end - 256, end)
    made = Artifact(Node(chunk, None), StateType.DENSE_KV, 1)
    made.last_used = last_used
    return made


def leaf(_: Artifact) -> Evictability:
    return Evictability.FREE


@pytest.mark.parametrize("name", NAMES)
def test_every_name_makes_its_policy(name: EvictionName) -> None:
    assert type(make(name)) is POLICIES[name]


def test_nothing_offered_nothing_popped(policy: EvictionPolicy) -> None:
    assert policy.pop(leaf) is None


def test_each_is_popped_once_however_often_it_was_offered(policy: EvictionPolicy) -> None:
    artifacts = [artifact() for _ in range(5)]
    for a in artifacts * 3:
        policy.offer(a)
    popped = [policy.pop(leaf) for _ in artifacts]
    assert {id(a) for a in popped} == {id(a) for a in artifacts}
    assert policy.pop(leaf) is None


def test_a_held_one_is_never_popped_and_comes_back_when_offered(policy: EvictionPolicy) -> None:
    held, free = artifact(last_used=1), artifact(last_used=2)
    policy.offer(held)
    policy.offer(free)
    evictability = {held: Evictability.BLOCKED, free: Evictability.FREE}
    assert policy.pop(evictability.__getitem__) is free
    assert policy.pop(evictability.__getitem__) is None
    policy.offer(held)
    assert policy.pop(leaf) is held


def test_soon_begins_with_what_is_popped_next_and_ends_with_all(policy: EvictionPolicy) -> None:
    offered = [artifact(last_used=i % 7) for i in range(20)]
    for a in offered:
        policy.offer(a)
    assert set(policy.soon(100)) == set(offered)
    assert len(policy.soon(3)) == 3
    for _ in offered:
        (coming,) = policy.soon(1)
        assert policy.pop(leaf) is coming
    assert policy.soon(1) == []


def test_clear_forgets_all(policy: EvictionPolicy) -> None:
    kept = artifact()
    policy.offer(kept)
    policy.clear()
    assert policy.pop(leaf) is None
    policy.offer(kept)
    assert policy.pop(leaf) is kept


def artifacts_in_memory() -> int:
    gc.collect()
    return sum(type(x) is Artifact for x in gc.get_objects())  # asks nothing of the others


def test_what_was_forgotten_is_let_go_of_though_nothing_is_ever_popped(
    policy: EvictionPolicy,
) -> None:
    kept = [artifact(last_used=i) for i in range(10)]
    before = artifacts_in_memory()
    for a in kept:
        policy.offer(a)
    for _ in range(2000):
        gone = artifact()
        policy.offer(gone)
        gone.life = Life.FORGOTTEN  # the index dropped it some other way
    assert artifacts_in_memory() - before < 200
    evictability = dict.fromkeys(kept, Evictability.FREE)
    popped = [policy.pop(lambda a: evictability.get(a, Evictability.BLOCKED)) for _ in kept]
    assert set(popped) == set(kept)


STANDINGS = st.sampled_from(Evictability)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(0, 7)),
        st.tuples(st.just("use"), st.integers(0, 7)),
        st.tuples(st.just("stand"), st.integers(0, 7), STANDINGS),
        st.tuples(st.just("pop")),
    ),
    max_size=60,
)


class Trial:
    """A policy and what it should hold, driven by `STEPS`."""

    def __init__(self, name: EvictionName) -> None:
        self.tick = 0
        self.policy = make(name, lambda: self.tick)
        self.artifacts = [artifact(end=256 * (1 + i % 3)) for i in range(8)]
        self.evictability = dict.fromkeys(self.artifacts, Evictability.FREE)
        self.offered: set[Artifact] = set()
        self.popped: list[int | None] = []

    def pop(self) -> Artifact | None:
        victim = self.policy.pop(self.evictability.__getitem__)
        self.popped.append(None if victim is None else self.artifacts.index(victim))
        return victim

    def step(
        self, kind: str, which: int = 0, evictability: Evictability = Evictability.FREE
    ) -> None:
        chosen = self.artifacts[which]
        if kind == "offer":
            self.policy.offer(chosen)
            self.offered.add(chosen)
        elif kind == "use":
            self.tick += 1
            chosen.last_used, chosen.uses = self.tick, chosen.uses + 1
        elif kind == "stand":
            was, self.evictability[chosen] = self.evictability[chosen], evictability
            if was is Evictability.BLOCKED and evictability is not Evictability.BLOCKED:
                self.step("offer", which)  # as the index does
        else:
            self.check_victim(self.pop())

    def check_victim(self, victim: Artifact | None) -> None:
        free = [a for a in self.offered if self.evictability[a] is not Evictability.BLOCKED]
        if victim is None:
            assert not free
            return
        assert victim in free
        leaves = [a for a in free if self.evictability[a] is Evictability.FREE]
        assert victim in (leaves or free)
        if not isinstance(self.policy, Value):
            assert eviction.recency(victim) == min(map(eviction.recency, leaves or free))
        self.offered.remove(victim)


@pytest.mark.parametrize("name", NAMES)
@given(steps=STEPS)
def test_a_victim_is_offered_free_and_first_in_order_however_it_came_about(
    name: EvictionName, steps: list[tuple[str, int, Evictability]]
) -> None:
    trial, again = Trial(name), Trial(name)
    for step in steps:
        trial.step(*step)
        again.step(*step)
    while (victim := trial.pop()) is not None:
        trial.check_victim(victim)
        again.pop()
    assert not [a for a in trial.offered if trial.evictability[a] is not Evictability.BLOCKED]
    again.pop()
    assert again.popped == trial.popped, "the same calls, other victims"


def test_lru_pops_the_least_recently_used_by_its_recency_now() -> None:
    policy = LeafLru()
    a, b, c = (artifact(last_used=i) for i in (1, 2, 3))
    for x in (c, a, b):
        policy.offer(x)
    a.last_used = 9  # used after it was offered
    assert [policy.pop(leaf) for _ in range(3)] == [b, c, a]


def test_lru_pops_the_deepest_of_equally_recent_ones() -> None:
    policy = LeafLru()
    shallow, deep = artifact(end=256), artifact(end=1024)
    policy.offer(shallow)
    policy.offer(deep)
    assert policy.pop(leaf) is deep


def test_backed_ones_are_taken_only_when_there_is_no_leaf(policy: EvictionPolicy) -> None:
    backed, young_leaf = artifact(last_used=1), artifact(last_used=5)
    evictability = {backed: Evictability.BACKED, young_leaf: Evictability.FREE}
    for _ in range(3):  # offering a backed one again must not multiply it
        policy.offer(backed)
        policy.offer(young_leaf)
        assert policy.pop(evictability.__getitem__) is young_leaf
    assert policy.pop(evictability.__getitem__) is backed
    assert policy.pop(evictability.__getitem__) is None


@pytest.mark.parametrize("name", NAMES)
def test_pinned_ones_are_looked_at_once_not_at_every_eviction(name: EvictionName) -> None:
    policy, looks = make(name), 0
    pinned = {artifact(last_used=i) for i in range(1000)}
    for a in pinned:
        policy.offer(a)

    def evictability(a: Artifact) -> Evictability:
        nonlocal looks
        looks += 1
        return Evictability.BLOCKED if a in pinned else Evictability.FREE

    for i in range(100):
        free = artifact(last_used=2000 + i)
        policy.offer(free)
        assert policy.pop(evictability) is free
    assert looks == 1000 + 100


class Worth:
    """Seconds saved, by hand, and a logical clock."""

    def __init__(self) -> None:
        self.seconds: dict[Artifact, float] = {}
        self.tick = 0
        self.policy = Value(self.seconds.__getitem__, lambda: self.tick)

    def seal(self, seconds: float, uses: int = 0) -> Artifact:
        made = artifact()
        self.seconds[made] = seconds
        made.uses = uses
        self.touch(made)
        self.policy.offer(made)
        return made

    def use(self, used: Artifact) -> None:
        used.uses += 1
        self.touch(used)

    def touch(self, used: Artifact) -> None:
        self.tick += 1
        used.last_used = self.tick


def test_value_by_hand() -> None:
    w = Worth()
    a, b, c = w.seal(1.0), w.seal(3.0), w.seal(1.0, uses=15)  # ranks 1, 3, (1 + 4) x 1 = 5
    assert w.policy.pop(leaf) is a  # the clock is at 1
    d = w.seal(1.0)  # 1 + 1 = 2
    assert w.policy.pop(leaf) is d  # 2
    e = w.seal(1.5)  # 2 + 1.5 = 3.5
    assert w.policy.pop(leaf) is b, "worth twice what e is, but nobody came for it"
    f = w.seal(1.0)  # 3 + 1 = 4
    w.use(e)  # 3 + 2 x 1.5 = 6
    assert [w.policy.pop(leaf) for _ in range(3)] == [f, c, e]


def test_value_ages_from_the_last_use_not_from_when_it_was_noticed() -> None:
    w = Worth()
    passing, used = w.seal(1.0), w.seal(2.0)
    w.use(used)  # 0 + 2 x 2 = 4, whatever the clock does from here on
    assert w.policy.pop(leaf) is passing
    fresh = w.seal(3.5)  # 1 + 3.5 = 4.5
    assert w.policy.pop(leaf) is used
    assert w.policy.pop(leaf) is fresh


def test_value_of_a_held_one_is_not_renewed_by_offering_it_again() -> None:
    w = Worth()
    held, young = w.seal(1.5), w.seal(1.0)
    evictability = {held: Evictability.BLOCKED, young: Evictability.FREE}
    assert w.policy.pop(evictability.__getitem__) is young
    for _ in range(4):  # the clock goes to 5
        w.policy.pop(leaf)
        w.seal(1.0)
    w.policy.offer(held)
    assert w.policy.pop(leaf) is held, "1.5 from before the clock rose"


def test_value_keeps_a_bounded_memory_of_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eviction, "_MAX_MOMENTS", 16)
    w = Worth()
    for _ in range(1000):
        sealed = w.seal(1.0)
        assert w.policy.pop(leaf) is sealed
    assert len(w.policy._moments) == len(w.policy._clocks) <= 16
    assert w.policy._moments == sorted(w.policy._moments)
    late, later = w.seal(1.0), w.seal(2.0)
    assert w.policy.pop(leaf) is late
    assert w.policy.pop(leaf) is later


@given(
    st.lists(st.tuples(st.sampled_from("oup"), st.integers(0, 9), st.integers(1, 9)), max_size=60),
    st.lists(st.sampled_from([0.125, 0.5, 2.0, 16.0]), min_size=60, max_size=60),
)
def test_value_stays_as_it_is_when_all_costs_turn_out_to_be_others(
    steps: list[tuple[str, int, int]], factors: list[float]
) -> None:
    """Offers, uses and evictions, with the engine's speed found to be another before each."""

    def victims(factors: list[float]) -> list[int | None]:
        speed, tick, order = 1.0, 0, []

        def prefill_seconds(new_tokens: float, context_tokens: float) -> float:
            return speed * default_prefill_seconds(new_tokens, context_tokens)

        policy = make_policy("value", SecondsSaved(prefill_seconds), lambda: tick)
        known: list[Artifact] = []
        for (what, which, depth), factor in zip(steps, factors, strict=False):
            speed, tick = speed * factor, tick + 1
            if what == "o":
                known.append(artifact(end=256 * 32 * depth, last_used=tick))
                policy.offer(known[-1])
            elif what == "u" and known:
                known[which % len(known)].uses += 1
                known[which % len(known)].last_used = tick
            elif what == "p":
                victim = policy.pop(leaf)
                order.append(None if victim is None else known.index(victim))
        return order

    assert victims(factors) == victims([1.0] * 60)


def chunk(start: int, parent: Node | None, *kinds: StateType) -> Node:
    node = Node(ChunkRange(ChunkKey(random.randbytes(16)), ROOT, start, start + 256), parent)
    node.artifacts = {kind: Artifact(node, kind, 1) for kind in kinds}
    return node


def test_recomputing_a_deeper_chunk_costs_more() -> None:
    shallow, deep = (chunk(at, None, StateType.DENSE_KV) for at in (0, 32_768 - 128))
    (a,), (b,) = shallow.artifacts.values(), deep.artifacts.values()
    assert default_seconds_saved(b) == pytest.approx(256 * 1e-4 * 2)
    assert default_seconds_saved(a) == pytest.approx(256 * 1e-4 * (1 + 128 / 32_768))


def test_boundary_state_saves_all_since_the_boundary_above() -> None:
    root = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
    first = chunk(0, root, StateType.DENSE_KV, StateType.WINDOW_SWA)
    second = chunk(256, first, StateType.DENSE_KV)
    third = chunk(512, second, StateType.DENSE_KV, StateType.WINDOW_SWA)
    dense = [default_seconds_saved(n.artifacts[StateType.DENSE_KV]) for n in (first, second, third)]
    window = default_seconds_saved(third.artifacts[StateType.WINDOW_SWA])
    assert window == pytest.approx(dense[1] + dense[2])
    assert default_seconds_saved(first.artifacts[StateType.WINDOW_SWA]) == pytest.approx(dense[0])


def test_measured_prefill_says_what_an_artifact_saves() -> None:
    saved = SecondsSaved(lambda new_tokens, context_tokens: 10 * new_tokens + context_tokens)
    assert saved(artifact(end=512)) == 10 * 256 + 256
