"""The replica of each session. No Ray is needed."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

R = TypeVar("R", bound=Hashable)
"""The id of a replica."""


class SessionOwners(Generic[R]):
    """The replica of each of the `limit` sessions that were used last."""

    def __init__(self, limit: int = 100_000) -> None:
        self._limit = limit
        self._owner: OrderedDict[str, R] = OrderedDict()
        self._sessions: Counter[R] = Counter()

    def rank(self, session: str | None, replicas: Sequence[R], waiting: Mapping[R, int]) -> list[R]:
        """Return the replicas, the best one for the session first.

        A session stays at its owner. A new one, or one whose owner is gone, goes to the replica
        with the fewest sessions; a request without a session to the one with the shortest queue.
        `waiting`: the requests at each replica, as far as they are known.
        """
        owner = self._owner.get(session) if session else None

        def price(replica: R) -> tuple[bool, int, int]:
            sessions, queue = self._sessions[replica], waiting.get(replica, 0)
            return (replica != owner, *((sessions, queue) if session else (queue, sessions)))

        return sorted(replicas, key=price)

    def settle(self, session: str | None, replica: R) -> None:
        """Make the replica the owner of the session."""
        if not session:
            return
        before = self._owner.pop(session, None)
        if before is not None:
            self._leave(before)
        self._owner[session] = replica
        self._sessions[replica] += 1
        if len(self._owner) > self._limit:
            self._leave(self._owner.popitem(last=False)[1])

    def _leave(self, replica: R) -> None:
        self._sessions[replica] -= 1
        if not self._sessions[replica]:
            del self._sessions[replica]


def session_of(header: str | None, body: Any) -> str | None:
    """Return the session that a request names, in the order in which the connector reads it.

    `header`: the value of X-Session-ID; `body`: the request with its fields as attributes.
    """
    parameters = getattr(body, "kv_transfer_params", None) or {}
    named = header or getattr(body, "session_id", None) or parameters.get("session_id")
    return str(named) if named else None
