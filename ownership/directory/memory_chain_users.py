"""The chain users of `MemoryDirectory`. The caller holds its lock."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hetero_connector.artifacts.record import ChunkKey
from ownership.directory.identifiers import Epoch

IsLive = Callable[[Epoch], bool]


class MemoryChainUsers:
    """The users of each chunk."""

    def __init__(self, max_users: int) -> None:
        self._max_users = max_users
        self._users: dict[ChunkKey, set[tuple[Epoch, str]]] = {}

    def add(self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey]) -> None:
        for chunk in chunks:
            users = self._users.setdefault(chunk, set())
            if len(users) < self._max_users:
                users.add((epoch, user))

    def remove(
        self, epoch: Epoch, user: str, chunks: Sequence[ChunkKey], is_live: IsLive
    ) -> list[ChunkKey]:
        unused = []
        for chunk in chunks:
            self._users.get(chunk, set()).discard((epoch, user))
            self._prune(chunk, is_live)
            if chunk not in self._users:
                unused.append(chunk)
        return unused

    def count(self, chunk: ChunkKey, is_live: IsLive) -> int:
        return sum(is_live(epoch) for epoch, _ in self._users.get(chunk, ()))

    def sweep(self, is_live: IsLive) -> None:
        """Forget users of ended epochs."""
        for chunk in list(self._users):
            self._prune(chunk, is_live)

    def _prune(self, chunk: ChunkKey, is_live: IsLive) -> None:
        users = {r for r in self._users.get(chunk, ()) if is_live(r[0])}
        if users:
            self._users[chunk] = users
        else:
            self._users.pop(chunk, None)
