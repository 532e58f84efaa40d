"""Short chunks: the last, unfinished chunk of a prompt that one worker hands off to another."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from hetero_connector.spec.state_types import StateType
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.shape import StateShape
from ownership.simulator.traces.block_runs import BlockRuns


class ShortChunk(NamedTuple):
    """Of one prompt. In a tier it is a chunk behind the full ones, and takes a slot as they do."""

    name: int
    """In place of a block's; nobody else's, for traces do not say what its tokens are."""
    before: int
    """Full chunks before it."""
    start: int
    end: int
    """Tokens of the prompt up to its last."""

    def behind(self, chain: BlockRuns) -> BlockRuns:
        """The prompt's full chunks, and it."""
        return BlockRuns.of_runs((*chain.head(self.before).runs, (self.name, 1)))


def short_chunk(
    shape: StateShape, chain: BlockRuns, prompt_tokens: int, name: int
) -> ShortChunk | None:
    """The short chunk that ends where a prompt is resumed after a handoff; None: a full one does.

    `name`: for it, where the trace has none for a prompt's unfinished block.
    """
    if StateType.RECURRENT in shape.model.state_types:
        return None  # that is kept where full chunks end
    size, end = shape.chunk_tokens, shape.model.handoff_end(prompt_tokens)
    before, rest = divmod(end, size)
    if not rest:
        return None
    unfinished = chain.tail(before).runs if prompt_tokens // size == before else ()
    if unfinished:
        name = unfinished[0][0]
    return ShortChunk(name, before, before * size, end)


def longest(
    known: Iterable[ShortChunk], chain: BlockRuns, chunks: int, dram: ResidentChunks
) -> ShortChunk | None:
    """The longest that DRAM has whole behind a prompt's first `chunks` chunks.

    `known`: those that the prompt begins with.
    """
    here = (short for short in known if short.before == chunks and _is_whole(short, chain, dram))
    return max(here, key=lambda short: short.end, default=None)


def _is_whole(short: ShortChunk, chain: BlockRuns, dram: ResidentChunks) -> bool:
    found = dram.find(short.behind(chain))
    if found.chunks <= short.before:
        return False
    return not dram.sizes.checkpoint_bytes or found.deepest_checkpoint(found.chunks) > short.before
