from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ownership.simulator.figures import ChunkSet
from ownership.simulator.traces.block_runs import BlockRuns


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=12))
def test_chunks_are_counted_once(runs: list[tuple[int, int]]) -> None:
    chunks, each = ChunkSet(), set()
    for first, count in runs:
        chunks.add(BlockRuns(((first, count),)))
        each |= set(range(first, first + count))
    assert (chunks.total(), chunks.distinct()) == (sum(n for _, n in runs), len(each))
