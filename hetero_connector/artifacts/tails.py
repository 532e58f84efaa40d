"""Finding the last chunk of a restore: a short one, or one that is longer than what is restored."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange, StoredChunk
from hetero_connector.containers import BoundedDict


class Matches(Protocol):
    """A store, or an index alone."""

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return the longest stored prefix of `chain`."""
        ...

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Return the lengths, in tokens, of the newest few short chunks after `parent`."""
        ...


def longest_tail(
    known: Matches,
    chain: RequestChain,
    last: ChunkRange | None,
    limit_tokens: int,
    more_than: int = 0,
    maybe: int = 0,
) -> list[StoredChunk]:
    """Find the longest stored short chunk of `chain` after `last` (None: at the beginning).

    It ends at or before `limit_tokens` and has more tokens than `more_than`. Empty if there is
    none. `maybe`: a length to try in addition to those in `tails`; 0 for none.
    """
    key, start = (last.key, last.end) if last else (ROOT, 0)
    for length in sorted({*known.tails(key), maybe}, reverse=True):
        if more_than < length <= limit_tokens - start:
            found = known.match([chain.ending_at(start + length)])
            if found:
                return found
    return []


def chunk_beyond(
    known: Matches, chain: RequestChain, last: ChunkRange | None, limit_tokens: int
) -> list[StoredChunk]:
    """Find the longest stored chunk of `chain` after `last` that ends after `limit_tokens`.

    It is full or short; empty if there is none.
    """
    start = last.end if last else 0
    end = min(chain.num_tokens, start + chain.chunk_tokens)
    return longest_tail(known, chain, last, end, limit_tokens - start, chain.chunk_tokens)


class AnsweredPrompts:
    """The newest chunks with the last tokens of a prompt and the first of its answer.

    A chunk's key covers the answer, which a request that sends the same prompt again does not know.
    Here it is found by the key of its tokens up to the prompt's last cut (`ModelSpec.last_cut`).
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._chunks = BoundedDict[ChunkKey, ChunkRange](capacity)

    def add(self, chain: RequestChain, cut: int, chunk: ChunkRange) -> None:
        """Add a chunk of `chain`. Beyond the capacity the oldest is dropped."""
        self._chunks[chain.ending_at(cut).key] = chunk

    def find(self, known: Matches, chain: RequestChain, start: int, cut: int) -> list[StoredChunk]:
        """Find the stored chunk that begins at `start` and is the same as `chain` up to `cut`.

        It may end after the chain's last token; empty if there is none.
        """
        chunk = self._chunks.get(chain.ending_at(cut).key)
        return known.match([chunk]) if chunk is not None and chunk.start == start else []
