"""The most that any eviction policy can hit: Belady's MIN over prompts in a fixed order.

A hit is a chunk that was kept from one use to the next. After each prompt at most so many chunks
are kept as fit; of all that could be, MIN keeps those that are used again first. With chunks of one
size that gives the most hits there can be (Belady 1966; as a choice of intervals of which no more
than `capacity` overlap: Carlisle and Lloyd 1995). A chunk is never used again later than those
behind it, so what is kept are prefixes, and every hit is one that an engine can use.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from ownership.simulator.traces.block_runs import BlockRuns


def belady_hits(chains: Sequence[BlockRuns], capacity_chunks: int) -> int:
    """Chunks found by prompts that come one after the other. O(n log n) in all their chunks."""
    lengths = [chain.num_blocks for chain in chains]
    if not sum(lengths):
        return 0
    ids = np.concatenate([chain.ids() for chain in chains])
    prompts = np.repeat(np.arange(len(chains)), lengths)
    next_use = _next_uses(ids, prompts, len(chains)).tolist()
    kept: dict[int, int] = {}
    """By chunk: the prompt that uses it next."""
    latest: list[tuple[int, int]] = []
    """(-next use, chunk), some of them out of date."""
    hits, place, listed = 0, 0, ids.tolist()
    for length in lengths:
        for at in range(place, place + length):
            chunk, following = listed[at], next_use[at]
            hits += chunk in kept
            if following < len(chains):
                kept[chunk] = following
                heapq.heappush(latest, (-following, chunk))
            else:
                kept.pop(chunk, None)
        while len(kept) > capacity_chunks:
            following, chunk = heapq.heappop(latest)
            if kept.get(chunk) == -following:
                del kept[chunk]
        place += length
    return hits


def _next_uses(
    ids: np.ndarray[tuple[int], np.dtype[np.int64]],
    prompts: np.ndarray[tuple[int], np.dtype[np.int64]],
    never: int,
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """[chunks] the prompt that uses each next; `never` where none does."""
    order = np.argsort(ids, kind="stable")
    following = np.full(len(ids), never, np.int64)
    again = ids[order[1:]] == ids[order[:-1]]
    following[order[:-1][again]] = prompts[order[1:][again]]
    return following
