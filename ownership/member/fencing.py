"""The fence on the data path: nothing of an ended owner is accepted after a takeover.

The directory alone cannot prevent that. Whoever was paused for longer than its lease wakes up
with an answer that was true when it asked. So each process remembers the greatest token it has
seen of an artifact, and refuses what carries a smaller one.

It need not remember for ever. A question asked after a takeover was seen is answered with the
new token, so only answers to older questions can be stale; `Fence` refuses all answers older
than a horizon and forgets what it saw a horizon ago.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from hetero_connector.artifacts.record import ArtifactId
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token

HORIZON_S = 30.0
"""Longest time from asking the directory to using the answer."""
CAPACITY = 65_536
"""Artifacts, and epochs, remembered."""

_K = TypeVar("_K")


class Fence:
    """What one process has seen of takeovers. Not thread-safe."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        horizon_s: float = HORIZON_S,
        capacity: int = CAPACITY,
    ) -> None:
        """`clock`: monotonic seconds."""
        self._clock = clock
        self._horizon_s = horizon_s
        self._tokens: _Recent[ArtifactId] = _Recent(capacity)
        self._ended: _Recent[Epoch] = _Recent(capacity)
        self._refused_until_s = float("-inf")

    def saw(self, artifact: ArtifactId, token: Token) -> None:
        """An owner of the artifact has this token: those before it have ended."""
        self._remember(self._tokens, artifact, token)

    def saw_end(self, epoch: Epoch) -> None:
        """The epoch has ended, or its worker has registered again."""
        self._remember(self._ended, epoch, Token(1))

    def admits(self, artifact: ArtifactId, holder: Epoch, token: Token, asked_s: float) -> bool:
        """Whether bytes of `holder`'s copy, listed under `token`, may be used.

        `asked_s`: what the clock said before the directory was asked. False is a miss. Ask right
        before the bytes become visible, not only before reading them.
        """
        return not self._ended.get(holder) and self.is_latest(artifact, token, asked_s)

    def is_latest(self, artifact: ArtifactId, token: Token, asked_s: float) -> bool:
        """Whether nobody was seen to take the artifact over from the owner with this token.

        Of what a dead owner left; `admits` also asks whether it lives.
        """
        if asked_s <= self._refused_until_s or asked_s < self._clock() - self._horizon_s:
            return False
        if token < self._tokens.get(artifact):
            return False
        self.saw(artifact, token)
        return True

    def __len__(self) -> int:
        """Artifacts and epochs remembered."""
        return len(self._tokens) + len(self._ended)

    def _remember(self, recent: _Recent[_K], key: _K, token: Token) -> None:
        now_s = self._clock()
        recent.forget_before(now_s - self._horizon_s)
        if not recent.put(key, token, now_s):
            # Full: what was seen until now is forgotten, with every answer it could matter for.
            self._refused_until_s = now_s
            self._tokens.clear()
            self._ended.clear()
            recent.put(key, token, now_s)


class _Recent(Generic[_K]):
    """The greatest token of each key and when that was first seen, longest ago first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[_K, tuple[Token, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._seen)

    def get(self, key: _K) -> Token:
        return self._seen.get(key, (NO_TOKEN, 0.0))[0]

    def put(self, key: _K, token: Token, now_s: float) -> bool:
        """False when there is no room."""
        if token <= self.get(key):
            return True
        if key not in self._seen and len(self._seen) >= self._capacity:
            return False
        self._seen[key] = (token, now_s)
        self._seen.move_to_end(key)
        return True

    def forget_before(self, moment_s: float) -> None:
        while self._seen and next(iter(self._seen.values()))[1] < moment_s:
            self._seen.popitem(last=False)

    def clear(self) -> None:
        self._seen.clear()
