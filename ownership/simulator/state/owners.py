"""Who owns each chunk of a simulated fleet: what the directory's records come to.

A chunk that is sealed is its first claimant's until that has it no more, or has died and its lease
has run out. What others compute of it meanwhile are replicas, as what they fetched is. The
directory keeps a record of each artifact, with tokens and expiries; here it is a name for each
chunk, and whether the owner still has it is asked when somebody else would like to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns

OwnedUpTo = Callable[[str, BlockRuns], int]
"""(worker, chain) -> the chunks of the chain up to the last that it has, and not as a replica."""


class Stretch(NamedTuple):
    """A chain's chunks up to `end`, from where the stretch before ends."""

    end: int
    owner: str


class Owners:
    """A fleet's. Chunks' names are their prefixes', so one name is one chunk."""

    def __init__(self, owned_up_to: OwnedUpTo) -> None:
        self._owned_up_to = owned_up_to
        self._names: dict[int, str] = {}

    def owns(self, name: str, chain: BlockRuns) -> bool:
        """Whether a worker has a chain's last chunk, and not as a replica."""
        return self._owned_up_to(name, chain) == chain.num_blocks

    def claim(self, name: str, chain: BlockRuns, first: int) -> list[Stretch]:
        """Whose a chain's chunks are behind its first ones: a worker's that claims them, unless
        another has them."""
        recorded = self._recorded(name, chain, first)
        if len(recorded) == 1 and recorded[0].owner == name:
            return recorded
        stretches: list[Stretch] = []
        begin = first
        for stretch in recorded:
            kept = stretch.end
            if stretch.owner != name:
                kept = self._owned_up_to(stretch.owner, chain.head(stretch.end))
            for end, owner in ((kept, stretch.owner), (stretch.end, name)):
                if end > begin:
                    if owner != stretch.owner:
                        lost = chain.head(end).tail(begin).ids().tolist()
                        self._names.update(dict.fromkeys(lost, owner))
                    append(stretches, Stretch(end, owner))
                    begin = end
        return stretches

    def _recorded(self, name: str, chain: BlockRuns, first: int) -> list[Stretch]:
        """Who claimed the chunks first; `name` those that nobody has claimed."""
        stretches: list[Stretch] = []
        claimed, end, last = self._names.setdefault, first, name
        for start, count in chain.tail(first).runs:
            for chunk in range(start, start + count):
                owner = claimed(chunk, name)
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
