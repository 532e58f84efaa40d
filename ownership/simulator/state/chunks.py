"""The chunks of a prompt, made from the blocks of its trace."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hetero_connector.spec.state_types import StateType
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns

_RESIDUE = 1 << 52
"""Greater than every id of a trace; separates chunks that end at different places of a run."""


def chunk_runs(blocks: BlockRuns, blocks_per_chunk: int) -> BlockRuns:
    """Return the full chunks of `blocks_per_chunk` blocks, as runs of ids of their own.

    The last block of a chunk names its whole prefix, so it names the chunk. Within a run of blocks
    those ids are `blocks_per_chunk` apart; the chunks' ids are consecutive.
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
    """Return the smallest common multiple of blocks and alignment with at least so many tokens."""
    step = math.lcm(block_tokens, alignment)
    return -(-at_least // step) * step


class ShortChunk(NamedTuple):
    """The unfinished last chunk of a prompt that one worker hands off to another.

    In a tier it is a chunk after the full ones and takes a slot as they do.
    """

    id: int
    """An id of its own: no other prompt has it."""
    before: int
    """Number of full chunks before it."""
    start: int
    end: int
    """First token, and the token after its last."""

    def appended_to(self, chain: BlockRuns) -> BlockRuns:
        """Return the prompt's full chunks with this one after them."""
        return BlockRuns.of_runs((*chain.head(self.before).runs, (self.id, 1)))


def short_chunk(shape: StateShape, prompt_tokens: int, unused_id: int) -> ShortChunk | None:
    """Make the short chunk that ends where a prompt resumes after a handoff.

    None if a full chunk ends there. `unused_id`: an id that no block has.
    """
    if StateType.RECURRENT in shape.model.state_types:
        return None  # recurrent state is kept at the end of full chunks only
    size, end = shape.chunk_tokens, shape.model.handoff_end(prompt_tokens)
    before, rest = divmod(end, size)
    if not rest:
        return None
    return ShortChunk(unused_id, before, before * size, end)


def longest_short_chunk(
    known: Iterable[ShortChunk], chain: BlockRuns, chunks: int, dram: ResidentChunks
) -> ShortChunk | None:
    """Return the longest of `known` that DRAM has right after a prompt's first `chunks` chunks."""
    here = (x for x in known if x.before == chunks and _is_complete(x, chain, dram))
    return max(here, key=lambda short: short.end, default=None)


def _is_complete(short: ShortChunk, chain: BlockRuns, dram: ResidentChunks) -> bool:
    match = dram.match(short.appended_to(chain))
    if match.chunks <= short.before:
        return False
    return not dram.sizes.checkpoint_bytes or match.deepest_checkpoint(match.chunks) > short.before
