"""The fence on the data path: it refuses copies of a former owner after a takeover.

The directory alone cannot refuse them. A worker that was paused for longer than its lease wakes up
with an answer that was true when it asked. So each process remembers the greatest token it has
seen of each artifact, and refuses copies that carry a smaller one.

It need not remember for ever. A lookup made after a takeover was seen returns the new token, so
only answers to older lookups can be stale. `Fence` refuses every answer older than a horizon, and
forgets tokens that it saw longer than a horizon ago.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from hetero_connector.artifacts.record import ArtifactId
from ownership.directory.identifiers import NO_TOKEN, Epoch, Token

HORIZON_S = 30.0
"""Longest time from asking the directory to using the answer."""
CAPACITY = 1 << 18
"""Artifacts, and epochs, remembered. A chain of a million tokens has some 20,000 artifacts, and
each lookup adds its own."""

_K = TypeVar("_K")


class Fence:
    """The takeovers that one process has seen. Not thread-safe."""

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

    def note_token(self, artifact: ArtifactId, token: Token) -> None:
        """Record that an owner of the artifact has this token: all owners before it have ended."""
        self.note_tokens({artifact: token})

    def note_tokens(self, tokens: Mapping[ArtifactId, Token]) -> None:
        """Record the tokens of many artifacts at once."""
        self._remember(self._tokens, tokens)

    def note_end(self, epoch: Epoch) -> None:
        """Record that the epoch has ended, or that its worker has registered again."""
        self._remember(self._ended, {epoch: Token(1)})

    def admit(self, artifact: ArtifactId, holder: Epoch, token: Token, asked_s: float) -> bool:
        """Return True if the bytes of `holder`'s copy, listed under `token`, may be used.

        `asked_s`: the clock's time before the directory was asked. False is a miss. Call it right
        before the bytes become visible, not only before they are read. The token of an admitted
        copy is recorded, so that no copy under a smaller one is admitted after it.
        """
        return not self._ended.get(holder) and self.admit_orphan(artifact, token, asked_s)

    def admit_orphan(self, artifact: ArtifactId, token: Token, asked_s: float) -> bool:
        """Return True if no takeover of the artifact from the owner with this token was seen.

        It is for copies that an ended owner left. `admit` also requires a holder that has not
        ended.
        """
        if not self._is_latest(artifact, token, asked_s):
            return False
        self.note_token(artifact, token)
        return True

    def _is_latest(self, artifact: ArtifactId, token: Token, asked_s: float) -> bool:
        if asked_s <= self._refused_until_s or asked_s < self._clock() - self._horizon_s:
            return False
        return token >= self._tokens.get(artifact)

    def _remember(self, recent: _Recent[_K], tokens: Mapping[_K, Token]) -> None:
        now_s = self._clock()
        recent.forget_before(now_s - self._horizon_s)
        for key, token in tokens.items():
            if not recent.put(key, token, now_s):
                # Full: forget all, and refuse every answer for which it could matter.
                self._refused_until_s = now_s
                self._tokens.clear()
                self._ended.clear()
                recent.put(key, token, now_s)


class _Recent(Generic[_K]):
    """The greatest token of each key and when it was first seen, oldest first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._seen: OrderedDict[_K, tuple[Token, float]] = OrderedDict()

    def get(self, key: _K) -> Token:
        return self._seen.get(key, (NO_TOKEN, 0.0))[0]

    def put(self, key: _K, token: Token, now_s: float) -> bool:
        """Return False if there is no room."""
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
