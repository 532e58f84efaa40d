"""A trace as one stream of requests, in the order in which they were sent."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from ownership.simulator.traces.session import Request, Session, Trace


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with its place in the trace."""

    time_s: float
    """Since the trace's start; since the session's where no start is recorded."""
    session: int
    """The session's place in the trace, from 0."""
    index: int
    """The request's place in its session, from 0."""
    request: Request


def arrivals(trace: Trace) -> Iterator[Arrival]:
    """The requests of all sessions by time; session by session where no start is recorded.

    Holds the sessions that are under way, not the trace.
    """
    waiting: list[tuple[float, int, int, Session]] = []
    for ordinal, session in enumerate(trace):
        if session.start_s is None:
            yield from (
                Arrival(request.offset_s, ordinal, index, request)
                for index, request in enumerate(session.requests)
            )
            continue
        while waiting and waiting[0][0] <= session.start_s:
            yield _next(waiting)
        heapq.heappush(waiting, (session.start_s, ordinal, 0, session))
    while waiting:
        yield _next(waiting)


def _next(waiting: list[tuple[float, int, int, Session]]) -> Arrival:
    """Take the earliest request and leave the one after it in its session."""
    time_s, ordinal, index, session = waiting[0]
    assert session.start_s is not None
    if index + 1 < len(session.requests):
        next_s = session.start_s + session.requests[index + 1].offset_s
        heapq.heapreplace(waiting, (next_s, ordinal, index + 1, session))
    else:
        heapq.heappop(waiting)
    return Arrival(time_s, ordinal, index, session.requests[index])
