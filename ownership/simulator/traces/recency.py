"""How much was used since: distances between two uses, counted in distinct blocks."""

from __future__ import annotations


class Recency:
    """Blocks by the use that was their last: a Fenwick tree that grows by one use at a time.

    Every operation costs O(log uses), however many blocks are moved.
    """

    def __init__(self) -> None:
        self._sums = [0]  # [i]: blocks of the uses (i - lowest set bit of i, i], from 1
        self._total = 0

    def use(self, num_blocks: int) -> int:
        """A new use that is the last of `num_blocks`; its number, from 0."""
        index = len(self._sums)
        self._total += num_blocks
        below = self._up_to(index - 1) - self._up_to(index & (index - 1))
        self._sums.append(below + num_blocks)
        return index - 1

    def forget(self, use: int, num_blocks: int) -> None:
        """Of the blocks last used then, `num_blocks` have a later use now."""
        index = use + 1
        self._total -= num_blocks
        while index < len(self._sums):
            self._sums[index] -= num_blocks
            index += index & -index

    def used_after(self, use: int) -> int:
        """Distinct blocks whose last use came after `use`."""
        return self._total - self._up_to(use + 1)

    def _up_to(self, index: int) -> int:
        blocks = 0
        while index:
            blocks += self._sums[index]
            index &= index - 1
        return blocks
