from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
from hypothesis import given

from ownership.simulator.traces.block_runs import BlockRuns

distinct_ids = st.lists(st.integers(0, 60), unique=True)


def chained(left: list[int], right: list[int]) -> tuple[BlockRuns, BlockRuns]:
    """Two prompts whose ids name prefixes: equal up to where they part, never afterwards."""
    shared = 0
    while shared < min(len(left), len(right)) and left[shared] == right[shared]:
        shared += 1
    apart = [*right[:shared], *(1000 + id_ for id_ in right[shared:])]
    return BlockRuns.of_ids(left), BlockRuns.of_ids(apart)


def test_a_prompt_of_three_runs() -> None:
    blocks = BlockRuns.of_ids([1, 2, 3, 7, 8, 5])
    assert blocks.runs == ((1, 3), (7, 2), (5, 1))
    assert blocks.num_blocks == 6
    assert blocks.ids().tolist() == [1, 2, 3, 7, 8, 5]


def test_runs_that_continue_each_other_are_one() -> None:
    assert BlockRuns.of_runs([(4, 0), (1, 2), (3, 4), (0, 0), (9, 1)]).runs == ((1, 6), (9, 1))


@given(st.lists(st.integers(0, 20)))
def test_ids_survive_the_round_trip(ids: list[int]) -> None:
    blocks = BlockRuns.of_ids(ids)
    assert blocks.ids().tolist() == ids
    assert BlockRuns.of_runs(blocks.runs) == blocks
    assert BlockRuns.of_runs((id_, 1) for id_ in ids) == blocks


@given(distinct_ids, st.integers(0, 12))
def test_head_and_tail_cut_a_prompt_in_two(ids: list[int], at: int) -> None:
    blocks = BlockRuns.of_ids(ids)
    assert blocks.head(at).ids().tolist() == ids[:at]
    assert blocks.tail(at).ids().tolist() == ids[at:]


@given(distinct_ids, distinct_ids, st.integers(0, 8))
def test_the_blocks_that_two_prompts_share(left: list[int], right: list[int], same: int) -> None:
    first, second = chained(left, [*left[:same], *right])
    expected = np.equal(
        first.ids()[: (n := min(first.num_blocks, second.num_blocks))], second.ids()[:n]
    )
    shared = int(np.argmin(expected)) if not expected.all() else n
    assert first.shared_with(second) == second.shared_with(first) == shared
