"""Where a chain of full chunks ends, a shorter one may follow: the end of an earlier request."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, StoredChunk


class Matches(Protocol):
    """What knows stored chunks: a store, or an index by itself."""

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """The longest prefix of `chain` that is stored."""
        ...

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Token lengths of the short chunks under `parent`: the newest few."""
        ...


def longest_tail(
    known: Matches,
    chain: RequestChain,
    last: ChunkRange | None,
    limit_tokens: int,
    more_than: int = 0,
    maybe: int = 0,
) -> list[StoredChunk]:
    """The longest short chunk of `chain` that is stored after `last` (None: at its beginning).

    It ends at or before `limit_tokens` and has more tokens than `more_than`. Empty if there is
    none. `maybe`: a length to look for, whether `tails` names it or not; 0 for none.
    """
    key, start = (last.key, last.end) if last else (ROOT, 0)
    for length in sorted({*known.tails(key), maybe}, reverse=True):
        if more_than < length <= limit_tokens - start:
            found = known.match([chain.ending_at(start + length)])
            if found:
                return found
    return []
