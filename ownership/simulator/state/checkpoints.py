"""The boundaries that keep a checkpoint: in the store, and in the engine's own prefix cache.

The store's are chosen by the package's checkpoint policy, which is asked as an engine asks it. The
prefix cache's follow vLLM's rule: prefix-proportional pages stay wherever they were full, but
windows and recurrent state move on with a request, and vLLM keeps few of them
(`prefix_cache_retention_interval`; `reachable_block_mask` in
vllm/v1/core/single_type_kv_cache_manager.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain as joined
from itertools import pairwise
from typing import NamedTuple

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.planner.checkpoints import (
    Boundary,
    CheckpointPolicy,
    KeptBoundaries,
    Reuse,
)
from ownership.simulator.traces.block_runs import BlockRuns


class CheckpointKeeper:
    """The checkpoint policy of one worker, with the reuse that it learns from."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self._policy = policy
        self._kept = KeptBoundaries()

    def prompt(
        self, chain: BlockRuns, prompt_tokens: int, chunk_tokens: int, *,
        stored: int, local: int, resumed: int, fetched: int = 0,
    ) -> tuple[list[int], Reuse]:  # fmt: skip
        """Choose the boundaries to keep of a prompt that was computed from chunk `resumed` on.

        All counts are chunks: `stored` in the store, `local` in the engine's prefix cache,
        `fetched` up to the boundary that a peer sent with its checkpoint (0: none). Returns the
        boundaries and the reuse of the prompt.
        """
        boundaries = []
        if fetched and fetched == resumed:
            self._kept.add(_key(chain, fetched))
        reuse = self._kept.reuse(stored, local, _keys_backwards(chain, stored))
        for chunks in range(resumed + 1, prompt_tokens // chunk_tokens + 1):
            missed = stored - resumed if chunks == stored else 0
            boundary = Boundary.of_prompt(chunks, prompt_tokens, chunk_tokens, missed)
            if self._policy.should_keep(boundary):
                boundaries.append(chunks)
                if boundary.turn_end or missed:
                    self._kept.add(_key(chain, chunks))
        return boundaries, reuse

    def answer(
        self, chain: BlockRuns | None, prompt_chunks: int, chunks: int, reuse: Reuse
    ) -> list[int]:
        """Choose the boundaries to keep among those that an answer filled, and learn the reuse.

        `chain`: the request's `chunks` chunks with its answer; None if the answer is not known.
        """
        self._policy.observe(replace(reuse, new=max(0, chunks - reuse.matched)))
        if chain is None or not chunks:
            return []
        self._kept.add(_key(chain, chunks))
        decoded = range(prompt_chunks + 1, chunks)
        return [n for n in decoded if self._policy.should_keep(Boundary(n, False, 0))] + [chunks]


class Retention(NamedTuple):
    """vLLM's rule for the checkpoints in its prefix cache."""

    chunk_tokens: int
    interval: int | None = 0
    """Every multiple of so many tokens is kept; 0: none, None: every boundary."""
    window_chunks: int = 1
    """Number of chunks before a boundary that the longest window needs."""

    def boundaries(
        self, prompt_tokens: int, junction: int, local: int, first: int, last: int
    ) -> list[int]:
        """Return the boundaries kept from `first` to `last`, in chunks, ascending.

        Kept besides the interval's: the boundary where the same prompt would resume; the
        `junction`, the end of its cached pages if it could not resume there; and `local`, where it
        did resume.
        """
        first = max(first, 1)
        if last < first:
            return []
        special = {(prompt_tokens - 1) // self.chunk_tokens, junction, local}
        kept = {boundary for boundary in special if first <= boundary <= last}
        # The next regular boundary may have part of its window at or before `last`.
        kept.update(self._regular(first, last + self.window_chunks - 1))
        return [boundary for boundary in self._closed(sorted(kept)) if boundary <= last]

    def _closed(self, kept: list[int]) -> list[int]:
        """Add the boundaries between two whose windows touch."""
        if self.window_chunks == 1:
            return kept
        near = (range(a + 1, b) for a, b in pairwise(kept) if b - a <= self.window_chunks)
        return sorted({*kept, *joined.from_iterable(near)})

    def _regular(self, first: int, last: int) -> range:
        if self.interval == 0:
            return range(0)
        tokens = self.chunk_tokens if self.interval is None else self.interval
        step = math.lcm(tokens, self.chunk_tokens) // self.chunk_tokens
        return range(-(-first // step) * step, last + 1, step)


def _keys_backwards(chain: BlockRuns, chunks: int) -> Iterator[ChunkKey]:
    """Yield the keys of the first `chunks` chunks, the last one first."""
    for first, count in reversed(chain.head(chunks).runs):
        for number in range(first + count - 1, first - 1, -1):
            yield ChunkKey(number.to_bytes(16, "little"))


def _key(chain: BlockRuns, chunks: int) -> ChunkKey:
    return next(_keys_backwards(chain, chunks))
