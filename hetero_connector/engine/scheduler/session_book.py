"""The sessions that this engine has seen last: their chains, and when they are expected back.

For people: the store itself forgets a session when its time is over. Session ids and salts are
chosen by clients and are not kept; digests name them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

from hetero_connector.artifacts.record import ChunkKey

MIN_DIGEST = 16
"""Characters of a session's digest by which it may be named."""
_CAPACITY = 4_096
_MAX_LEAVES = 1_024
"""Earlier ends among them are stored chunks, of which a tier has room for so many."""


@dataclass(frozen=True)
class PromptName:
    """The name under which a prompt is pinned or expected: the key of its end."""

    end: ChunkKey


def session_name(session: Hashable) -> str:
    """Return what people call the session: its digest, or its number if it was recognised.

    For a prompt that has no session: the key of its end.
    """
    if isinstance(session, PromptName):
        return f"prompt-{session.end.hex()}"
    return session.hex() if isinstance(session, bytes) else f"recognised-{session}"


@dataclass(frozen=True)
class SessionRecord:
    """One session after its latest turn."""

    tenant: bytes
    leaves: tuple[ChunkKey, ...] = ()
    """The chunks at which its chain may end, deepest first; then the ends of earlier chains."""
    tokens: int = 0
    turns: int = 0
    ended: float | None = None
    """The end of its last turn, in seconds since 1970; None while one runs."""
    expected_s: tuple[float, float] | None = None
    """The earliest and the latest return, by the store's clock; None if it is not known."""
    parent: Hashable | None = None
    """The session that it was forked from."""
    models: frozenset[str] = frozenset()
    """The adapters of its turns, by name; "": no adapter."""


class SessionBook:
    """Records sessions, the newest `_CAPACITY` of them. The scheduler's thread notes turns; any
    thread may call the rest.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        """Held while a record is changed."""
        self._records: dict[Hashable, SessionRecord] = {}
        """By session, the latest turn last."""

    def on_turn_start(self, session: Hashable, tenant: bytes, model: str = "") -> None:
        """Note a request of the session; `model`: the name of its adapter, if it has one."""
        with self._lock:
            before = self._records.pop(session, None) or SessionRecord(tenant)
            self._records[session] = replace(
                before,
                turns=before.turns + 1,
                ended=None,
                expected_s=None,
                models=before.models | {model},
            )
            if len(self._records) > _CAPACITY:
                del self._records[next(iter(self._records))]

    def on_fork(self, session: Hashable, parent: Hashable) -> None:
        """Note that the session goes on from the chain of another."""
        self._change(session, parent=parent)

    def on_turn_end(
        self,
        session: Hashable,
        leaves: tuple[ChunkKey, ...],
        tokens: int,
        expected_s: tuple[float, float] | None,
    ) -> None:
        """Note the end of a request: the session's chain has so many tokens now."""
        leaves = tuple(dict.fromkeys(leaves))[:_MAX_LEAVES]
        now = time.time()
        self._change(session, leaves=leaves, tokens=tokens, ended=now, expected_s=expected_s)

    def newest(self) -> list[tuple[Hashable, SessionRecord]]:
        """Return all sessions, the one with the latest turn first."""
        return list(self._records.copy().items())[::-1]  # one call that no thread interrupts

    def find(self, session: Hashable) -> SessionRecord | None:
        """Return what is known of a session."""
        return self._records.get(session)

    def forget(self, session: Hashable) -> None:
        """Drop a session whose chain was cleared."""
        with self._lock:
            self._records.pop(session, None)

    def clear(self) -> None:
        """Drop all: everything stored was forgotten."""
        with self._lock:
            self._records.clear()

    def _change(self, session: Hashable, **fields: Any) -> None:
        with self._lock:
            if before := self._records.get(session):
                self._records[session] = replace(before, **fields)
