"""Chains with users leave a tier last; without users a chain leaves in its turn."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.record import ROOT, ChunkRange
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog import chain_users
from hetero_connector.store.catalog.chain_users import ChainUsers
from hetero_connector.store.catalog.fair_shares import FairShares
from hetero_connector.store.catalog.nodes import Node
from tests.store.filling import SIZES, ClockedStore, begin, chain, ids_of, put, stored
from tests.waiting import until

TRUNK, OTHER, NEW = chain("trunk", 2), chain("other", 2), chain("new", 2)
LEFT = chain("left", 1, TRUNK[-1])
RIGHT = chain("right", 1, TRUNK[-1])
LONG_S = 1e6


class Clocked(ClockedStore):
    def reads(self, session: str, chunks: Sequence[ChunkRange], for_s: float = LONG_S) -> None:
        self.store.retention.protect_chain(session, (chunks[-1].key,), self.clock() + for_s)

    def users(self, chunk: ChunkRange) -> int:
        return self.store.catalog.tiers.index.nodes[chunk.key].users


@pytest.fixture
def clocked() -> Iterator[Clocked]:
    made = Clocked(dram_chunks=4)
    yield made
    made.store.close()
    made.store.check_integrity()


def use(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> None:
    begin(store, ids_of(chunks)).release()


def test_a_chain_with_users_leaves_after_one_that_was_used_later(clocked: Clocked) -> None:
    store = clocked.store
    put(store, TRUNK)
    put(store, OTHER)
    clocked.reads("ann", TRUNK)
    use(store, OTHER)
    put(store, NEW)
    assert stored(store, TRUNK) == 2
    assert stored(store, OTHER) == 0


def test_a_chain_without_its_last_user_leaves_in_its_turn(clocked: Clocked) -> None:
    store = clocked.store
    put(store, TRUNK)
    put(store, OTHER)
    clocked.reads("ann", TRUNK)
    clocked.reads("bob", TRUNK)
    put(store, NEW)  # sets aside what is read, and evicts the other
    put(store, OTHER)
    clocked.store.catalog.users.remove("ann")
    assert clocked.users(TRUNK[0]) == 1
    put(store, NEW)
    assert stored(store, TRUNK) == 2, "bob still reads it"
    clocked.store.catalog.users.remove("bob")
    use(store, NEW)
    put(store, OTHER)
    assert stored(store, TRUNK) == 0
    assert stored(store, NEW) == 2


def test_forks_share_their_trunk_and_each_keeps_its_own(clocked: Clocked) -> None:
    store = clocked.store
    put(store, [*TRUNK, *LEFT, *RIGHT])
    clocked.reads("ann", [*TRUNK, *LEFT])
    clocked.reads("bob", [*TRUNK, *RIGHT])
    assert [clocked.users(c) for c in (*TRUNK, *LEFT, *RIGHT)] == [2, 2, 1, 1]
    clocked.store.catalog.users.remove("ann")
    assert [clocked.users(c) for c in (*TRUNK, *LEFT, *RIGHT)] == [1, 1, 0, 1]
    use(store, LEFT)
    put(store, chain("one more", 1))
    assert stored(store, [*TRUNK, *RIGHT]) == 3
    assert stored(store, [*TRUNK, *LEFT]) == 2, "its one user has ended"


def test_where_every_chain_has_users_the_oldest_leaves_and_nothing_hangs(clocked: Clocked) -> None:
    store = clocked.store
    put(store, TRUNK)
    put(store, OTHER)
    clocked.reads("ann", TRUNK)
    clocked.reads("bob", OTHER)
    put(store, NEW)
    assert stored(store, TRUNK) == 0
    assert stored(store, OTHER) == 2
    put(store, TRUNK)  # ann's chain again: not hers until she reads it anew
    assert clocked.users(TRUNK[0]) == 0
    clocked.store.catalog.users.remove("ann")
    assert clocked.users(TRUNK[0]) == 0


def test_many_users_of_one_tenant_leave_the_chain_of_another_protected(clocked: Clocked) -> None:
    clocked.store.catalog.users._shares = FairShares(20)
    put(clocked.store, [*TRUNK, *OTHER])
    clocked.store.retention.protect_chain("ann", (TRUNK[-1].key,), clocked.clock() + LONG_S, b"ann")
    for number in range(100):
        clocked.store.retention.protect_chain(
            number, (OTHER[-1].key,), clocked.clock() + LONG_S, b"eve"
        )
    assert clocked.users(TRUNK[-1]) == 1
    assert clocked.users(OTHER[-1]) == 19


def test_a_session_uses_the_chain_of_its_next_turn_until_its_time_ends(clocked: Clocked) -> None:
    put(clocked.store, [*TRUNK, *LEFT])
    clocked.reads("ann", TRUNK, for_s=10.0)
    clocked.reads("ann", [*TRUNK, *LEFT], for_s=20.0)
    assert [clocked.users(c) for c in (*TRUNK, *LEFT)] == [1, 1, 1]
    clocked.clock.passes(15.0)
    clocked.store.catalog.users.expire()
    assert clocked.users(LEFT[0]) == 1, "the first turn's time was replaced"
    clocked.clock.passes(5.0)
    clocked.store.catalog.users.expire()
    assert [clocked.users(c) for c in (*TRUNK, *LEFT)] == [0, 0, 0]


def test_a_session_of_which_nothing_is_stored_uses_nothing(clocked: Clocked) -> None:
    put(clocked.store, TRUNK)
    clocked.reads("ann", TRUNK)
    clocked.reads("ann", OTHER)
    assert clocked.users(TRUNK[0]) == 0
    assert len(clocked.store.catalog.users) == 0


def test_after_a_reset_no_chain_has_users(clocked: Clocked) -> None:
    put(clocked.store, TRUNK)
    clocked.reads("ann", TRUNK)
    clocked.store.reset()
    assert len(clocked.store.catalog.users) == 0
    put(clocked.store, TRUNK)
    assert clocked.users(TRUNK[0]) == 0


def test_on_ssd_too_chains_with_users_leave_last(tmp_path: Path) -> None:
    clocked = Clocked(dram_chunks=2, root=tmp_path / "ssd")
    store = clocked.store
    for chunks in (TRUNK, *(chain(f"c{i}", 2) for i in range(7))):
        put(store, chunks)
        assert store.flush(60)
    clocked.reads("ann", TRUNK)
    for i in range(7, 14):
        put(store, chain(f"c{i}", 2))
        assert store.flush(60)
    assert stored(store, TRUNK) == 2, "all others of its time have gone"
    assert not any(stored(store, chain(f"c{i}", 2)) for i in range(5))
    store.close()
    store.check_integrity()


def test_users_whose_time_is_over_are_removed_a_few_at_a_time() -> None:
    now_s = 0.0
    unused: list[Node] = []
    users = ChainUsers(lambda: now_s, unused.append)
    root = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
    nodes = [Node(chunk, root) for i in range(20) for chunk in chain(f"c{i}", 1)]
    for i, node in enumerate(nodes):
        users.add(i, node, 1.0)
    now_s = 1.0
    assert users.expire(1), "others are left"
    assert len(users) == root.users == 19
    assert users.expire(9), "each uses two chunks"
    assert len(users) == 16
    assert users.look_s <= now_s, "the I/O thread comes back at once"
    assert not users.expire()
    assert len(users) == root.users == 0
    assert len(unused) == 21
    assert users.look_s == float("inf")


def test_the_io_thread_removes_users_whose_time_is_over(tmp_path: Path) -> None:
    clocked = Clocked(dram_chunks=4, root=tmp_path / "ssd")
    put(clocked.store, TRUNK)
    catalog = clocked.store.catalog
    with catalog.locked():  # the I/O thread waits
        for i in range(10):
            clocked.reads(f"s{i}", TRUNK, for_s=1.0)
        clocked.clock.passes(1.0)
        clocked.reads("ann", TRUNK)
        assert len(catalog.users) == 11
    until(lambda: len(catalog.users) == 1)
    clocked.store.close()


def test_without_an_io_thread_the_next_look_up_removes_all_that_are_over(clocked: Clocked) -> None:
    put(clocked.store, TRUNK)
    for i in range(10):
        clocked.reads(f"s{i}", TRUNK, for_s=1.0)
    clocked.reads("ann", TRUNK)
    clocked.store.expire_due()
    assert len(clocked.store.catalog.users) == 11
    clocked.clock.passes(1.0)
    clocked.store.expire_due()
    assert (len(clocked.store.catalog.users), clocked.users(TRUNK[0])) == (1, 1)


def test_to_use_the_same_chain_for_longer_counts_no_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    users = ChainUsers(lambda: now_s, lambda _: None)
    node = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
    users.add_foreign(node, 1.0, now=1)
    chain_of = MagicMock(return_value=())
    with monkeypatch.context() as patch:
        patch.setattr(chain_users, "_chain", chain_of)
        users.add_foreign(node, 2.0, now=2)
    assert not chain_of.called
    now_s = 1.5
    users.expire()
    assert (len(users), node.users) == (1, 1)
    now_s = 2.0
    users.expire()
    assert (len(users), node.users) == (0, 0)


def test_other_engines_users_are_set_a_chunk_at_a_time(clocked: Clocked) -> None:
    put(clocked.store, [*TRUNK, *LEFT, *RIGHT])
    side, ends = clocked.store.catalog.fleet_side, {LEFT[0].key: True, RIGHT[0].key: True}
    lock = MagicMock()
    side._lock = lock
    side.set_foreign_users(ends, 10.0)
    assert lock.__enter__.call_count == lock.__exit__.call_count == len(ends)
    assert [clocked.users(c) for c in (*TRUNK, *LEFT, *RIGHT)] == [2, 2, 1, 1]


def test_only_so_many_users_count() -> None:
    users = ChainUsers(lambda: 0.0, lambda _: None, capacity=3)
    node = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
    for i in range(10):
        users.add(i, node, LONG_S)
    assert len(users) == node.users == 3
    for _ in range(1_000):
        users.add(9, node, LONG_S)
    assert len(users._ends) < 100, "uses that were replaced pile up"


STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "reads", "leaves", "pass"]), st.integers(0, 7)), max_size=40
)


@settings(deadline=None)
@given(STEPS)
def test_counts_are_those_of_the_users_and_there_is_always_room(
    steps: list[tuple[str, int]],
) -> None:
    """A tree of eight branches, of which the store holds five chunks."""
    rng = random.Random(5)
    branches = [[*TRUNK[:1], *chain(f"b{i}", 2, TRUNK[0])] for i in range(8)]
    clocked = Clocked(dram_chunks=5)
    store, users = clocked.store, clocked.store.catalog.users
    for kind, which in steps:
        missing = [c for c in branches[which] if store.missing(c, list(SIZES))]
        if kind == "put":
            put(store, missing)
        elif kind == "reads":
            clocked.reads(f"s{which}", branches[rng.randrange(8)], for_s=float(which))
        elif kind == "leaves":
            users.remove(f"s{which}")
        else:
            clocked.clock.passes(1.0)
            users.expire()
        counted = dict.fromkeys(store.catalog.tiers.index.nodes.values(), 0)
        for use in users._uses.values():
            node: Node | None = use.node
            while node is not None:
                if node in counted:
                    counted[node] += 1
                node = node.parent
        assert all(node.users == n for node, n in counted.items())
        store.check_integrity()
    for branch in branches:
        put(store, [c for c in branch if store.missing(c, list(SIZES))])
        assert stored(store, branch) == 3, "with users everywhere there was no room"
    store.close()


def test_set_aside_bookkeeping_does_not_grow_with_what_has_passed_through() -> None:
    clocked = Clocked(dram_chunks=4)
    for i in range(400):
        chunks = chain(f"c{i}", 2)
        put(clocked.store, chunks)
        clocked.reads(f"s{i}", chunks)
    for policy in clocked.store.catalog.tiers._policies.values():
        assert len(policy._aside) < 200
    clocked.store.close()
