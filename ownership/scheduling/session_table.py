"""The sessions of a router: where each decodes, its turns in flight, and whether it will return.

A router never learns that a session has ended. How many idle sessions will come back is learned
from those that did (`ThinkTimes`). Time is a parameter everywhere.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from hetero_connector.containers import BoundedDict, ExpiringHeap
from hetero_connector.planner.sessions import EARLY, LATE, ThinkTimes


class LastTurn(NamedTuple):
    """The last turn of a session that has ended with an answer."""

    worker: str
    tokens: int
    """Computed there by its end, of one prompt."""


@dataclass(slots=True)
class _Session:
    owner: str
    """The worker at which it decoded last."""
    tokens: int = 0
    """Prompt tokens of the last turn."""
    last: LastTurn | None = None
    """None before the first answer."""
    in_flight: dict[int, int] = field(default_factory=dict)
    """Turns under way, by the boundary that they continue."""


_owner_of = attrgetter("owner")


class _Idle(NamedTuple):
    """A session between two turns."""

    owner: str
    probability: float
    """The probability that it returns."""
    tokens: int
    """Prompt tokens of its last turn."""


class SessionTable:
    """The newest `max_sessions` sessions. Not thread-safe. O(log n) a call, amortised."""

    def __init__(self, think_times: ThinkTimes, max_sessions: int) -> None:
        """`think_times`: learns when sessions return; no one else may tell it of turns."""
        self._think_times = think_times
        self._sessions = BoundedDict[str, _Session](max_sessions)
        self._idle: dict[str, _Idle] = {}
        """A subset of `_sessions`."""
        self._overdue = ExpiringHeap[str, _Idle](self._idle)
        self._returning: dict[str, float] = {}
        self._returning_tokens: dict[str, float] = {}
        self._num_idle: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._sessions)

    def owner(self, session_id: str) -> str | None:
        """Return the worker at which a session decodes; None if it is not known."""
        session = self._sessions.get(session_id)
        return session.owner if session else None

    def last_turn(self, session_id: str) -> LastTurn | None:
        """Return what a session's last answer has left; None if that is not known."""
        session = self._sessions.get(session_id)
        return session.last if session else None

    def per_owner(self) -> Counter[str]:
        """Return the number of sessions at each worker. O(sessions)."""
        return Counter(map(_owner_of, self._sessions.values()))

    def has_sibling(self, session_id: str, boundary_tokens: int) -> bool:
        """Return True if another turn under way continues the session from the same boundary."""
        session = self._sessions.get(session_id)
        return bool(session and boundary_tokens and boundary_tokens in session.in_flight)

    def returning(self, worker: str) -> float:
        """Return the expected number of idle sessions that come back to a worker."""
        return self._returning.get(worker, 0.0)

    def returning_tokens(self, worker: str) -> float:
        """Return the expected tokens of the idle sessions that come back to a worker."""
        return max(0.0, self._returning_tokens.get(worker, 0.0))

    def on_turn_start(
        self,
        session_id: str,
        owner: str,
        boundary_tokens: int,
        now_s: float,
        prompt_tokens: int = 0,
    ) -> set[str]:
        """A turn was sent to `owner`. Returns the workers whose `returning` has changed."""
        self._think_times.on_turn_start(session_id, now_s)
        changed = self._end_wait(session_id)
        session = self._sessions.get(session_id) or _Session(owner)
        session.owner, session.tokens = owner, prompt_tokens
        session.in_flight[boundary_tokens] = session.in_flight.get(boundary_tokens, 0) + 1
        if session_id not in self._sessions and len(self._sessions) == self._sessions.capacity:
            changed |= self._end_wait(next(iter(self._sessions)))
        self._sessions[session_id] = session
        return changed

    def on_computed(self, session_id: str, worker: str, tokens: int) -> None:
        """A turn has ended with an answer: a worker has computed so many tokens of one prompt."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.last = LastTurn(worker, tokens)

    def on_turn_end(self, session_id: str, boundary_tokens: int, now_s: float) -> set[str]:
        """A turn is over. Returns the workers whose `returning` has changed."""
        expected = self._think_times.on_turn_end(session_id, now_s)
        session = self._take_turn(session_id, boundary_tokens)
        if session is None or expected is None:  # or another turn is under way
            return set()
        changed = self._end_wait(session_id)
        idle = _Idle(session.owner, expected.probability / (LATE - EARLY), session.tokens)
        self._idle[session_id] = idle
        self._overdue.push(expected.latest_s, session_id, idle)
        self._returning[idle.owner] = self.returning(idle.owner) + idle.probability
        tokens = self.returning_tokens(idle.owner) + idle.probability * idle.tokens
        self._returning_tokens[idle.owner] = tokens
        self._num_idle[idle.owner] += 1
        return changed | {idle.owner}

    def on_turn_failed(self, session_id: str, boundary_tokens: int) -> None:
        """A turn has ended without an answer. It may be sent again, which is no return.

        So the session is not waited for.
        """
        self._take_turn(session_id, boundary_tokens)
        self._think_times.on_turn_failed(session_id)

    def expire(self, now_s: float) -> set[str]:
        """Expect overdue sessions no more. Returns the workers whose `returning` has changed."""
        changed: set[str] = set()
        while (session_id := self._overdue.pop_due(now_s)) is not None:
            changed |= self._end_wait(session_id)
        return changed

    def forget_worker(self, worker: str) -> None:
        """Forget the sessions of a worker that has gone."""
        for session_id in [x for x, session in self._sessions.items() if session.owner == worker]:
            self._end_wait(session_id)
            del self._sessions[session_id]

    def _take_turn(self, session_id: str, boundary_tokens: int) -> _Session | None:
        """Take a turn from those under way; return its session, None if that is not known."""
        session = self._sessions.get(session_id)
        if session is not None:
            others = session.in_flight.pop(boundary_tokens, 1) - 1
            if others:
                session.in_flight[boundary_tokens] = others
        return session

    def _end_wait(self, session_id: str) -> set[str]:
        idle = self._idle.pop(session_id, None)
        if idle is None:
            return set()
        self._num_idle[idle.owner] -= 1
        self._returning[idle.owner] -= idle.probability
        self._returning_tokens[idle.owner] -= idle.probability * idle.tokens
        if not self._num_idle[idle.owner]:  # nothing is left of rounding
            del self._returning[idle.owner], self._num_idle[idle.owner]
            del self._returning_tokens[idle.owner]
        self._overdue.prune()
        return {idle.owner}
