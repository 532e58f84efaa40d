"""MIN by hand, against every choice there is, and against the store's policies."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.research.belady import belady_hits, policy_hits
from hetero_connector.store.base import EvictionName
from ownership.simulator.state.memory import EVICTIONS
from ownership.simulator.traces.block_runs import BlockRuns


def chains_of(*prompts: Sequence[int]) -> list[BlockRuns]:
    return [BlockRuns.of_ids(list(prompt)) for prompt in prompts]


@st.composite
def prompts(draw: st.DrawFn, most: int = 8) -> list[BlockRuns]:
    """Prompts of up to four chunks; an id names the whole prefix."""
    texts = draw(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=most))
    return chains_of(*([int(f"1{t[: i + 1]}", 36) for i in range(len(t))] for t in texts))


def test_the_hits_of_a_worked_example() -> None:
    """a b c a c b a: with room for two a and c are kept, then a; with room for one only a."""
    chains = chains_of([1], [20], [300], [1], [300], [20], [1])
    assert belady_hits(chains, 2) == 3
    assert belady_hits(chains, 1) == 2
    assert belady_hits(chains, 0) == 0
    assert belady_hits(chains, 3) == 4


@given(prompts(most=5), st.integers(0, 4))
def test_nothing_hits_more_than_min(chains: list[BlockRuns], room: int) -> None:
    ids = [frozenset(chain.ids().tolist()) for chain in chains]

    @cache
    def most(at: int, held: frozenset[int]) -> int:
        if at == len(ids):
            return 0
        known = held | ids[at]
        kept = (frozenset(x) for x in combinations(sorted(known), min(room, len(known))))
        return len(held & ids[at]) + max(most(at + 1, x) for x in kept)

    assert belady_hits(chains, room) == most(0, frozenset())


@given(prompts(), st.integers(4, 9))
def test_no_eviction_policy_hits_more(chains: list[BlockRuns], room: int) -> None:
    best = belady_hits(chains, room)
    for eviction in EVICTIONS:
        assert policy_hits(chains, room, eviction) <= best


@pytest.mark.parametrize("eviction", EVICTIONS)
def test_with_room_for_all_every_policy_hits_what_repeats(eviction: EvictionName) -> None:
    chains = chains_of([1, 2, 3], [1, 2, 30], [1, 2, 3])
    assert policy_hits(chains, 4, eviction) == belady_hits(chains, 4) == 5
