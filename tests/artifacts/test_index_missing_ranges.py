"""Chunks of which nothing is stored, above chunks of which something is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, Tier
from hetero_connector.store.catalog.evictability import Evictability, evictability
from hetero_connector.store.catalog.nodes import Artifact
from tests.artifacts.trees import CHUNK, DENSE, WINDOW, A, B, C, Tree, chunk, slot

D = chunk("d", C)
BOTH = (Tier.DRAM, Tier.SSD)
SSD = (Tier.SSD,)


@pytest.fixture
def tree() -> Tree:
    return Tree()


def put_detached(tree: Tree, below: ChunkRange) -> Artifact:
    """Add a chunk as a journal without the rows before it does."""
    assert tree.index.agrees_with(below)
    tree.index.presume_parent(below)
    return tree.put(below, DENSE, SSD)


def replica(artifact: Artifact) -> Artifact:
    artifact.replica = True
    return artifact


def test_only_holdings_returns_chunks_after_a_missing_range(tree: Tree) -> None:
    for each in (A, B, C):
        tree.put(each)
    assert tree.index.holdings([A, D, B]) == tree.index.match([A]), "nothing is missing"
    tree.index.remove(tree.index.nodes[B.key].artifacts[DENSE])
    assert tree.index.num_missing == 1
    assert [x.chunk for x in tree.index.match([A, B, C])] == [A]
    found = tree.index.holdings([A, B, C, D])
    assert [(x.chunk, bool(x.tiers)) for x in found] == [(A, True), (B, False), (C, True)]
    assert tree.index.holdings([A, chunk("b2", A), D]) == tree.index.match([A]), "another chain's"
    tree.index.check_integrity()


def test_a_chunk_without_a_known_beginning_is_detached_until_it_is_known(tree: Tree) -> None:
    below = put_detached(tree, C)
    tree.index.check_integrity()
    assert (tree.index.num_missing, len(tree.index.nodes)) == (1, 3)
    with pytest.raises(KeyError):
        tree.index.add(B, DENSE, 1)
    tree.put(A)
    tree.put(B)
    assert tree.index.num_missing == 0
    assert [x.chunk for x in tree.index.match([A, B, C])] == [A, B, C]
    assert below.node.parent is not None
    assert below.node.parent.chunk == B
    tree.index.check_integrity()


def test_a_missing_range_of_one_chunk_is_never_detached(tree: Tree) -> None:
    put_detached(tree, B)
    tree.put(A)
    assert [x.chunk for x in tree.index.match([A, B])] == [A, B]
    tree.index.check_integrity()


def test_a_missing_range_ends_with_the_last_chunk_below_it(tree: Tree) -> None:
    below = put_detached(tree, C)
    tree.index.remove(below)
    assert list(tree.index.nodes) == [ROOT]
    assert tree.index.num_missing == 0
    tree.index.check_integrity()


def test_two_chains_that_part_in_a_missing_range_share_it(tree: Tree) -> None:
    put_detached(tree, C)
    put_detached(tree, chunk("c2", B))
    assert tree.index.num_missing == 1
    tree.index.check_integrity()


def test_users_below_a_missing_range_use_what_fills_it(tree: Tree) -> None:
    below = put_detached(tree, C)
    node = below.node
    while node is not None:  # as `ChainUsers` counts
        node.users += 1
        node = node.parent
    tree.put(A).node.users += 1  # and another, of A alone
    tree.index.root.users += 1
    tree.put(B)
    assert [tree.index.nodes[x.key].users for x in (A, B, C)] == [2, 1, 1]
    assert tree.index.root.users == 2


@pytest.mark.parametrize(
    "wrong",
    [
        replace(C, start=C.start + 16),
        replace(C, parent=C.key),
        replace(C, parent=ROOT),
        replace(D, parent=B.key),
        replace(B, parent=ChunkKey(b"?" * 16), start=0),
    ],
    ids=["off the grid", "its own parent", "a beginning in the middle", "too deep", "no beginning"],
)
def test_what_contradicts_its_neighbours_is_refused(tree: Tree, wrong: ChunkRange) -> None:
    put_detached(tree, C)
    assert tree.index.agrees_with(B)
    assert not tree.index.agrees_with(wrong)


def test_a_detached_chunk_has_no_place_below_itself(tree: Tree) -> None:
    """A row whose parent has its own child's name: B, attached there, would continue itself."""
    put_detached(tree, replace(C, key=A.key, parent=B.key))
    assert tree.index.nodes[B.key].chunk.end == 2 * CHUNK
    assert not tree.index.has_place_for(replace(B, parent=A.key))
    assert not tree.index.has_place_for(replace(B, parent=A.key, start=3 * CHUNK, end=4 * CHUNK))
    assert not tree.index.has_place_for(D), "what it continues is not known"


