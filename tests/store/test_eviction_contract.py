"""What every eviction policy must do, and what `LeafLru` does."""

import random
from collections.abc import Callable

import pytest

from hetero_connector.artifacts.index import Artifact, Node, Standing
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.eviction import EvictionPolicy, LeafLru

POLICIES: list[Callable[[], EvictionPolicy]] = [LeafLru]


@pytest.fixture(params=POLICIES)
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    made: EvictionPolicy = request.param()
    return made


def artifact(end: int = 256, last_used: int = 0) -> Artifact:
    chunk = ChunkRange(ChunkKey(random.randbytes(16)), ROOT, end - 256, end)
    made = Artifact(Node(chunk, None), StateType.DENSE_KV, 1)
    made.last_used = last_used
    return made


def leaf(_: Artifact) -> Standing:
    return Standing.LEAF


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
    standing = {held: Standing.HELD, free: Standing.LEAF}
    assert policy.pop(standing.__getitem__) is free
    assert policy.pop(standing.__getitem__) is None
    policy.offer(held)
    assert policy.pop(leaf) is held


def test_clear_forgets_all(policy: EvictionPolicy) -> None:
    kept = artifact()
    policy.offer(kept)
    policy.clear()
    assert policy.pop(leaf) is None
    policy.offer(kept)
    assert policy.pop(leaf) is kept


def test_leaf_lru_pops_the_least_recently_used_by_its_recency_now() -> None:
    policy = LeafLru()
    a, b, c = (artifact(last_used=i) for i in (1, 2, 3))
    for x in (c, a, b):
        policy.offer(x)
    a.last_used = 9  # used after it was offered
    assert [policy.pop(leaf) for _ in range(3)] == [b, c, a]


def test_leaf_lru_pops_the_deepest_of_equally_recent_ones() -> None:
    policy = LeafLru()
    shallow, deep = artifact(end=256), artifact(end=1024)
    policy.offer(shallow)
    policy.offer(deep)
    assert policy.pop(leaf) is deep


def test_leaf_lru_takes_backed_ones_only_when_there_is_no_leaf() -> None:
    policy = LeafLru()
    backed, young_leaf = artifact(last_used=1), artifact(last_used=5)
    standing = {backed: Standing.BACKED, young_leaf: Standing.LEAF}
    for _ in range(3):  # offering a backed one again must not multiply it
        policy.offer(backed)
        policy.offer(young_leaf)
        assert policy.pop(standing.__getitem__) is young_leaf
    assert policy.pop(standing.__getitem__) is backed
    assert policy.pop(standing.__getitem__) is None


def test_leaf_lru_looks_at_pinned_ones_once_not_at_every_eviction() -> None:
    policy, looks = LeafLru(), 0
    pinned = {artifact(last_used=i) for i in range(1000)}
    for a in pinned:
        policy.offer(a)

    def standing(a: Artifact) -> Standing:
        nonlocal looks
        looks += 1
        return Standing.HELD if a in pinned else Standing.LEAF

    for i in range(100):
        free = artifact(last_used=2000 + i)
        policy.offer(free)
        assert policy.pop(standing) is free
    assert looks == 1000 + 100
