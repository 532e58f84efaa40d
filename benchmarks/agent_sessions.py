"""Agent sessions as requests with token ids: from a recorded trace, or grown synthetically.

A trace names the 64-token blocks of every prompt, not its tokens. Here all tokens of a block have
the block's id: no measurement depends on their values. The prompt's last, unfinished block and the
answer are not in a trace. They are taken from the session's next request that continues the
prompt, if that is long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.synthetic_sessions import CODING_AGENT, Constant
from benchmarks.synthetic_sessions import synthetic as synthetic_trace
from ownership.simulator.traces.readers import open_trace
from ownership.simulator.traces.session import Request
from ownership.simulator.traces.session import Session as TraceSession

BLOCK_TOKENS = 64
_LOOK_AHEAD = 16
"""Later requests that are searched for the one that continues a prompt."""
_LAST_TOKEN_ID = (1 << 32) - 1

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    at_s: float
    """Seconds since the session began."""
    blocks: Ids
    """Ids of the prompt's full blocks. Equal ids are equal prefixes, in all sessions."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class Session:
    """Turns in the order they were sent."""

    name: str
    turns: tuple[Turn, ...]
    block_tokens: int = BLOCK_TOKENS


class TokenTurn(NamedTuple):
    """A turn with its token ids."""

    session: int
    at_s: float
    tokens: list[int]
    """The prompt and its answer."""
    prompt_tokens: int


def token_turns(
    sessions: Sequence[Session], starts_s: Sequence[float] | None = None
) -> Iterator[TokenTurn]:
    """Yield every turn. They are large, so each is made when it is needed.

    Session i begins at `starts_s[i]`, and turns come in the order of time. Without `starts_s` one
    session comes after the other.
    """
    starts = starts_s or [0.0] * len(sessions)
    unseen = count(_LAST_TOKEN_ID, -1)
    made = [_SessionTokens(session, unseen) for session in sessions]
    order = [
        (starts[number] + turn.at_s, number, index)
        for number, session in enumerate(sessions)
        for index, turn in enumerate(session.turns)
    ]
    for at_s, number, index in sorted(order) if starts_s else order:
        tokens, prompt_tokens = made[number].turn(index)
        yield TokenTurn(number, at_s, tokens, prompt_tokens)


def recorded(path: Path, num_sessions: int) -> list[Session]:
    """Read evenly spaced sessions of a trace file. Raises TraceError."""
    trace = open_trace(path)
    sessions = list(trace)
    chosen = sessions[:: max(1, len(sessions) // num_sessions)][:num_sessions]
    return [_session(session, trace.block_tokens) for session in chosen]


def synthetic(num_sessions: int, seed: int) -> list[Session]:
    """Make sessions that grow like recorded coding agents; 2% of the turns are continued twice."""
    trace = synthetic_trace(
        replace(CODING_AGENT, fork_fraction=0.02, fork_width=Constant(1)),
        sessions=num_sessions,
        rate=1.0,
        block_tokens=BLOCK_TOKENS,
        seed=seed,
    )
    return [_session(session, trace.block_tokens) for session in trace]


def _session(session: TraceSession, block_tokens: int) -> Session:
    return Session(
        session.id, tuple(_turn(r, block_tokens) for r in session.requests), block_tokens
    )


def _turn(request: Request, block_tokens: int) -> Turn:
    full = request.blocks.ids()[: request.input_tokens // block_tokens]
    return Turn(request.offset_s, full, request.input_tokens, request.output_tokens)


class _SessionTokens:
    """The token ids of one session's turns."""

    def __init__(self, session: Session, unseen: Iterator[int]) -> None:
        self._block_tokens = session.block_tokens
        self._turns = session.turns
        self._unseen = unseen
        self._next = [self._continued_by(i) for i in range(len(self._turns))]
        self._last: dict[int, int] = {}
        """Id of the unfinished last block, by turn."""
        for index in reversed(range(len(self._turns))):
            later = self._next[index]
            self._last[index] = next(unseen) if later is None else self._block_after(index, later)

    def turn(self, index: int) -> tuple[list[int], int]:
        """Return the token ids of prompt and answer, and the length of the prompt."""
        turn, later = self._turns[index], self._next[index]
        prompt = self._prompt(index, 0, turn.prompt_tokens)
        end = turn.prompt_tokens + turn.output_tokens
        if later is not None and self._turns[later].prompt_tokens >= end:
            answer = self._prompt(later, turn.prompt_tokens, end)
        else:
            answer = [next(self._unseen)] * turn.output_tokens
        return prompt + answer, turn.prompt_tokens

    def _continued_by(self, index: int) -> int | None:
        """Return the next request whose prompt begins with this one's full blocks and is longer."""
        turn = self._turns[index]
        for later in range(index + 1, min(index + 1 + _LOOK_AHEAD, len(self._turns))):
            other = self._turns[later]
            if other.prompt_tokens > turn.prompt_tokens and np.array_equal(
                other.blocks[: len(turn.blocks)], turn.blocks
            ):
                return later
        return None

    def _block_after(self, index: int, later: int) -> int:
        """Return the block after the turn's full ones, from a later turn that continues it."""
        blocks, size = self._turns[later].blocks, len(self._turns[index].blocks)
        return int(blocks[size]) if len(blocks) > size else self._last[later]

    def _prompt(self, index: int, start: int, end: int) -> list[int]:
        """Return the token ids [start, end) of a turn's prompt."""
        size = self._block_tokens
        ids = np.append(self._turns[index].blocks, self._last[index])
        ids = ids[start // size : -(-end // size)]
        tokens: list[int] = np.repeat(ids, size)[start % size :][: end - start].tolist()
        assert len(tokens) == end - start, "a prompt has no more than one unfinished block"
        return tokens
