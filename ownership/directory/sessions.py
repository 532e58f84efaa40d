"""The directory's contract for sessions and hot groups.

A session is metadata, never a unit of eviction: the worker that decodes it, the boundary at which
it can resume, and how long its user or tool takes between turns. Forgetting one costs time, never
a wrong answer. The rules are pure functions of a `Session` and the directory's time, so that every
directory follows the same ones.
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
"""Longest name of a session, group, user or worker, in UTF-8."""


@dataclass(frozen=True, slots=True)
class Session:
    """The directory's record of a conversation."""

    session_id: str
    token: Token = NO_TOKEN
    """Grows each time another epoch takes the session over."""
    decode_owner: Epoch = NO_EPOCH
    """The epoch at which it decodes, or last did."""
    boundary: ChunkKey = ROOT
    """The chunk at whose end the next turn can resume; `ROOT` before the first turn's end."""
    boundary_tokens: int = 0
    group: str = ""
    """The repository or document it is about; "" if unknown."""
    think_s: tuple[float, ...] = ()
    """Seconds between the end of a turn and the next turn, oldest first. At most
    `MAX_THINK_TIMES`."""
    turn_ended_s: float | None = None
    """Directory time at which the last turn ended; None while a turn runs."""

    def with_turn_begun(self, owner: Epoch, token: Token, group: str, now_s: float) -> Session:
        """Return the session with a turn begun at `owner`. An empty `group` keeps the old one."""
        think_s = self.think_s
        if self.turn_ended_s is not None:
            # A clock that was set back has measured nothing; no think time is below 0.
            think_s = (*think_s, max(0.0, now_s - self.turn_ended_s))[-MAX_THINK_TIMES:]
        return replace(
            self,
            token=token,
            decode_owner=owner,
            group=group or self.group,
            think_s=think_s,
            turn_ended_s=None,
        )

    def with_turn_ended(self, boundary: ChunkKey, boundary_tokens: int, now_s: float) -> Session:
        """Return the session after its turn has ended, resumable at `boundary`."""
        return replace(self, boundary=boundary, boundary_tokens=boundary_tokens, turn_ended_s=now_s)


class SessionGrant(NamedTuple):
    """The answer to `begin_turn` and `end_turn`."""

    granted: bool
    """False: another live epoch has the session, and nothing was changed."""
    session: Session
    """The session after the call."""


class HotGroup(NamedTuple):
    """A repository or document that many requests are about, with prefixes they share."""

    name: str
    heat: float
    """Number of uses; the weight of each halves every `group_half_life_s`."""
    chain_ends: tuple[ChunkKey, ...]
    """The last chunks of the group's chains, the latest last: candidates for replicas."""


def log_heat_after_use(log_heat: float | None, now_s: float, half_life_s: float) -> float:
    """Return the log2 of a group's heat after one more use at `now_s`. `log_heat` None: unused.

    A use at time t weighs 2^(t / half life) for ever (forward decay: Cormode et al., ICDE 2009),
    so no value has to be aged. The log2 of the sum is stored, which does not overflow.
    """
    use = now_s / half_life_s
    if log_heat is None:
        return use
    high, low = max(use, log_heat), min(use, log_heat)
    return high + math.log2(1.0 + 2.0 ** max(low - high, -1_000.0))


def heat_at(log_heat: float, now_s: float, half_life_s: float) -> float:
    """Return the group's heat at `now_s`. Capped, so a clock set far back does not overflow it."""
    return float(2.0 ** min(log_heat - now_s / half_life_s, 1_000.0))


class SessionDirectory(Protocol):
    """Sessions and hot groups. The rules in `contract` hold for every method here, too."""

    def begin_turn(
        self, epoch: Epoch, session_id: str, group: str = "", expected: Token | None = None
    ) -> SessionGrant:
        """Make `epoch` the worker that decodes the session; an unknown session is created.

        Granted unless another live epoch has the session and `expected` is not its token. So a
        router that has read the session can move it away from a live owner, and of two routers
        only one succeeds. A change of owner takes a new token. The think time is recorded and the
        group marked as used. Raises StaleEpochError, and ValueError for a name that is empty or
        too long.
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
        """Record the boundary at which the session can resume.

        Granted only if `epoch` has the session under `token`.

        Raises StaleEpochError.
        """
        ...

    def sessions(self, session_ids: Sequence[str]) -> list[Session | None]:
        """Return the record of each session, None for an unknown one. Changes nothing."""
        ...

    def note_group(self, epoch: Epoch, group: str, chain_end: ChunkKey) -> None:
        """Record that a request about `group` used the chain with this end.

        Raises StaleEpochError.
        """
        ...

    def hot_groups(self, limit: int) -> list[HotGroup]:
        """Return the hottest groups, hottest first. Changes nothing."""
        ...
