"""A tier as runs of chunks is the same as a tier of chunks."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.eviction import LeafLru, Value
from hetero_connector.store.catalog.seconds_saved import default_seconds_saved
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes, Run
from tests.clock import Clock
from tests.ownership.simulator.state.few_chunks import SIZES, names, prompts


def tier(capacity: int, sizes: ChunkSizes = SIZES) -> ResidentChunks:
    return ResidentChunks(sizes, capacity, LeafLru(), StateType.DENSE_KV)


def held(resident: ResidentChunks) -> set[int]:
    return {run.first + i for run in resident.runs() for i in range(run.count)}


class ChunkByChunk:
    """Leaves first, the least recently used of them, the deepest of equals: one chunk at a time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[tuple[int, ...], int] = {}

    def add(self, chain: Sequence[int], tick: int) -> None:
        here = 0
        while here < len(chain) and tuple(chain[: here + 1]) in self.used:
            here += 1
        kept = {tuple(chain[: i + 1]) for i in range(here)}
        self.used |= dict.fromkeys(kept, tick)
        wanted = len(chain) - here
        while len(self.used) + wanted > self.capacity:
            parents = {path[:-1] for path in self.used}
            leaves = self.used.keys() - parents - kept
            if not leaves:
                break
            del self.used[min(leaves, key=lambda path: (self.used[path], -len(path)))]
        wanted = min(wanted, self.capacity - len(self.used))
        for depth in range(here, here + wanted):
            self.used[tuple(chain[: depth + 1])] = tick

    def held(self) -> set[int]:
        return {path[-1] for path in self.used}


@given(prompts, st.integers(0, 25))
def test_runs_hold_what_single_chunks_would(texts: list[list[int]], capacity: int) -> None:
    runs, chunks = tier(capacity * SIZES.chunk_bytes), ChunkByChunk(capacity)
    for tick, chain in enumerate(names(texts), 1):
        _, new, _ = runs.add(chain, chain.num_blocks, (), tick)
        before = chunks.held()
        chunks.add(chain.ids().tolist(), tick)
        assert held(runs) == chunks.held()
        assert new == len(held(runs) & set(chain.ids().tolist()) - before)
        runs.check_integrity()


@pytest.mark.parametrize("policy", ["leaf_lru", "value"])
@given(prompts, st.integers(0, 300), st.data())
def test_bytes_are_conserved_and_capacity_holds(
    policy: str, texts: list[list[int]], capacity: int, data: st.DataObject
) -> None:
    clock = Clock(0.0)
    value = Value(default_seconds_saved.in_prefills, clock)
    made = {"leaf_lru": LeafLru(), "value": value}
    resident = ResidentChunks(
        SIZES, capacity, made[policy], StateType.DENSE_KV,
        by_recency=policy != "value",
    )  # fmt: skip
    added = reserved = 0
    for chain in names(texts):
        clock.passes(1.0)
        wanted, free = data.draw(st.integers(0, 40)), capacity - resident.reserved_bytes
        used = resident.used_bytes
        if resident.reserve(wanted):
            reserved += wanted
        else:
            assert (resident.used_bytes, wanted > free) == (used, True)
        boundaries = data.draw(st.sets(st.integers(1, chain.num_blocks)))
        _, chunks, checkpoints = resident.add(chain, chain.num_blocks, sorted(boundaries), clock())
        added += chunks * SIZES.chunk_bytes + len(checkpoints) * SIZES.checkpoint_bytes
        assert resident.reserved_bytes == reserved
        assert resident.used_bytes == added - resident.evicted_bytes
        resident.check_integrity()
    resident.release(reserved)
    assert resident.make_room(capacity) == capacity
    assert (resident.used_bytes, list(resident.runs())) == (0, [])


def test_pinned_chunks_stay() -> None:
    resident = tier(40)
    one, other = names([[0, 1, 2], [5, 6, 7]])
    run, *_ = resident.add(one.head(2), 2, (), 1)
    resident.pin(run)
    assert resident.add(other, 3, (), 2)[1] == 2
    assert resident.match(one).chunks == 2
    resident.unpin(run)
    assert resident.add(other, 3, (), 3)[1] == 1
    assert resident.match(one).chunks == 1


def test_nothing_leaves_for_what_does_not_fit() -> None:
    resident = tier(40)
    one, other = names([[0, 1, 2], [5, 6, 7]])
    run, *_ = resident.add(one.head(2), 2, (), 1)
    resident.pin(run)
    resident.add(other.head(2), 2, (), 2)
    assert not resident.reserve(21)
    assert resident.match(other).chunks == 2
    assert resident.reserve(20)
    assert (resident.match(other).chunks, resident.match(one).chunks) == (0, 2)


