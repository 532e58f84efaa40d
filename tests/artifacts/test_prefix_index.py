import pytest

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, Tier
from hetero_connector.store.catalog import index as index_module
from hetero_connector.store.catalog.evictability import Evictability, evictability
from tests.artifacts.trees import DENSE, WINDOW, A, B, C, Tree, chunk, slot


@pytest.fixture
def tree() -> Tree:
    return Tree()


def test_match_is_the_longest_stored_prefix_with_the_fastest_tier(tree: Tree) -> None:
    tree.put(A, DENSE, (Tier.SSD,))
    tree.put(A, WINDOW, (Tier.SSD, Tier.DRAM))
    tree.put(B)
    found = tree.index.match([A, B, C])
    assert [x.chunk for x in found] == [A, B]
    assert found[0].tiers == {DENSE: Tier.SSD, WINDOW: Tier.DRAM}


def test_match_consumes_a_lazy_chain_only_as_far_as_it_matches(tree: Tree) -> None:
    tree.put(A)
    hashed = []

    def lazily():
        for c in (A, B, C):
            hashed.append(c)
            yield c

    assert len(tree.index.match(lazily())) == 1
    assert hashed == [A, B]


def test_an_unsealed_artifact_is_invisible_but_found(tree: Tree) -> None:
    artifact = tree.index.add(A, DENSE, 100)
    assert tree.index.match([A]) == []
    assert tree.index.find(ArtifactId(A.key, DENSE)) is artifact
    assert evictability(artifact, Tier.DRAM) is Evictability.BLOCKED


def test_what_match_answered_does_not_change_later(tree: Tree) -> None:
    artifact = tree.put(A, DENSE, (Tier.SSD,))
    answer = tree.index.match([A])
    tree.index.attach(artifact, slot(Tier.DRAM, DENSE), 0)
    tree.put(A, WINDOW)
    assert answer[0].tiers == {DENSE: Tier.SSD}


def test_the_last_copy_of_a_parent_stays_while_a_child_holds_the_type(tree: Tree) -> None:
    parent, child = tree.put(A), tree.put(B)
    assert evictability(parent, Tier.DRAM) is Evictability.BLOCKED
    assert evictability(child, Tier.DRAM) is Evictability.FREE
    tree.offered.clear()
    tree.index.remove(child)
    assert tree.offered[-1] is parent
    assert evictability(parent, Tier.DRAM) is Evictability.FREE
    tree.index.check_integrity()


def test_a_child_being_saved_keeps_its_parent(tree: Tree) -> None:
    parent = tree.put(A)
    tree.index.add(B, DENSE, 100)
    assert evictability(parent, Tier.DRAM) is Evictability.BLOCKED


def test_a_copy_backed_by_ssd_may_leave_dram_after_the_leaves(tree: Tree) -> None:
    both = (Tier.DRAM, Tier.SSD)
    parent, child = tree.put(A, DENSE, both), tree.put(B, DENSE, both)
    assert evictability(parent, Tier.DRAM) is Evictability.BACKED
    assert evictability(child, Tier.DRAM) is Evictability.FREE
    assert evictability(parent, Tier.SSD) is Evictability.BLOCKED
    tree.offered.clear()
    tree.index.detach(child, Tier.DRAM)
    assert tree.offered == [parent]
    assert evictability(parent, Tier.DRAM) is Evictability.FREE
    assert tree.index.match([A, B])[1].tiers == {DENSE: Tier.SSD}


def test_an_ssd_copy_backed_by_dram_may_leave_if_no_child_is_on_ssd(tree: Tree) -> None:
    both = (Tier.DRAM, Tier.SSD)
    top, middle = tree.put(A, DENSE, both), tree.put(B, DENSE, both)
    tree.put(C, DENSE)
    assert evictability(top, Tier.SSD) is Evictability.BLOCKED
    assert evictability(middle, Tier.SSD) is Evictability.BACKED
    tree.offered.clear()
    tree.index.detach(middle, Tier.SSD)
    assert top in tree.offered
    assert evictability(top, Tier.SSD) is Evictability.BACKED
    tree.index.check_integrity()


def test_the_last_artifact_of_a_chunk_stays_while_it_has_children(tree: Tree) -> None:
    window = tree.put(A, WINDOW)
    child = tree.put(B, DENSE)
    assert evictability(window, Tier.DRAM) is Evictability.BLOCKED
    tree.put(A, DENSE)
    assert window in tree.offered
    assert evictability(window, Tier.DRAM) is Evictability.FREE
    tree.index.remove(child)
    tree.index.check_integrity()


def test_pinned_is_held(tree: Tree) -> None:
    artifact = tree.put(A)
    artifact.pins = 1
    assert evictability(artifact, Tier.DRAM) is Evictability.BLOCKED


def test_empty_nodes_disappear_up_the_chain(tree: Tree) -> None:
    parent, child = tree.put(A), tree.put(B)
    tree.index.remove(parent)  # as a failed read does, whatever its evictability
    assert tree.index.match([A, B]) == []
    assert B.key in tree.index.nodes
    tree.index.check_integrity()
    tree.index.remove(child)
    assert list(tree.index.nodes) == [ROOT]


def test_a_chain_heals_when_the_lost_chunk_is_saved_again(tree: Tree) -> None:
    parent = tree.put(A)
    tree.put(B)
    tree.index.remove(parent)
    tree.put(A)
    assert len(tree.index.match([A, B])) == 2
    tree.index.check_integrity()


def test_a_chunk_without_its_parent_is_refused(tree: Tree) -> None:
    with pytest.raises(KeyError):
        tree.index.add(B, DENSE, 1)


def test_tails_are_the_visible_short_children(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "MAX_TAILS", 8)
    tree.put(A)
    shorts = [chunk(f"t{n}", A, 16 * n) for n in range(1, 11)]
    artifacts = [tree.put(c) for c in shorts]
    tree.put(B)
    assert tree.index.tails(A.key) == tuple(16 * n for n in range(10, 2, -1)), "the newest eight"
    tree.put(chunk("as long as the first", A, 16))
    assert tree.index.tails(A.key)[:2] == (16, 160), "a length is as new as its newest"
    for artifact in artifacts[4:]:
        tree.index.remove(artifact)
    assert sorted(tree.index.tails(A.key)) == [16, 32, 48, 64]
    assert tree.index.tails(B.key) == ()
    assert tree.index.tails(ChunkKey(b"?" * 16)) == ()
    tree.index.check_integrity()


def test_clear_returns_everything_and_leaves_nothing(tree: Tree) -> None:
    artifacts = {tree.put(A), tree.put(A, WINDOW), tree.put(B)}
    assert set(tree.index.clear()) == artifacts
    assert all(a.forgotten for a in artifacts)
    assert tree.index.match([A]) == []
    tree.index.check_integrity()
