"""Where an engine's own prefix cache keeps the state that a request needs to resume.

Prefix-proportional pages stay wherever they were full. Windows and recurrent state move on with a
request, and vLLM keeps few of them (`prefix_cache_retention_interval`; `reachable_block_mask` in
vllm/v1/core/single_type_kv_cache_manager.py): not those at the end of an answer.
"""

from __future__ import annotations

import math
from itertools import chain, pairwise
from typing import NamedTuple


class Retention(NamedTuple):
    """vLLM's rule."""

    chunk_tokens: int
    interval: int | None = 0
    """Tokens between two boundaries that are kept in any case; 0: none, None: every boundary."""
    window_chunks: int = 1
    """Chunks before a boundary that the longest window reaches into."""

    def boundaries(
        self, prompt_tokens: int, junction: int, local: int, first: int, last: int
    ) -> list[int]:
        """Those kept of the boundaries `first` to `last`, in chunks, ascending.

        Besides the interval's: where the same prompt resumes when it is sent again, the `junction`,
        up to which the prompt's pages were cached though it could not resume there, and `local`,
        where it did.
        """
        first = max(first, 1)
        if last < first:
            return []
        special = {(prompt_tokens - 1) // self.chunk_tokens, junction, local}
        kept = {boundary for boundary in special if first <= boundary <= last}
        # Of a window at the interval's next boundary the chunks up to `last` are kept already.
        kept.update(self._regular(first, last + self.window_chunks - 1))
        return [boundary for boundary in self._closed(sorted(kept)) if boundary <= last]

    def _closed(self, kept: list[int]) -> list[int]:
        """With those between two that are so near that their windows leave no gap."""
        if self.window_chunks == 1:
            return kept
        near = (range(a + 1, b) for a, b in pairwise(kept) if b - a <= self.window_chunks)
        return sorted({*kept, *chain.from_iterable(near)})

    def _regular(self, first: int, last: int) -> range:
        if self.interval == 0:
            return range(0)
        tokens = self.chunk_tokens if self.interval is None else self.interval
        step = math.lcm(tokens, self.chunk_tokens) // self.chunk_tokens
        return range(-(-first // step) * step, last + 1, step)
