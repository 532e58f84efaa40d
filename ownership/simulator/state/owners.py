"""The owner of each chunk in a simulated fleet, as the directory's records would say it.

The first worker that claims a chunk owns it until it has the chunk no more. A copy at any other
worker is a replica, whether it was read or computed there. The directory keeps a record of each
artifact with tokens and leases; here it is one name for each chunk, and the owner is asked whether
it still has the chunk when another worker claims it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns

ChunkRanges = Sequence[tuple[int, int]]
"""Ranges of a chain's chunks, `(start, end)`, in order. They may overlap."""
OwnedChunks = Callable[[str, BlockRuns], ChunkRanges]
"""(worker, chain) -> the ranges that the worker has, replicas not counted."""


class OwnedSpan(NamedTuple):
    """The chunks of a chain from the end of the span before up to `end`."""

    end: int
    owner: str


class ChunkOwners:
    """The owners of a fleet's chunks. A chunk's id names its whole prefix."""

    def __init__(self, owned: OwnedChunks) -> None:
        self.owned = owned
        self._names: dict[int, str] = {}

    def claim(self, name: str, chain: BlockRuns, first: int) -> list[OwnedSpan]:
        """Claim the chunks after a chain's first ones for a worker; return their owners."""
        recorded = self._recorded(name, chain, first)
        if len(recorded) == 1 and recorded[0].owner == name:
            return recorded
        spans: list[OwnedSpan] = []
        begin = first
        for last, owner in recorded:
            kept = () if owner == name else self.owned(owner, chain.head(last))
            for start, end in (*kept, (last, last)):
                start, end = min(max(start, begin), last), min(end, last)
                if owner != name and start > begin:
                    lost = chain.head(start).tail(begin).ids().tolist()
                    self._names.update(dict.fromkeys(lost, name))
                for upto, of in ((start, name), (end, owner)):
                    if upto > begin:
                        append_span(spans, OwnedSpan(upto, of))
                        begin = upto
        return spans

    def _recorded(self, name: str, chain: BlockRuns, first: int) -> list[OwnedSpan]:
        """Record `name` for chunks without an owner; return the recorded owners of all."""
        spans: list[OwnedSpan] = []
        names, end, last = self._names, first, name
        for start, count in chain.tail(first).runs:
            chunks = range(start, start + count)
            if last == name and names.keys().isdisjoint(chunks):  # the usual case: all are new
                names.update(dict.fromkeys(chunks, name))
                end += count
                continue
            for chunk in chunks:
                owner = names.setdefault(chunk, name)
                if owner != last:
                    if end > first:
                        spans.append(OwnedSpan(end, last))
                    last = owner
                end += 1
        return [*spans, OwnedSpan(end, last)]


def append_span(spans: list[OwnedSpan], span: OwnedSpan) -> None:
    """Append a span, joined with the one before it if both have the same owner."""
    if spans and spans[-1].owner == span.owner:
        spans.pop()
    spans.append(span)


def are_covered(ranges: ChunkRanges, start: int, end: int) -> bool:
    """Return True if the ranges contain every chunk from `start` to `end`."""
    for begins, ends in ranges:
        if begins <= start < ends:
            start = ends
    return start >= end
