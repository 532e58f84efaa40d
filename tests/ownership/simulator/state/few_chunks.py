"""Small prompts and small chunks for a simulated tier."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from ownership.simulator.state.runs import ChunkSizes
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.prefix_tree import PrefixTree

SIZES = ChunkSizes(256, 10, 3)

prompts = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=12), max_size=30)


def names(texts: Sequence[Sequence[int]]) -> list[BlockRuns]:
    tree = PrefixTree()
    return [tree.add(BlockRuns.of_ids(text)).names for text in texts]
