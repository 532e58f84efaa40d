"""What a search by one who knows the future tries next: a few placements, changed by lot.

By lot, but not blindly: a request is drawn by how long it waited, and what is changed is its own
placement or that of one that was at the same worker meanwhile.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from random import Random
from typing import NamedTuple

from ownership.scheduling.step_pricing import Route

_NEAR = 12
"""Requests before and after one that it is exchanged with."""
_MEANWHILE = 50
"""Requests before and after one among which those at its worker are looked for."""
_WINDOWS_S = (1.0, 3.0, 10.0, 30.0)


class Turn(NamedTuple):
    """A request: the session's n-th that is placed. Where forks come together their order is
    that of the trace, so it is the request's place in the session."""

    session_id: str
    number: int


class Served(NamedTuple):
    """When a request was at the fleet."""

    turn: Turn
    arrived_s: float
    answered_s: float
    waited_s: float
    """Longer than it decodes alone."""


class Changes:
    """Of one schedule on at least two workers."""

    def __init__(
        self, placed: Mapping[Turn, Route], served: Sequence[Served], workers: int, rng: Random
    ) -> None:
        """`served`: in the order in which they came."""
        self._placed, self._served, self._workers, self._rng = placed, served, workers, rng
        self._waited_s = list(accumulate(one.waited_s for one in served))

    def draw(self) -> tuple[str, dict[Turn, Route]]:
        """A kind of change, and what is placed elsewhere by it."""
        at = self._drawn()
        kind = self._rng.choices(
            ("one", "exchange", "window", "few", "session"), (46, 20, 12, 14, 8)
        )[0]
        match kind:
            case "one":
                changed = self._few([self._beside(at)])
            case "exchange":
                changed = self._exchange(self._beside(at))
            case "window":
                changed = self._window(self._served[at].arrived_s)
            case "session":
                changed = self._session(self._served[at].turn)
            case _:
                near = self._near(self._beside(at))
                changed = self._few(
                    self._rng.sample(near, min(len(near), self._rng.choice((2, 3))))
                )
        return kind, changed

    def _drawn(self) -> int:
        """A request, by how long it waited."""
        drawn = self._rng.random() * self._waited_s[-1]
        return min(bisect(self._waited_s, drawn), len(self._served) - 1)

    def _beside(self, at: int) -> int:
        """The request itself, or one that was where it was prefilled or decoded meanwhile."""
        if self._rng.random() < 0.5:
            return at
        one, route = self._served[at], self._placed[self._served[at].turn]
        first = max(0, at - _MEANWHILE)
        others = [
            first + i
            for i, other in enumerate(self._served[first : at + _MEANWHILE])
            if other.answered_s > one.arrived_s
            and other.arrived_s < one.answered_s
            and self._placed[other.turn].prefill in (route.prefill, route.decode)
        ]
        return self._rng.choice(others or [at])

    def _near(self, at: int) -> range:
        return range(max(0, at - _NEAR), min(len(self._served), at + _NEAR + 1))

    def _few(self, requests: Sequence[int]) -> dict[Turn, Route]:
        turns = [self._served[i].turn for i in requests]
        return {turn: self._elsewhere(self._placed[turn]) for turn in turns}

    def _elsewhere(self, route: Route) -> Route:
        """Another route, most often without the network."""
        rng, all_workers = self._rng, range(self._workers)
        other, second = rng.sample(all_workers, 2)
        if other == route.decode:
            other, second = second, other
        kind = rng.choices(("local", "remote", "prefill", "fetch", "source"), (11, 3, 3, 2, 1))[0]
        match kind:
            case "remote":
                return Route(other, second)
            case "prefill":
                return Route(route.decode, other)
            case "fetch":
                return Route(other, other, second)
            case "source":
                return Route(route.decode, route.decode, other)
        return Route(other, other)

    def _exchange(self, at: int) -> dict[Turn, Route]:
        """The routes of two requests that came at about the same time."""
        turn = self._served[at].turn
        route = self._placed[turn]
        others = [self._served[i].turn for i in self._near(at)]
        others = [other for other in others if self._placed[other] != route]
        if not others:
            return self._few([at])
        other = self._rng.choice(others)
        return {turn: self._placed[other], other: route}

    def _window(self, begun_s: float) -> dict[Turn, Route]:
        """Two workers, for all that came within a while."""
        until_s = begun_s + self._rng.choice(_WINDOWS_S)
        workers = list(range(self._workers))
        first, second = self._rng.sample(workers, 2)
        workers[first], workers[second] = second, first
        turns = [x.turn for x in self._served if begun_s <= x.arrived_s <= until_s]
        return {turn: _renamed(self._placed[turn], workers) for turn in turns}

    def _session(self, turn: Turn) -> dict[Turn, Route]:
        """A session, from one of its turns on: it takes its state along."""
        route = self._elsewhere(self._placed[turn])
        source = self._placed[turn].decode
        changed = {turn: route._replace(source=None if source == route.prefill else source)}
        for other in self._served:
            if other.turn.session_id == turn.session_id and other.turn.number > turn.number:
                changed[other.turn] = Route(route.decode, route.decode)
        return changed


def _renamed(route: Route, workers: Sequence[int]) -> Route:
    source = None if route.source is None else workers[route.source]
    return Route(workers[route.decode], workers[route.prefill], source)