def test_a_detached_chunk_keeps_its_place_in_the_chain(tree: Tree) -> None:
    put_detached(tree, D)
    assert not tree.index.agrees_with(replace(C, start=0, end=CHUNK, parent=ROOT))
    assert tree.index.agrees_with(C)


def test_another_workers_copy_may_leave_dram_once_what_rests_on_it_is_on_ssd(tree: Tree) -> None:
    theirs, ours = replica(tree.put(A)), tree.put(B)
    assert evictability(theirs, Tier.DRAM) is Evictability.BLOCKED
    tree.offered.clear()
    tree.index.attach(ours, slot(Tier.SSD, DENSE))
    assert theirs in tree.offered
    assert evictability(theirs, Tier.DRAM) is Evictability.BACKED
    tree.index.detach(ours, Tier.DRAM)
    assert evictability(theirs, Tier.DRAM) is Evictability.FREE
    tree.index.remove(theirs)
    assert tree.index.num_missing == 1
    tree.index.check_integrity()


def test_of_several_chunks_that_rest_on_it_one_in_dram_alone_holds_it(tree: Tree) -> None:
    theirs = replica(tree.put(A))
    tree.put(B, DENSE, BOTH)
    alone = tree.put(chunk("b2", A))
    assert evictability(theirs, Tier.DRAM) is Evictability.BLOCKED
    tree.offered.clear()
    tree.index.remove(alone)
    assert theirs in tree.offered
    assert evictability(theirs, Tier.DRAM) is Evictability.BACKED


def test_a_chain_of_copies_leaves_from_its_end(tree: Tree) -> None:
    first, second = replica(tree.put(A)), replica(tree.put(B))
    tree.put(C, DENSE, SSD)
    assert evictability(first, Tier.DRAM) is Evictability.BLOCKED
    assert evictability(second, Tier.DRAM) is Evictability.FREE
    tree.offered.clear()
    tree.index.remove(second)
    assert first in tree.offered
    assert evictability(first, Tier.DRAM) is Evictability.FREE


def test_what_became_ours_and_is_not_written_is_not_held_by_what_is(tree: Tree) -> None:
    """Its owner died, and the write budget has nothing left."""
    promoted = tree.put(A)
    tree.put(B, DENSE, SSD)
    assert evictability(promoted, Tier.DRAM) is Evictability.FREE


def test_our_last_copy_above_a_missing_range_stays_on_ssd_and_may_leave_dram(tree: Tree) -> None:
    for name, tiers, expected in (
        ("ssd", SSD, Evictability.BLOCKED),
        ("dram", (Tier.DRAM,), Evictability.FREE),
    ):
        first = chunk(name)
        lost = chunk(f"{name} lost", first)
        ours = tree.put(first, DENSE, tiers)
        gap = tree.put(lost)
        tree.put(chunk(f"{name} below", lost), DENSE, SSD)
        tree.offered.clear()
        tree.index.remove(gap)
        assert ours in tree.offered
        assert evictability(ours, tiers[0]) is expected


def test_a_last_artifact_may_leave_dram_once_all_below_is_on_ssd(tree: Tree) -> None:
    window, below = tree.put(A, WINDOW), tree.put(B, DENSE)
    assert evictability(window, Tier.DRAM) is Evictability.BLOCKED
    tree.offered.clear()
    tree.index.attach(below, slot(Tier.SSD, DENSE))
    assert window in tree.offered
    assert evictability(window, Tier.DRAM) is Evictability.FREE


def test_a_copy_of_a_chunk_with_a_checkpoint_of_our_own_leaves_it_behind(tree: Tree) -> None:
    theirs, ours = replica(tree.put(A)), tree.put(A, WINDOW, SSD)
    tree.put(B, DENSE, SSD)
    assert evictability(theirs, Tier.DRAM) is Evictability.FREE
    tree.index.remove(theirs)
    assert tree.index.num_missing == 0
    assert tree.index.match([A, B])[0].tiers == {WINDOW: Tier.SSD}
    assert evictability(ours, Tier.SSD) is Evictability.BLOCKED
