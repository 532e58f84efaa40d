"""Which requests wait for which, over all sessions of a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ownership.simulator.traces.session import Request


class Family:
    """Requests numbered session after session, as a forest: a child waits for its parent's answer.

    Each is given a place in a walk through the forest, in which all that wait for it, and nothing
    else, come right behind it.
    """

    def __init__(self) -> None:
        self._place: list[int] = []
        self._last: list[int] = []

    def add(self, requests: Sequence[Request]) -> None:
        """The next session."""
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
        """Whether `later` can only be sent when `earlier` was answered."""
        return self._place[earlier] < self._place[later] <= self._last[earlier]
