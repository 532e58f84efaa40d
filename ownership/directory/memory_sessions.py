"""Sessions, hot groups and chain readers of one process."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory.contract import DirectoryLimits, Usage
from ownership.directory.identifiers import NO_EPOCH, Epoch, Token
from ownership.directory.sessions import (
    MAX_CHAIN_ENDS,
    HotGroup,
    Session,
    SessionGrant,
    heat,
    heated,
)

IsLive = Callable[[Epoch], bool]


class MemorySessions:
    """What `SessionDirectory` remembers. The caller has checked the epoch and holds the lock."""

    def __init__(self, limits: DirectoryLimits, next_token: Callable[[], Token]) -> None:
        self._limits = limits
        self._next_token = next_token
        self._sessions: OrderedDict[str, tuple[Session, float]] = OrderedDict()
        """Session and when it was last used, least recently used first."""

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
        taken = owner not in (NO_EPOCH, epoch) and is_live(owner)
        if taken and expected != session.token:
            return SessionGrant(False, session)
        token = session.token if owner == epoch else self._next_token()
        begun = session.begun(epoch, token, group, now_s)
        self._put(begun, now_s)
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
        ended = session.ended(boundary, boundary_tokens, now_s)
        self._put(ended, now_s)
        return SessionGrant(True, ended)

    def get(self, session_ids: Sequence[str], now_s: float) -> list[Session | None]:
        oldest_s = now_s - self._limits.session_ttl_s
        found = (self._sessions.get(s) for s in session_ids)
        return [None if x is None or x[1] <= oldest_s else x[0] for x in found]

    def _put(self, session: Session, now_s: float) -> None:
        self._sessions[session.session_id] = (session, now_s)
        self._sessions.move_to_end(session.session_id)
        if len(self._sessions) > self._limits.max_sessions:
            self._sessions.popitem(last=False)

    def _expire(self, now_s: float) -> None:
        oldest_s = now_s - self._limits.session_ttl_s
        while self._sessions:
            _, used_s = next(iter(self._sessions.values()))
            if used_s > oldest_s:
                return
            self._sessions.popitem(last=False)


class MemoryGroups:
    """Hot groups. The caller holds the lock."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._heat: dict[str, float] = {}
        """log2 of each group's forward-decayed uses, see `sessions.heated`."""
        self._ends: dict[str, tuple[ChunkKey, ...]] = {}

    def use(self, group: str, chain_end: ChunkKey | None, now_s: float) -> None:
        """One use; None: which chain is not known yet."""
        half_life_s = self._limits.group_half_life_s
        self._heat[group] = heated(self._heat.get(group), now_s, half_life_s)
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
            HotGroup(name, heat(self._heat[name], now_s, half_life_s), self._ends[name])
            for name in names
        ]


class MemoryChainUsers:
    """Who reads which chunk. The caller holds the lock."""

    def __init__(self, limits: DirectoryLimits) -> None:
        self._limits = limits
        self._readers: dict[ChunkKey, set[tuple[Epoch, str]]] = {}
        self._used_s: dict[ChunkKey, float] = {}
        """When each chunk was last used, longest ago first."""

    def add(self, epoch: Epoch, reader: str, chunks: Sequence[ChunkKey], now_s: float) -> None:
        for chunk in chunks:
            readers = self._readers.setdefault(chunk, set())
            if len(readers) < self._limits.max_users:
                readers.add((epoch, reader))
            self._use(chunk, now_s)

    def remove(
        self,
        epoch: Epoch,
        reader: str,
        chunks: Sequence[ChunkKey],
        now_s: float,
        is_live: IsLive,
    ) -> list[ChunkKey]:
        free = []
        for chunk in chunks:
            readers = self._readers.get(chunk, set())
            if (epoch, reader) in readers:
                readers.remove((epoch, reader))
                self._use(chunk, now_s)
            self._prune(chunk, is_live)
            if chunk not in self._readers:
                free.append(chunk)
        return free

    def usage(self, chunk: ChunkKey, now_s: float, is_live: IsLive) -> Usage:
        readers = self._readers.get(chunk, ())
        used_s = self._used_s.get(chunk)
        count = sum(is_live(epoch) for epoch, _ in readers)
        return Usage(count, None if used_s is None else now_s - used_s)

    def sweep(self, oldest_s: float, is_live: IsLive) -> None:
        """Forget readers of ended epochs, and the use of chunks nobody reads since `oldest_s`."""
        for chunk in list(self._readers):
            self._prune(chunk, is_live)
        for chunk in [c for c, used_s in self._used_s.items() if used_s <= oldest_s]:
            if chunk not in self._readers:
                del self._used_s[chunk]

    def _use(self, chunk: ChunkKey, now_s: float) -> None:
        self._used_s.pop(chunk, None)
        self._used_s[chunk] = now_s
        if len(self._used_s) > self._limits.max_artifacts:
            del self._used_s[next(iter(self._used_s))]

    def _prune(self, chunk: ChunkKey, is_live: IsLive) -> None:
        readers = {r for r in self._readers.get(chunk, ()) if is_live(r[0])}
        if readers:
            self._readers[chunk] = readers
        else:
            self._readers.pop(chunk, None)
