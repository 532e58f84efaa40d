"""The chunks of a prompt, from the blocks of its trace."""

from __future__ import annotations

import math

from ownership.simulator.traces.block_runs import BlockRuns

_RESIDUE = 1 << 52
"""Above every id of a trace: keeps names of different places in a chunk apart."""


def chunk_runs(blocks: BlockRuns, blocks_per_chunk: int) -> BlockRuns:
    """The full chunks of `blocks_per_chunk` blocks, under ids of their own.

    A chunk is named by its last block, which names the whole prefix. Within a run those are
    `blocks_per_chunk` apart; here they are numbered so that they follow each other.
    """
    if blocks_per_chunk == 1:
        return blocks
    runs, place = [], 0
    for first, count in blocks.runs:
        before, after = place // blocks_per_chunk, (place + count) // blocks_per_chunk
        if after > before:
            last_of_first = first + (before + 1) * blocks_per_chunk - 1 - place
            number, residue = divmod(last_of_first, blocks_per_chunk)
            runs.append((residue * _RESIDUE + number, after - before))
        place += count
    return BlockRuns(tuple(runs))


def chunk_tokens_for(block_tokens: int, alignment: int, at_least: int = 256) -> int:
    """The least multiple of a trace's blocks and a model's alignment of so many tokens."""
    step = math.lcm(block_tokens, alignment)
    return -(-at_least // step) * step
