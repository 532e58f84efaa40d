"""Which chunks of a prompt nobody but its own followers uses: those it must compute itself.

A radix tree of all prompts of a trace. Of each chunk it knows the request that used it first and,
of the requests that could do so independently of that one, the one that can be sent first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

from ownership.simulator.traces.block_runs import BlockRuns

Follows = Callable[[int, int], bool]
"""Whether the second request can only be sent when the first was answered."""


class Reusable(NamedTuple):
    """Of a prompt."""

    chunks: int
    """Leading chunks that others may have computed."""
    next_s: float
    """When the first is sent that could compute more; a chunk behind has no user before."""


class _Segment:
    """Neighbouring chunks that the same requests use."""

    __slots__ = ("again_s", "children", "count", "first", "user")

    def __init__(self, first: int, count: int, user: int) -> None:
        self.first, self.count, self.user = first, count, user
        self.again_s = math.inf
        self.children: dict[int, _Segment] = {}

    def split(self, at: int) -> None:
        """Cut behind `at` chunks; what follows becomes the only child."""
        rest = _Segment(self.first + at, self.count - at, self.user)
        rest.again_s, rest.children = self.again_s, self.children
        self.count, self.children = at, {rest.first: rest}


class FirstUses:
    """Prompts in an order in which no request comes before one that it waits for."""

    def __init__(self, follows: Follows) -> None:
        self._root = _Segment(0, 0, -1)
        self._follows = follows

    def add(self, request: int, chain: BlockRuns, sent_s: float) -> None:
        """A request's prompt; `sent_s`: when it is sent at the earliest, never falling."""
        for segment in self._cut(chain, request):
            if segment.user == request or segment.again_s < math.inf:
                continue
            if not self._follows(segment.user, request):
                segment.again_s = sent_s

    def reusable(self, request: int, chain: BlockRuns, before_s: float = math.inf) -> Reusable:
        """What a request sent before `before_s` may have computed, other than this one and those
        that wait for its answer."""
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
        """The chain's segments, made and cut so that they are its own and nothing more."""
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
