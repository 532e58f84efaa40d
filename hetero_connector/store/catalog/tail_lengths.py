"""Keep the lengths of the short chunks after a chunk: an index's answer to `tails`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import islice

from hetero_connector.artifacts.record import ChunkKey

MAX_TAILS = 32
"""Lengths that are told. Each costs whoever looks for a tail a hash of so many tokens."""


class TailLengths:
    """Counts visible chunks shorter than a full one by their parent and their length in tokens."""

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, dict[int, int]] = {}
        """The length of that which came last is last."""

    def of(self, parent: ChunkKey) -> tuple[int, ...]:
        """The newest `MAX_TAILS` lengths. May run beside a writer."""
        return tuple(islice(reversed(self._counts.get(parent, {})), MAX_TAILS))

    def count(self, parent: ChunkKey, length: int, step: int) -> None:
        """Add one that became visible, or take away one that is not any more."""
        lengths = self._counts.setdefault(parent, {})
        count = lengths.get(length, 0) + step
        if step > 0 or not count:
            lengths.pop(length, None)
        if count:
            lengths[length] = count
        elif not lengths:
            del self._counts[parent]

    def check(self, visible: Iterable[tuple[ChunkKey, int]]) -> None:
        """Raise AssertionError unless exactly these (parent, length) are counted."""
        lengths: defaultdict[ChunkKey, Counter[int]] = defaultdict(Counter)
        for parent, length in visible:
            lengths[parent][length] += 1
        assert lengths == self._counts
