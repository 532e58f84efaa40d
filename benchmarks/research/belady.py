"""Hits of eviction policies over those of Belady's MIN, the most that any policy can hit.

Prompts come in a fixed order. A hit is a chunk that was kept from one use to the next. After each
prompt MIN keeps the chunks that are used again first, as many as fit. With chunks of one size that
gives the most hits (Belady 1966; as a choice of intervals of which no more than `capacity` overlap:
Carlisle and Lloyd 1995). A chunk is used again no later than those after it, so MIN keeps prefixes,
and an engine can use every hit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from hetero_connector.containers import ExpiringHeap
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import EvictionName
from hetero_connector.store.catalog.seconds_saved import SecondsSaved, default_seconds_saved
from ownership.simulator.state.memory import make_tier
from ownership.simulator.state.resident import ResidentChunks
from ownership.simulator.state.runs import ChunkSizes
from ownership.simulator.traces.block_runs import BlockRuns


def policy_hits(
    chains: Iterable[BlockRuns],
    capacity_chunks: int,
    eviction: EvictionName,
    chunk_tokens: int = 256,
    seconds_saved: SecondsSaved = default_seconds_saved,
) -> int:
    """Count the chunks that prompts find, one after the other, in a tier of `capacity_chunks`.

    `chunk_tokens` and `seconds_saved` matter to policies that ask for the value of a chunk.
    """
    tick = hits = 0
    sizes = ChunkSizes(chunk_tokens, 1, 0)
    tier = make_tier(
        ResidentChunks, eviction, sizes, capacity_chunks, StateType.DENSE_KV, seconds_saved,
        lambda: tick,
    )  # fmt: skip
    for chain in chains:
        tick += 1
        hits += tier.match(chain).chunks
        tier.add(chain, chain.num_blocks, (), tick)
    return hits


def belady_hits(chains: Sequence[BlockRuns], capacity_chunks: int) -> int:
    """Count the chunks that prompts find under MIN. O(n log n) in all their chunks."""
    lengths = [chain.num_blocks for chain in chains]
    if not sum(lengths):
        return 0
    ids = np.concatenate([chain.ids() for chain in chains])
    prompts = np.repeat(np.arange(len(chains)), lengths)
    next_use = _next_uses(ids, prompts, len(chains)).tolist()
    kept: dict[int, int] = {}
    """For each chunk, the prompt that uses it next."""
    latest_first: ExpiringHeap[int, int] = ExpiringHeap(kept)
    hits, place, listed = 0, 0, ids.tolist()
    for length in lengths:
        for at in range(place, place + length):
            chunk, following = listed[at], next_use[at]
            hits += chunk in kept
            if following < len(chains):
                kept[chunk] = following
                latest_first.push(-following, chunk, following)
            else:
                kept.pop(chunk, None)
        while len(kept) > capacity_chunks:
            evicted = latest_first.pop_due(math.inf)
            assert evicted is not None
            del kept[evicted]
        place += length
    return hits


def _next_uses(
    ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    prompts: np.ndarray[tuple[int], np.dtype[np.int64]],
    never: int,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the prompt that uses each chunk next, `[chunks]`; `never` if none does."""
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), never, np.int64)
    again = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][again]] = prompts[order[1:][again]]
    return following
