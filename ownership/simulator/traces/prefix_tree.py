"""A radix tree over prompts that counts what they share.

Its edges are runs of block ids, so adding a prompt costs its runs and the nodes on its path,
however many blocks it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns

_Runs = tuple[tuple[int, int], ...]


class Touched(NamedTuple):
    """Consecutive blocks of a prompt that the same earlier prompt used last."""

    num_blocks: int
    last_use: int
    """The `use` of that prompt."""


class Added(NamedTuple):
    """The part of a prompt that was in the tree before, and its new ids."""

    known_blocks: int
    """Leading blocks that were in the tree."""
    names: BlockRuns
    """The prompt with ids that name prefixes (see `BlockRuns`)."""
    touched: tuple[Touched, ...]
    """The known blocks, in order."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """A node of the tree: blocks that exactly the same prompts share."""

    depth_blocks: int
    """Number of blocks before them."""
    num_blocks: int
    prompts: int


class _Node:
    """Blocks without a fork. Their names are consecutive from `name` on."""

    __slots__ = ("children", "label", "last_use", "name", "num_blocks", "prompts")

    def __init__(self, label: _Runs, num_blocks: int, name: int) -> None:
        self.label, self.num_blocks, self.name = label, num_blocks, name
        self.prompts = 0
        self.last_use = 0
        self.children: dict[int, _Node] = {}

    def split(self, at: int) -> None:
        """Cut after `at` blocks; the rest becomes the only child."""
        label = BlockRuns(self.label)
        rest = _Node(label.tail(at).runs, self.num_blocks - at, self.name + at)
        rest.prompts, rest.last_use, rest.children = self.prompts, self.last_use, self.children
        self.label, self.num_blocks = label.head(at).runs, at
        self.children = {rest.label[0][0]: rest}


class _Rest:
    """The rest of a prompt that is not matched yet: a place in its runs."""

    __slots__ = ("_index", "_runs", "_skipped", "at_end", "first")

    def __init__(self, runs: _Runs) -> None:
        self._runs, self._index, self._skipped = runs, 0, 0
        self.at_end = not runs
        self.first = runs[0][0] if runs else -1

    def take_shared(self, label: _Runs) -> int:
        """Skip the blocks that the label begins with, and return their number."""
        runs, index, skipped = self._runs, self._index, self._skipped
        shared = 0
        for label_first, label_count in label:
            first, count = runs[index]
            if first + skipped != label_first:
                break
            left = count - skipped
            if left > label_count:  # the label's run ends within the prompt's
                shared += label_count
                skipped += label_count
                continue
            shared += left
            index, skipped = index + 1, 0
            if left < label_count or index == len(runs):
                break
        self._index, self._skipped = index, skipped
        self.at_end = index == len(runs)
        if not self.at_end:
            self.first = runs[index][0] + skipped
        return shared

    def runs(self) -> _Runs:
        """Return the blocks that are left."""
        first, count = self._runs[self._index]
        head = (first + self._skipped, count - self._skipped)
        return (head, *self._runs[self._index + 1 :])


class PrefixTree:
    """Prompts by their blocks. Two prompts share a path as far as their ids are equal."""

    def __init__(self, first_name: int = 0) -> None:
        self._root = _Node((), 0, 0)
        self.next_name = first_name

    def add(self, blocks: BlockRuns, use: int = 0) -> Added:
        """Add a prompt, used at `use` (a number that grows from prompt to prompt)."""
        node, known, rest = self._root, 0, _Rest(blocks.runs)
        names: list[tuple[int, int]] = []
        touched: list[Touched] = []
        while not rest.at_end:
            child = node.children.get(rest.first)
            if child is None:
                break
            shared = rest.take_shared(child.label)
            if shared < child.num_blocks:
                child.split(shared)
            names.append((child.name, shared))
            if touched and touched[-1].last_use == child.last_use:
                touched[-1] = Touched(touched[-1].num_blocks + shared, child.last_use)
            else:
                touched.append(Touched(shared, child.last_use))
            child.prompts += 1
            child.last_use = use
            node, known = child, known + shared
        if not rest.at_end:
            leaf = self._append(node, rest.runs(), use)
            names.append((leaf.name, leaf.num_blocks))
        return Added(known, BlockRuns.of_runs(names), tuple(touched))

    def _append(self, parent: _Node, label: _Runs, use: int) -> _Node:
        leaf = _Node(label, sum(count for _, count in label), self.next_name)
        leaf.prompts, leaf.last_use = 1, use
        self.next_name += leaf.num_blocks
        parent.children[label[0][0]] = leaf
        return leaf

    def prefixes(self) -> Iterator[SharedPrefix]:
        """Yield every node, parents before their children."""
        waiting = [(0, child) for child in self._root.children.values()]
        while waiting:
            depth, node = waiting.pop()
            yield SharedPrefix(depth, node.num_blocks, node.prompts)
            waiting.extend((depth + node.num_blocks, child) for child in node.children.values())

    def check_integrity(self) -> None:
        """Raise AssertionError if a node contradicts its children."""
        waiting = list(self._root.children.items())
        named: list[tuple[int, int]] = []
        while waiting:
            first, node = waiting.pop()
            assert node.label[0][0] == first, "a child lies under another id"
            assert BlockRuns(node.label).num_blocks == node.num_blocks > 0
            assert sum(child.prompts for child in node.children.values()) <= node.prompts
            assert all(child.last_use <= node.last_use for child in node.children.values())
            named.append((node.name, node.num_blocks))
            waiting.extend(node.children.items())
        named.sort()
        for (name, count), (following, _) in pairwise(named):
            assert name + count <= following, "two nodes share a name"
