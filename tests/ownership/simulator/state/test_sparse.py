"""A tier with gaps holds what it was given, and of what it was not only the place."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.eviction import LeafLru, Value
from hetero_connector.store.catalog.seconds_saved import default_seconds_saved
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.sparse import SparseChunks, missing_ranges
from ownership.simulator.traces.block_runs import BlockRuns
from tests.ownership.simulator.state.few_chunks import SIZES, names, prompts

AMPLE = 1 << 20


def tier(capacity: int = AMPLE, policy: str = "leaf_lru") -> SparseChunks:
    made = {"value": Value(default_seconds_saved.in_prefills, lambda: 0), "leaf_lru": LeafLru()}
    return SparseChunks(
        SIZES, capacity, made[policy], StateType.DENSE_KV,
        by_recency=policy != "value",
    )  # fmt: skip


def held(resident: ResidentChunks) -> set[int]:
    return {
        run.first + i for run in resident.runs() if not run.is_missing for i in range(run.count)
    }


def hold(resident: SparseChunks, chain: BlockRuns, behind: int, tick: int) -> int:
    """All that it lacks; how many chunks were new."""
    stretches = missing_ranges(resident.match(chain), behind, chain.num_blocks)
    new = [resident.write(chain.head(last), first, (), tick).chunks for first, last in stretches]
    return sum(new)


def unreached(held: set[int], chain: Iterable[int], covered: int) -> int:
    """Chunks before the first that is neither covered nor here."""
    count = 0
    for at, name in enumerate(chain):
        if at >= covered and name not in held:
            break
        count = at + 1
    return count


@given(prompts, st.data())
def test_a_sparse_tier_holds_what_single_chunks_would(
    texts: list[list[int]], data: st.DataObject
) -> None:
    resident, here = tier(), set[int]()
    checkpoints = set[int]()
    chains = names(texts)
    for tick, chain in enumerate(chains, 1):
        ids = chain.ids().tolist()
        behind = data.draw(st.integers(0, len(ids) - 1))
        if data.draw(st.booleans()):
            wanted = data.draw(st.sets(st.integers(behind + 1, len(ids))))
            new, since = 0, behind
            for first, last in missing_ranges(resident.match(chain), behind, chain.num_blocks):
                kept = sorted(b for b in wanted if since < b <= last)
                added = resident.write(chain.head(last), first, kept, tick)
                assert added.end == last
                since = last
                new += added.chunks
                assert {ids[b - 1] for b in added.checkpoints} == {
                    ids[b - 1] for b in kept
                } - checkpoints
                checkpoints |= {ids[b - 1] for b in kept}
            assert new == len(set(ids[behind:]) - here)
            here |= set(ids[behind:])
        assert held(resident) == here
        resident.check_integrity()
        assert resident.used_bytes == 10 * len(here) + 3 * len(checkpoints)
        for other in chains:
            known, covered = other.ids().tolist(), data.draw(st.integers(0, other.num_blocks))
            reached = resident.usable(other, covered)
            assert max(reached.chunks, covered) == unreached(here, known, covered)
            assert {known[b - 1] for b in reached.checkpoints()} <= checkpoints
    assert resident.make_room(AMPLE) == AMPLE
    assert list(resident.runs()) == []


@pytest.mark.parametrize("policy", ["leaf_lru", "value"])
@given(prompts, st.integers(0, 200), st.data())
def test_bytes_are_conserved_and_capacity_holds(
    policy: str, texts: list[list[int]], capacity: int, data: st.DataObject
) -> None:
    resident, added = tier(capacity, policy), 0
    for tick, chain in enumerate(names(texts), 1):
        behind = data.draw(st.integers(0, chain.num_blocks - 1))
        before, new, since = held(resident), 0, behind
        for first, last in missing_ranges(resident.match(chain), behind, chain.num_blocks):
            boundaries = data.draw(st.sets(st.integers(since + 1, max(since + 1, last))))
            kept = sorted(b for b in boundaries if b <= last)
            one = resident.write(chain.head(last), first, kept, tick)
            added += one.chunks * SIZES.chunk_bytes + len(one.checkpoints) * SIZES.checkpoint_bytes
            new, since = new + one.chunks, last
        assert new >= len(held(resident) - before)
        assert resident.used_bytes == added - resident.evicted_bytes
        resident.check_integrity()
    assert resident.make_room(capacity) == capacity
    assert list(resident.runs()) == []


def test_a_missing_run_is_removed_with_the_last_chunk_after_it() -> None:
    resident = tier(50)
    one, other, third = names([[0, 1, 2, 3], [0, 1, 7, 8], [9] * 5])
    assert hold(resident, one, 2, 1) == 2
    assert hold(resident, other, 2, 2) == 2
    assert next((run.is_missing, run.count) for run in resident.runs()) == (True, 2)
    assert resident.make_room(30) == 30
    assert [resident.match(x).chunks for x in (one, other)] == [2, 4]
    assert hold(resident, third, 0, 3) == 5
    assert [run.count for run in resident.runs()] == [5]


def test_a_missing_run_is_filled_as_far_as_there_is_room() -> None:
    resident = tier(50)
    (chain,) = names([[0, 1, 2, 3, 4, 5, 6]])
    assert hold(resident, chain, 4, 1) == 3
    run = resident.match(chain).path[-1]
    resident.pin(run)
    assert hold(resident, chain, 0, 2) == 2
    assert resident.usable(chain, 0).chunks == 2
    assert resident.usable(chain, 3).chunks == 2
    assert resident.usable(chain, 4).chunks == 7
    resident.unpin(run)
    resident.check_integrity()


@pytest.mark.parametrize("room", range(11))
def test_a_missing_run_may_be_larger_than_the_tier(room: int) -> None:
    """The chunks after it are evicted for its beginning."""
    resident = tier(10 * room)
    (chain,) = names([list(range(10))])
    assert hold(resident, chain, 8, 1) == min(2, room)
    filled = resident.write(chain.head(8), 0, (), 2) if room else None
    resident.check_integrity()
    if filled:
        assert (filled.chunks, resident.usable(chain, 0).chunks) == (min(8, room), room)
    assert resident.make_room(10 * room) == 10 * room
    assert list(resident.runs()) == []


def test_integrity_is_checked() -> None:
    resident = tier()
    (chain,) = names([[0, 1, 2]])
    hold(resident, chain, 2, 1)
    resident.check_integrity()
    (gap, _) = resident.runs()
    gap.children.clear()
    with pytest.raises(AssertionError):
        resident.check_integrity()
