"""Admission: is an artifact worth its write to SSD, where a day's writes are limited?

Without a budget everything is. With one, everything is while the bucket is at least half
full. Below that a chunk must be worth more than most of what was lately asked for, the
more so the emptier the bucket: expected reuse times seconds saved, per byte written. What
is refused stays in DRAM and is asked for again when it has been used.

A chunk's prefix-proportional state is admitted or refused as one, then its boundary state: part of
either restores nothing. Nothing is written that a restart could reach neither from here nor
from a peer's copy of what it continues, or that would be of no use then. Needs the store's
lock; runs on the I/O thread.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from itertools import groupby

from hetero_connector.spec.state_types import Family
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.slot_geometry import padded
from hetero_connector.store.catalog.write_budget import WriteBudget

_FREE_FROM = 0.5
"""Fullness of the bucket from which on nothing is refused."""
_REMEMBERED = 256
"""Chunks asked for that the threshold is taken from."""
_REUSE_INSIDE = 0.1
"""Expected reuse of a boundary inside a chain: only who branches off there resumes there."""


class Admission:
    """Chooses from a batch what to write, and pays for it."""

    def __init__(self, budget: WriteBudget | None, worth: Callable[[Artifact], float]) -> None:
        """`budget`: None for no limit. `worth`: of a use of an artifact, whenever it is asked."""
        self.budget = budget
        self._worth_of_use = worth
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        """Worth of what could have been written, per byte."""

    def admit(self, batch: Sequence[Artifact]) -> list[Artifact]:
        """Return those to write, in the batch's order; each is paid for. Parents come first."""
        if self.budget is None:
            return list(batch)
        admitted: set[Artifact] = set()
        recent = sorted(self._recent)
        for group in _groups(batch):
            if _is_restorable(group, admitted) and self._pay_for(group, recent, self.budget):
                admitted.update(group)
        return [artifact for artifact in batch if artifact in admitted]

    def refund(self, artifact: Artifact) -> None:
        """It was admitted, but is not written."""
        if self.budget is not None:
            self.budget.refund(padded(artifact.size_bytes))

    def _pay_for(
        self, group: Sequence[Artifact], recent: Sequence[float], budget: WriteBudget
    ) -> bool:
        """Spend the budget for a group that is worth it; False if it is not.

        It must be strictly better than enough of `recent`: among equals the last half of the
        bucket waits for something better.
        """
        worth = self._worth(group[0])
        self._recent.append(worth)
        better_than = bisect_left(recent, worth) / max(1, len(recent))
        if better_than < 1 - budget.fullness / _FREE_FROM:
            return False
        return budget.spend(sum(padded(a.size_bytes) for a in group))

    def _worth(self, artifact: Artifact) -> float:
        """Per byte: of the chunk's whole state of this family, for none is of use alone."""
        family = artifact.state_type.family
        same = [a for a in artifact.node.artifacts.values() if a.state_type.family is family]
        size_bytes = sum(padded(a.size_bytes) for a in same)
        return expected_reuse(artifact) * max(map(self._worth_of_use, same)) / size_bytes


def expected_reuse(artifact: Artifact) -> float:
    """Estimate the uses to come: one, as many as so far, and a share of those of its parent.

    A chain that is resumed will be resumed again where it grows; many branches share the
    uses of what they have in common.
    """
    node = artifact.node
    if artifact.state_type.family is Family.BOUNDARY and node.num_children:
        return artifact.uses + _REUSE_INSIDE
    above = node.parent
    inherited = 0.0
    if above is not None and above.artifacts:
        inherited = max(a.uses for a in above.artifacts.values()) / above.num_children
    return 1 + artifact.uses + inherited


def parent_is_there(artifact: Artifact, placed: Collection[Artifact]) -> bool:
    """Return whether the parent's artifact, if it is ours to keep, is on SSD or among `placed`.

    Else the copy would be out of reach after a restart, and would keep its parent in DRAM.
    """
    above = artifact.above
    return above is None or _stays(above, placed)


def _stays(artifact: Artifact, placed: Collection[Artifact]) -> bool:
    """Return whether a restart finds it: on SSD, by then, or at the peer who owns it."""
    return artifact.ssd is not None or artifact in placed or artifact.replica


def waits_for_parent(artifact: Artifact, queued: Container[Artifact]) -> bool:
    """Return whether its parent is queued behind it: another's until it was promoted."""
    return not artifact.forgotten and artifact.above in queued


def could_be_written(artifact: Artifact) -> bool:
    """Return whether it is in DRAM alone and not a peer's to keep."""
    return artifact.ssd is None and artifact.dram is not None and not artifact.replica


def deepest_on_ssd(artifact: Artifact) -> Artifact | None:
    """The nearest ancestor of the same state type that is on SSD, up to a gap or a replica."""
    node = artifact.node.parent
    while node is not None and node.artifacts:
        above = node.artifacts.get(artifact.state_type)
        if above is not None and above.ssd is not None:
            return above
        if above is not None and above.replica:
            return None
        node = node.parent
    return None


def _groups(batch: Sequence[Artifact]) -> Iterator[list[Artifact]]:
    """The batch by chunk and family, prefix-proportional state first."""
    for _, of_chunk in groupby(batch, key=lambda a: a.node.key):
        artifacts = [a for a in of_chunk if not a.forgotten]
        for family in (Family.PREFIX, Family.BOUNDARY):
            group = [a for a in artifacts if a.state_type.family is family]
            if group:
                yield group


def _is_restorable(group: Sequence[Artifact], admitted: Collection[Artifact]) -> bool:
    """Return whether a restart finds its parents, and the prefix state of its own chunk."""
    if not all(parent_is_there(a, admitted) for a in group):
        return False
    node = group[0].node
    if not _has_way_up(node, admitted):
        return False
    return group[0].state_type.family is Family.PREFIX or all(
        _stays(a, admitted) for a in node.artifacts.values() if a.state_type.family is Family.PREFIX
    )


def _has_way_up(node: Node, admitted: Collection[Artifact]) -> bool:
    """Return whether a restart finds anything of the parent chunk, or need not: it is missing."""
    above = node.parent
    if above is None or not above.artifacts:
        return True
    return any(_stays(a, admitted) for a in above.artifacts.values())