@given(prompts, st.booleans(), st.data())
def test_what_pins_hold_is_counted(
    texts: list[list[int]], pins_checkpoints: bool, data: st.DataObject
) -> None:
    """So a reservation fits if and only if all the rest may leave."""
    resident = ResidentChunks(
        SIZES, 250, LeafLru(), StateType.DENSE_KV, pins_checkpoints=pins_checkpoints
    )
    pinned: list[Run] = []
    for tick, chain in enumerate(names(texts), 1):
        boundaries = sorted(data.draw(st.sets(st.integers(1, chain.num_blocks))))
        run, *_ = resident.add(chain, chain.num_blocks, boundaries, tick)
        if data.draw(st.booleans()):
            resident.pin(run)
            pinned.append(run)
        if pinned and data.draw(st.booleans()):
            resident.unpin(pinned.pop(0))
        resident.check_integrity()
    before, wanted = held(resident), data.draw(st.integers(0, 260))
    fits = resident.reserve(wanted)
    resident.check_integrity()
    assert fits or held(resident) == before
    room = resident.make_room(250)
    assert fits or room < wanted


def test_an_older_run_leaves_before_the_rest_of_the_current_victim() -> None:
    resident = tier(100)
    oldest, older, newest = names([[0, 1, 2], [5, 6, 7], [9, 9, 9]])
    pinned, *_ = resident.add(oldest, 3, (), 1)
    resident.pin(pinned)
    for tick, chain in ((2, older), (3, newest)):
        resident.add(chain, 3, (), tick)
    assert resident.make_room(20) == 20
    assert resident.match(older).chunks == 2
    resident.unpin(pinned)
    assert resident.make_room(40) == 40
    assert [resident.match(x).chunks for x in (oldest, older, newest)] == [1, 2, 3]
    resident.use(resident.match(oldest), 4)
    assert resident.make_room(60) == 60
    assert [resident.match(x).chunks for x in (oldest, older, newest)] == [1, 0, 3]


def test_a_pin_outlives_a_split() -> None:
    resident = tier(1000)
    long, short = names([[0, 1, 2, 3], [0, 1, 9]])
    run, *_ = resident.add(long, 4, (), 1)
    resident.pin(run)
    resident.add(short, 3, (), 2)
    assert resident.make_room(1000) == 1000 - 40
    assert (resident.match(long).chunks, resident.match(short).chunks) == (4, 2)
    resident.unpin(run)
    assert resident.make_room(1000) == 1000


def test_the_deepest_checkpoint_within_reach() -> None:
    resident = tier(1000)
    chain, branch = names([[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 9]])
    resident.add(chain, 6, [2, 4, 6], 1)
    found = resident.match(branch)
    assert (found.chunks, found.deepest_checkpoint(9), found.deepest_checkpoint(3)) == (4, 4, 2)
    assert list(found.checkpoints()) == [4, 2]
    resident.use(found, 2)  # splits the run
    assert list(resident.match(chain).checkpoints()) == [6, 4, 2]
    assert resident.match(branch).deepest_checkpoint(1) == 0


@given(prompts, st.integers(0, 60))
def test_checkpoints_of_pinned_chunks_leave_last_if_they_are_not_pinned(
    texts: list[list[int]], wanted: int
) -> None:
    resident = ResidentChunks(SIZES, 150, LeafLru(), StateType.DENSE_KV, pins_checkpoints=False)
    for tick, chain in enumerate(names(texts), 1):
        run, *_ = resident.add(chain, chain.num_blocks, range(1, chain.num_blocks + 1), tick)
        resident.pin(run)
        held_before, free_before = held(resident), 150 - resident.used_bytes
        checkpoints = sum(len(run.checkpoints) for run in resident.runs())
        free = resident.make_room(wanted)
        assert held(resident) == held_before, "chunks are pinned"
        assert free == 150 - resident.used_bytes
        assert free >= min(wanted, free_before + checkpoints * SIZES.checkpoint_bytes)
        assert free < max(wanted, free_before + 1) + SIZES.checkpoint_bytes
        resident.check_integrity()


def test_integrity_is_checked() -> None:
    resident = tier(1000)
    (chain,) = names([[0, 1]])
    run, *_ = resident.add(chain, 2, (), 1)
    run.count = 1
    with pytest.raises(AssertionError):
        resident.check_integrity()
    assert isinstance(run, Run)
