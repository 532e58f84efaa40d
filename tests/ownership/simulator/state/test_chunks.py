from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ownership.simulator.state.chunks import chunk_runs, chunk_tokens_for
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.prefix_tree import PrefixTree

texts = st.lists(st.lists(st.integers(0, 2), max_size=24), min_size=2, max_size=6)


@given(texts, st.integers(1, 5))
def test_chunks_are_equal_if_all_their_blocks_are(texts: list[list[int]], size: int) -> None:
    tree = PrefixTree()
    prompts = [(text, tree.add(BlockRuns.of_ids(text)).names) for text in texts]
    for text, blocks in prompts:
        chunks = chunk_runs(blocks, size).ids().tolist()
        assert len(chunks) == len(text) // size
        for other, other_blocks in prompts:
            others = chunk_runs(other_blocks, size).ids().tolist()
            for at, chunk in enumerate(chunks):
                end = (at + 1) * size
                same = text[:end] == other[:end] and len(other) >= end
                assert (chunk in others) == same


@pytest.mark.parametrize(
    ("block", "alignment", "tokens"),
    [(512, 256, 512), (64, 16, 256), (16, 256, 256), (24, 16, 288)],
)
def test_the_chunk_size_fits_blocks_and_model(block: int, alignment: int, tokens: int) -> None:
    assert chunk_tokens_for(block, alignment) == tokens
