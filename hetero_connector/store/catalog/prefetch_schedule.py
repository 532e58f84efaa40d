"""Which session's state is to be brought to DRAM when. Pure: time is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from dataclasses import dataclass
from itertools import count

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.store.catalog.fair_shares import FairShares

_LEAD = 2.0
"""Staging begins this many times its predicted seconds ahead of the session, and"""
_LEAD_S = 0.25
"""so much more, in seconds: the I/O thread may be busy writing."""


def staging_start_s(earliest_s: float, stage_s: float) -> float:
    """When to begin what takes `stage_s`, for a session that may be back at `earliest_s`."""
    return earliest_s - _LEAD * stage_s - _LEAD_S


@dataclass(frozen=True)
class ExpectedReturn:
    """A session whose next turn is expected. Times of the store's clock."""

    session: Hashable
    leaves: tuple[ChunkKey, ...]
    """Where its chain may end, deepest first: the first of them that is stored counts."""
    start_s: float
    """Staging may begin."""
    latest_s: float
    """It is not expected any more."""
    probability: float
    """That it comes back before `latest_s`."""
    tenant: bytes = b""
    """Whose session it is, see `fair_shares`."""


class PrefetchSchedule:
    """At most one expected return of a session, the newest `capacity`, of each tenant its share.

    Not thread-safe. O(log n) a call, amortised.
    """

    def __init__(self, capacity: int = 4096) -> None:
        self._shares = FairShares(capacity)
        self._expected: dict[Hashable, ExpectedReturn] = {}
        self._by_start: list[tuple[float, int, ExpectedReturn]] = []
        """May hold entries that are not in `_expected` any more."""
        self._order = count()

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, expected: ExpectedReturn) -> None:
        """Replaces what was expected of the session before."""
        self._expected[expected.session] = expected
        heapq.heappush(self._by_start, (expected.start_s, next(self._order), expected))
        if (oldest := self._shares.add(expected.session, expected.tenant)) is not None:
            del self._expected[oldest]
        if len(self._by_start) > 2 * len(self._expected) + 64:
            self._by_start = [x for x in self._by_start if self._counts(x[2])]
            heapq.heapify(self._by_start)

    def cancel(self, session: Hashable) -> None:
        """The session is back, or gone."""
        self._expected.pop(session, None)
        self._shares.remove(session)

    def clear(self) -> None:
        """Expect nobody."""
        self._expected.clear()
        self._shares.clear()
        self._by_start.clear()

    @property
    def next_s(self) -> float:
        """When `take_due` will have something; infinite if nothing is expected."""
        while self._by_start and not self._counts(self._by_start[0][2]):
            heapq.heappop(self._by_start)
        return self._by_start[0][0] if self._by_start else float("inf")

    def take_due(self, now_s: float) -> ExpectedReturn | None:
        """The one that should have begun first; those whose time is over are dropped."""
        while self.next_s <= now_s:
            expected = heapq.heappop(self._by_start)[2]
            self.cancel(expected.session)
            if now_s < expected.latest_s:
                return expected
        return None

    def _counts(self, expected: ExpectedReturn) -> bool:
        return self._expected.get(expected.session) is expected
