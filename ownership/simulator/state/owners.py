"""Who owns each chunk of a simulated fleet: what the directory's records come to.

A chunk that is sealed is its first claimant's until that has it no more, or has died and its lease
has run out. What others compute of it meanwhile are replicas, as what they fetched is. The
directory keeps a record of each artifact, with tokens and expiries; here it is a name for each
chunk, and whether the owner still has it is asked when somebody else would like to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns

Stretches = Sequence[tuple[int, int]]
"""Of a chain, in order: from where, up to where. They may overlap."""
Owned = Callable[[str, BlockRuns], Stretches]
"""(worker, chain) -> what of the chain it has, and not as a replica."""


class Stretch(NamedTuple):
    """A chain's chunks up to `end`, from where the stretch before ends."""

    end: int
    owner: str


class Owners:
    """A fleet's. Chunks' names are their prefixes', so one name is one chunk."""

    def __init__(self, owned: Owned) -> None:
        self.owned = owned
        self._names: dict[int, str] = {}

    def claim(self, name: str, chain: BlockRuns, first: int) -> list[Stretch]:
        """Whose a chain's chunks are behind its first ones: a worker's that claims them, unless
        another has them."""
        recorded = self._recorded(name, chain, first)
        if len(recorded) == 1 and recorded[0].owner == name:
            return recorded
        stretches: list[Stretch] = []
        begin = first
        for last, owner in recorded:
            kept = () if owner == name else self.owned(owner, chain.head(last))
            for start, end in (*kept, (last, last)):
                start, end = min(max(start, begin), last), min(end, last)
                if owner != name and start > begin:
                    lost = chain.head(start).tail(begin).ids().tolist()
                    self._names.update(dict.fromkeys(lost, name))
                for upto, whose in ((start, name), (end, owner)):
                    if upto > begin:
                        append(stretches, Stretch(upto, whose))
                        begin = upto
        return stretches

    def _recorded(self, name: str, chain: BlockRuns, first: int) -> list[Stretch]:
        """Who claimed the chunks first; `name` those that nobody has claimed."""
        stretches: list[Stretch] = []
        names, end, last = self._names, first, name
        for start, count in chain.tail(first).runs:
            chunks = range(start, start + count)
            if last == name and names.keys().isdisjoint(chunks):  # as a rule nobody has claimed any
                names.update(dict.fromkeys(chunks, name))
                end += count
                continue
            for chunk in chunks:
                owner = names.setdefault(chunk, name)
                if owner != last:
                    if end > first:
                        stretches.append(Stretch(end, last))
                    last = owner
                end += 1
        return [*stretches, Stretch(end, last)]


def append(stretches: list[Stretch], stretch: Stretch) -> None:
    """Put a stretch behind others; it is one with the last of them if that has its owner."""
    if stretches and stretches[-1].owner == stretch.owner:
        stretches.pop()
    stretches.append(stretch)


def covers(stretches: Stretches, start: int, end: int) -> bool:
    """Whether they leave nothing out from `start` up to `end`."""
    for begins, ends in stretches:
        if begins <= start < ends:
            start = ends
    return start >= end
