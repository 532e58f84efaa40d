"""The chunks of a prompt that no other request computes before its answer: a radix tree of prompts.

For each chunk it knows the request that used it first and, of the requests that could do so
independently of that one, the one that can be sent first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request

Follows = Callable[[int, int], bool]
"""(earlier, later) -> True if the second request can be sent only after the first was answered."""


class Reusable(NamedTuple):
    """The part of a prompt that other requests may have computed."""

    chunks: int
    """Number of leading chunks."""
    next_s: float
    """Time of the first request that could compute more; no later chunk has an earlier one."""


class _Segment:
    """Consecutive chunks that the same requests use."""

    __slots__ = ("again_s", "children", "count", "first", "user")

    def __init__(self, first: int, count: int, user: int) -> None:
        self.first, self.count, self.user = first, count, user
        self.again_s = math.inf
        self.children: dict[int, _Segment] = {}

    def split(self, at: int) -> None:
        """Cut after `at` chunks; the rest becomes the only child."""
        rest = _Segment(self.first + at, self.count - at, self.user)
        rest.again_s, rest.children = self.again_s, self.children
        self.count, self.children = at, {rest.first: rest}


class FirstUses:
    """A radix tree of prompts, added in an order in which parents come before their children."""

    def __init__(self, follows: Follows) -> None:
        self._root = _Segment(0, 0, -1)
        self._follows = follows

    def add(self, request: int, chain: BlockRuns, sent_s: float) -> None:
        """Add a prompt. `sent_s`: the earliest time it can be sent, never falling."""
        for segment in self._cut(chain, request):
            if segment.user == request or segment.again_s < math.inf:
                continue
            if not self._follows(segment.user, request):
                segment.again_s = sent_s

    def reusable(self, request: int, chain: BlockRuns, before_s: float = math.inf) -> Reusable:
        """Return what requests sent before `before_s` may have computed of a prompt.

        The request itself, and those that wait for its answer, do not count.
        """
        chunks, children = 0, self._root.children
        for first, count in chain.runs:
            while count:
                segment = children[first]
                if segment.user == request and segment.again_s >= before_s:
                    return Reusable(chunks, segment.again_s)
                chunks, first, count = chunks + segment.count, first + segment.count, (
                    count - segment.count
                )  # fmt: skip
                children = segment.children
        return Reusable(chunks, math.inf)

    def _cut(self, chain: BlockRuns, request: int) -> Iterator[_Segment]:
        """Yield the segments of a chain, after cutting them to end where it ends."""
        children = self._root.children
        for first, count in chain.runs:
            while count:
                segment = children.get(first)
                if segment is None:
                    segment = children[first] = _Segment(first, count, request)
                elif segment.count > count:
                    segment.split(count)
                yield segment
                first, count, children = (
                    first + segment.count, count - segment.count, segment.children,
                )  # fmt: skip


class Family:
    """Requests numbered session after session, as a forest: a child waits for its parent's answer.

    Each has a place in a depth-first walk, so those that wait for it come right after it.
    """

    def __init__(self) -> None:
        self._place: list[int] = []
        self._last: list[int] = []

    def add(self, requests: Sequence[Request]) -> None:
        """Add the next session."""
        first = len(self._place)
        children: defaultdict[int | None, list[int]] = defaultdict(list)
        sizes = [1] * len(requests)
        for index in range(len(requests) - 1, -1, -1):  # children before their parents
            parent = requests[index].parent
            children[parent].append(index)
            if parent is not None:
                sizes[parent] += sizes[index]
        self._place += [0] * len(requests)
        self._last += [0] * len(requests)
        waiting, place = children[None][:], first
        while waiting:
            index = waiting.pop()
            self._place[first + index], self._last[first + index] = place, place + sizes[index] - 1
            place += 1
            waiting += children[index]

    def follows(self, earlier: int, later: int) -> bool:
        """Return True if `later` can be sent only after `earlier` was answered."""
        return self._place[earlier] < self._place[later] <= self._last[earlier]
