"""Sessions and hot groups: what the fleet remembers of conversations.

A session is metadata, never a unit of eviction: where it decodes, the boundary at which it
can resume, how long its user or tool takes between turns. Forgetting one costs time, not
answers. The rules are pure functions of a `Session` and the directory's time, so that every
directory keeps them alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from hetero_connector.artifacts.record import ROOT, ChunkKey
from ownership.directory.identifiers import NO_EPOCH, NO_TOKEN, Epoch, Token

MAX_THINK_TIMES = 16
"""Think times kept of a session."""
MAX_CHAIN_ENDS = 8
"""Chain ends kept of a group."""
MAX_NAME_BYTES = 256
"""Of a session's, group's, reader's or worker's name in UTF-8."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation as the directory knows it."""

    session_id: str
    token: Token = NO_TOKEN
    """Grows whenever another epoch takes the session over."""
    decode_owner: Epoch = NO_EPOCH
    """Where it decodes, or last did."""
    boundary: ChunkKey = ROOT
    """The chunk at whose end the next turn can resume; `ROOT` before the first turn's end."""
    boundary_tokens: int = 0
    group: str = ""
    """Repository or document it is about; "" if unknown."""
    think_s: tuple[float, ...] = ()
    """Seconds between a turn's end and the next one's begin, oldest first, the last few."""
    turn_ended_s: float | None = None
    """Directory time of the last turn's end; None while a turn runs."""

    def begun(self, owner: Epoch, token: Token, group: str, now_s: float) -> Session:
        """After a turn has begun at `owner`. An empty `group` keeps the one that is known."""
        think_s = self.think_s
        if self.turn_ended_s is not None:
            # A clock that was set back has measured nothing: 0 is the least that can be true.
            think_s = (*think_s, max(0.0, now_s - self.turn_ended_s))[-MAX_THINK_TIMES:]
        return replace(
            self,
            token=token,
            decode_owner=owner,
            group=group or self.group,
            think_s=think_s,
            turn_ended_s=None,
        )

    def ended(self, boundary: ChunkKey, boundary_tokens: int, now_s: float) -> Session:
        """After its turn has ended, resumable at `boundary`."""
        return replace(self, boundary=boundary, boundary_tokens=boundary_tokens, turn_ended_s=now_s)


class SessionGrant(NamedTuple):
    """The answer to `begin_turn` and `end_turn`."""

    granted: bool
    """False: another live epoch has the session, nothing was changed."""
    session: Session
    """As it is now."""


class HotGroup(NamedTuple):
    """A repository or document that many requests are about."""

    name: str
    heat: float
    """Uses, each counted half after every `group_half_life_s`."""
    chain_ends: tuple[ChunkKey, ...]
    """Where chains of the group ended, the latest last: what to replicate."""


def heated(log_heat: float | None, now_s: float, half_life_s: float) -> float:
    """A group's logarithmic heat after one more use at `now_s`; None: never used before.

    A use at time t weighs 2^(t / half life) for good (forward decay: Cormode et al., ICDE
    2009), so nothing has to be aged; kept as log2 of the sum, which does not overflow.
    """
    use = now_s / half_life_s
    if log_heat is None:
        return use
    high, low = max(use, log_heat), min(use, log_heat)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1_000.0))


def heat(log_heat: float, now_s: float, half_life_s: float) -> float:
    """Uses that count at `now_s`. A clock that was set far back must not overflow."""
    return float(2.0 ** min(log_heat - now_s / half_life_s, 1_000.0))


class SessionDirectory(Protocol):
    """Sessions and hot groups; see `directory` for what holds of every method."""

    def begin_turn(
        self, epoch: Epoch, session_id: str, group: str = "", expected: Token | None = None
    ) -> SessionGrant:
        """The session decodes at `epoch` from now on; unknown: it is made.

        Granted unless another live epoch has it and `expected` is not its token: a router that
        has read the session may so move it from a live owner, and only one of two wins. A
        change of owner takes a new token. Notes the think time, marks the group as used.
        Raises StaleEpochError, and ValueError for a name that is empty or too long.
        """
        ...

    def end_turn(
        self,
        epoch: Epoch,
        session_id: str,
        token: Token,
        boundary: ChunkKey,
        boundary_tokens: int,
    ) -> SessionGrant:
        """Note where the session can resume. Not granted unless `epoch` has it under `token`.

        Raises StaleEpochError.
        """
        ...

    def sessions(self, session_ids: Sequence[str]) -> list[Session | None]:
        """What is known of each; None: nothing. Changes nothing."""
        ...

    def note_group(self, epoch: Epoch, group: str, chain_end: ChunkKey) -> None:
        """A request about `group` used the chain that ends there. Raises StaleEpochError."""
        ...

    def hot_groups(self, limit: int) -> list[HotGroup]:
        """The hottest groups, hottest first. Changes nothing."""
        ...
