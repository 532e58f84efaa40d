"""What an eviction policy hits of prompts in a fixed order: to be held against `belady_hits`."""

from __future__ import annotations

from collections.abc import Iterable

from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from ownership.simulator.state.memory import Eviction, emptied_by
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes
from ownership.simulator.traces.block_runs import BlockRuns


def policy_hits(
    chains: Iterable[BlockRuns],
    capacity_chunks: int,
    eviction: Eviction,
    chunk_tokens: int = 256,
    seconds_saved: SecondsSaved = default_seconds_saved,
) -> int:
    """Chunks found by prompts that come one after the other, in a tier of so many chunks.

    `chunk_tokens` and `seconds_saved` matter to policies that ask what a chunk is worth.
    """
    tick = hits = 0
    sizes = ChunkSizes(chunk_tokens, 1, 0)
    tier = emptied_by(
        ResidentChunks, eviction, sizes, capacity_chunks, StateType.DENSE_KV, seconds_saved,
        lambda: tick,
    )  # fmt: skip
    for chain in chains:
        tick += 1
        hits += tier.find(chain).chunks
        tier.add(chain, chain.num_blocks, (), tick)
    return hits
