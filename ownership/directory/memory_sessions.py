"""Sessions, hot groups and chain users of `MemoryDirectory`. The caller holds its lock."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import BoundedDict
from ownership.directory.contract import DirectoryLimits, Usage
from ownership.directory.identifiers import NO_EPOCH, Epoch, Token
from ownership.directory.sessions import (
    MAX_CHAIN_ENDS,
    HotGroup,
    Session,
    SessionGrant,
    heat_at,
    log_heat_after_use,
)

IsLive = Callable[[Epoch], bool]


class MemorySessions:
    """The sessions. The caller has checked the epoch."""

    def __init__(self, limits: DirectoryLimits, next_token: Callable[[], Token]) -> None:
        self._limits = limits
        self._next_token = next_token
        self._sessions = BoundedDict[str, tuple[Session, float]](limits.max_sessions)
        """Each session and when it was last used, least recently used first."""

    def begin_turn(
        self,
        epoch: Epoch,
        session_id: str,
        group: str,
        expected: Token | None,
        now_s: float,
        is_live: IsLive,
    ) -> SessionGrant:
        self._expire(now_s)
        session, _ = self._sessions.get(session_id, (Session(session_id), now_s))
        owner = session.decode_owner
        is_taken = owner not in (NO_EPOCH, epoch) and is_live(owner)
        if is_taken and expected != session.token:
            return SessionGrant(False, session)
        token = session.token if owner == epoch else self._next_token()
        begun = session.with_turn_begun(epoch, token, group, now_s)
        self._sessions[session_id] = (begun, now_s)
        return SessionGrant(True, begun)

    def end_turn(
        self,
        epoch: Epoch,
        session_id: str,
        token: Token,
        boundary: ChunkKey,
        boundary_tokens: int,
        now_s: float,
    ) -> SessionGrant:
        session, _ = self._sessions.get(session_id, (Session(session_id), now_s))
        if (session.decode_owner, session.token) != (epoch, token):
            return SessionGrant(False, session)
        ended = session.with_turn_ended(boundary, boundary_tokens, now_s)
        self._sessions[session_id] = (ended, now_s)
        return SessionGrant(True, ended)

    def get(self, session_ids: Sequence[str], now_s: float) -> list[Session | None]:
        oldest_s = now_s - self._limits.session_ttl_s
        found = (self._sessions.get(s) for s in session_ids)
        return [None if x is None or x[1] <= oldest_s else x[0] for x in found]

    def _expire(self, now_s: float) -> None:
        oldest_s = now_s - self._limits.session_ttl_s
        while self._sessions:
            _, used_s = next(iter(self._sessions.values()))
            if used_s > oldest_s:
                return
            self._sessions.popitem(last=False)


class MemoryGroups:
    """The hot groups."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._heat: dict[str, float] = {}
        """For each group, `sessions.log_heat_after_use`."""
        self._ends: dict[str, tuple[ChunkKey, ...]] = {}

    def use(self, group: str, chain_end: ChunkKey | None, now_s: float) -> None:
        """Record one use; `chain_end` is None if the chain is not known yet."""
        half_life_s = self._limits.group_half_life_s
        self._heat[group] = log_heat_after_use(self._heat.get(group), now_s, half_life_s)
        ends = self._ends.get(group, ())
        if chain_end is not None:
            ends = (*(e for e in ends if e != chain_end), chain_end)[-MAX_CHAIN_ENDS:]
        self._ends[group] = ends
        if len(self._heat) > self._limits.max_groups:
            coldest = min((g for g in self._heat if g != group), key=self._heat.__getitem__)
            del self._heat[coldest], self._ends[coldest]

    def hottest(self, limit: int, now_s: float) -> list[HotGroup]:
        half_life_s = self._limits.group_half_life_s
        names = heapq.nlargest(limit, self._heat, key=self._heat.__getitem__)
        return [
            HotGroup(name, heat_at(self._heat[name], now_s, half_life_s), self._ends[name])
            for name in names
        ]


class MemoryChainUsers:
    """The users of each chunk."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._users: dict[ChunkKey, set[tuple[Epoch, str]]] = {}
        self._used_s = BoundedDict[ChunkKey, float](limits.max_artifacts)
        """The time of each chunk's last use, least recently used first."""

    def add(self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey], now_s: float) -> None:
        for chunk in chunks:
            users = self._users.setdefault(chunk, set())
            if len(users) < self._limits.max_users:
                users.add((epoch, user))
            self._used_s[chunk] = now_s

    def remove(
        self,
        epoch: Epoch,
        user: str,
        chunks: Sequence[ChunkKey],
        now_s: float,
        is_live: IsLive,
    ) -> list[ChunkKey]:
        unused = []
        for chunk in chunks:
            users = self._users.get(chunk, set())
            if (epoch, user) in users:
                users.remove((epoch, user))
                self._used_s[chunk] = now_s
            self._prune(chunk, is_live)
            if chunk not in self._users:
                unused.append(chunk)
        return unused

    def usage(self, chunk: ChunkKey, now_s: float, is_live: IsLive) -> Usage:
        users = self._users.get(chunk, ())
        used_s = self._used_s.get(chunk)
        count = sum(is_live(epoch) for epoch, _ in users)
        return Usage(count, None if used_s is None else now_s - used_s)

    def sweep(self, oldest_s: float, is_live: IsLive) -> None:
        """Forget users of ended epochs, and unused chunks last used at or before `oldest_s`."""
        for chunk in list(self._users):
            self._prune(chunk, is_live)
        for chunk in [c for c, used_s in self._used_s.items() if used_s <= oldest_s]:
            if chunk not in self._users:
                del self._used_s[chunk]

    def _prune(self, chunk: ChunkKey, is_live: IsLive) -> None:
        users = {r for r in self._users.get(chunk, ()) if is_live(r[0])}
        if users:
            self._users[chunk] = users
        else:
            self._users.pop(chunk, None)
