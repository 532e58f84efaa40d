"""Sessions without ids: which conversation a prompt continues, and when its next turn is due.

Stock clients send no session id, so `Conversations` recognises a conversation by its tokens, and
`ThinkTimes` learns the time between turns. Time is a parameter everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import NormalDist
from typing import Annotated, NamedTuple

import msgspec

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ChunkKey
from hetero_connector.containers import BoundedDict, ExpiringHeap

_MAX_CHUNKS_BACK = 64
"""Chunks searched backwards from where a prompt leaves what is stored."""
_MAX_PER_CHUNK = 8
"""Conversations remembered that end within the same chunk."""

EARLY, LATE = 0.1, 0.9
"""Quantiles of the gap between which a session is expected."""
_KEEP = 1 - 1 / 256
"""Weight that earlier gaps keep with each new one: about the last 256 count."""
_LEAST_GAP_S = 1e-3
_MOST_GAP_S = 1e9
"""Three decades: keeps hints and what follows from them within floating point."""
_LEAST_SIGMA = 0.05
_MOST_HINT_ERROR = math.log(4.0)
"""One client's hints may be wrong a thousandfold, and all clients' hints share what is learned."""
_LOST_AT = 0.99
"""Quantile of the gap after which a session counts as lost."""
_ENOUGH = 4
"""Gaps, of any session, before anything is predicted without a hint."""


@dataclass(frozen=True)
class _Turn:
    end: int
    key: ChunkKey
    """Names all the prompt's tokens up to `end`."""
    conversation: int


class Conversations:
    """The newest `capacity` conversations, by the end of their last prompt. Not thread-safe.

    A prompt that begins with all of an earlier request's prompt is the next turn of its
    conversation. The prompt's end is rounded down to the alignment at which requests can end.
    Answers do not count: clients rewrite them (stripped reasoning, another tokenisation) more
    often than prompts. Prompts shorter than a chunk continue nothing.
    """

    def __init__(self, chunk_tokens: int, alignment: int, capacity: int = 4096) -> None:
        """`alignment`: a request's end in the store is a multiple of this, in tokens."""
        self._chunk_tokens = chunk_tokens
        self._alignment = alignment
        self._turns = BoundedDict[ChunkKey, Sequence[_Turn]](capacity)
        """By the last full chunk of the prompt, newest turn last."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._turns)

    def take(self, chain: RequestChain, prompt_tokens: int, matched_chunks: int) -> int:
        """Return the conversation that this request continues, or a new one.

        A recorded turn is continued once: it is removed here. `matched_chunks`: the stored
        leading full chunks of the chain; only those are searched.
        """
        conversation = self._take_recorded(chain, prompt_tokens, matched_chunks)
        if conversation is None:
            self._count += 1
            return self._count
        return conversation

    def record(self, chain: RequestChain, prompt_tokens: int, conversation: int) -> None:
        """Record this prompt as the conversation's latest turn."""
        full = min(prompt_tokens, chain.num_tokens) // self._chunk_tokens
        if not full:
            return
        end = prompt_tokens - prompt_tokens % self._alignment
        turn = _Turn(end, chain.ending_at(end).key, conversation)
        last = chain.ending_at(full * self._chunk_tokens).key
        others = [t for t in self._turns.get(last, ()) if t.key != turn.key]
        self._turns[last] = (*others, turn)[-_MAX_PER_CHUNK:]

    def _take_recorded(self, chain: RequestChain, prompt_tokens: int, matched: int) -> int | None:
        for key in islice(chain.keys_back_from(matched), _MAX_CHUNKS_BACK):
            for turn in reversed(self._turns.get(key, ())):
                if turn.end <= prompt_tokens and chain.ending_at(turn.end).key == turn.key:
                    self._remove(key, turn)
                    return turn.conversation
        return None

    def _remove(self, key: ChunkKey, turn: _Turn) -> None:
        others = tuple(t for t in self._turns[key] if t is not turn)
        if others:
            self._turns[key] = others
        else:
            del self._turns[key]


class LogGaps(NamedTuple):
    """Exponentially weighted mean and variance of the logarithms of gaps."""

    weight: Annotated[float, msgspec.Meta(ge=0.0, le=1e3)]
    """Gaps that count."""
    mean: Annotated[float, msgspec.Meta(ge=-100.0, le=100.0)]
    variance: Annotated[float, msgspec.Meta(ge=0.0, le=1e4)]

    def with_one(self, log_s: float) -> LogGaps:
        weight = self.weight * _KEEP + 1.0
        deviation = log_s - self.mean
        mean = self.mean + deviation / weight
        change = deviation * (log_s - mean) - self.variance
        return LogGaps(weight, mean, self.variance + change / weight)

    def normal(self) -> NormalDist:
        return NormalDist(self.mean, max(_LEAST_SIGMA, math.sqrt(self.variance)))


_PRIOR_GAPS = LogGaps(2.0, math.log(30.0), 1.5**2)
"""Prior of ln(gap): half a minute, times or divided by 4.5; weighs like two gaps."""
_PRIOR_HINT_ERRORS = LogGaps(4.0, 0.0, 0.25**2)
"""Prior of ln(gap / hint): a quarter off; weighs like four gaps."""


@dataclass(frozen=True)
class Pace:
    """The part of `ThinkTimes` that is about all sessions together; a profile keeps it.

    The bounds are those of what can have been learned.
    """

    gaps: LogGaps = _PRIOR_GAPS
    """The distribution of ln(gap)."""
    hint_errors: LogGaps = _PRIOR_HINT_ERRORS
    """The distribution of ln(gap / hint)."""
    num_gaps: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Gaps learned so far."""
    returned: Annotated[float, msgspec.Meta(ge=0.0, le=1e3)] = 1.0
    """Turns whose session returned, with fading weight and a prior of one."""
    decided: Annotated[float, msgspec.Meta(gt=0.0, le=1e3)] = 1.0
    """Turns of which it is known whether it did; likewise."""


@dataclass(frozen=True)
class ReturnWindow:
    """The time in which a session's next turn is expected, on the clock of the turn's end."""

    earliest_s: float
    latest_s: float
    probability: float
    """The probability that it comes in between."""


@dataclass(slots=True)
class _Session:
    gaps: LogGaps | None = None
    """None before its first gap."""
    running: int = 0
    """Turns that run now: some clients run several at once."""


class _Wait(NamedTuple):
    """A session's wait for its next turn."""

    ended_s: float
    hint_s: float | None


class ThinkTimes:
    """Learns the gaps between turns and predicts the next. Keeps the newest `max_sessions`.

    The gaps of multi-turn traffic are close to log-normal, with parameters that differ by
    deployment (SAECache, arXiv:2605.18825). So the mean and variance of the logarithm are learned
    online, for all sessions together and for each one. A session begins with those of all
    sessions, which weigh as much as one gap of its own. A client's hint is one more log-normal,
    centred on the hint, as wide as earlier hints were wrong.

    One thread learns; `return_probability` may be called on another, and `pace`.
    """

    def __init__(self, max_sessions: int = 4096, pace: Pace | None = None) -> None:
        """`pace`: learned earlier, to start from."""
        pace = pace or Pace()
        self._sessions = BoundedDict[Hashable, _Session](max_sessions)
        self._waits = BoundedDict[Hashable, _Wait](max_sessions)
        self._lost = ExpiringHeap[Hashable, _Wait](self._waits)
        """The times from which waiting sessions count as lost."""
        self._all = pace.gaps
        self._hint_errors = pace.hint_errors
        self._gaps = pace.num_gaps
        self._returned, self._decided = pace.returned, pace.decided
        self._return_rate = min(1.0, pace.returned / pace.decided)
        """Their ratio, as one value: another thread reads it."""

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def pace(self) -> Pace:
        """The state of all sessions together, as learned so far. Any thread may ask."""
        return Pace(self._all, self._hint_errors, self._gaps, self._returned, self._decided)

    def on_turn_start(self, key: Hashable, now_s: float) -> None:
        """A turn of the session has arrived."""
        session = self._touch(key)
        session.running += 1
        wait = self._waits.pop(key, None)
        if wait is not None:
            self._learn(session, max(_LEAST_GAP_S, now_s - wait.ended_s), wait.hint_s)
        self._lost.prune()

    def on_turn_end(
        self, key: Hashable, now_s: float, hint_s: float | None = None
    ) -> ReturnWindow | None:
        """A turn is over: predict the next one.

        None while other turns of the session run, and if nothing is known yet. `hint_s`: the
        client's own prediction, in seconds from now.
        """
        session = self._touch(key)
        session.running = max(0, session.running - 1)
        if session.running:
            return None
        if hint_s is not None:
            hint_s = min(_MOST_GAP_S, max(_LEAST_GAP_S, hint_s))
        normal = self._next_gap(session, hint_s)
        wait = self._waits[key] = _Wait(now_s, hint_s)
        self._lost.push(now_s + _quantile_s(normal, _LOST_AT), key, wait)
        self._remove_lost(now_s)
        if hint_s is None and self._gaps < _ENOUGH:
            return None
        return_rate = 1.0 if hint_s is not None else self._return_rate
        return ReturnWindow(
            now_s + _quantile_s(normal, EARLY),
            now_s + _quantile_s(normal, LATE),
            (LATE - EARLY) * return_rate,
        )

    def on_turn_failed(self, key: Hashable) -> None:
        """A turn has ended without an answer: it may be sent again, so no wait begins."""
        if (session := self._sessions.get(key)) is not None:
            session.running = max(0, session.running - 1)

    def forget(self, key: Hashable) -> None:
        """The session has ended: no next turn is waited for."""
        self._sessions.pop(key, None)
        self._waits.pop(key, None)
        self._lost.prune()

    def return_probability(self, idle_s: float, within_s: float) -> float:
        """The probability that a session idle for `idle_s` returns in the next `within_s`.

        For an unknown session: for state of which only the last use is known.
        """
        normal, return_rate = self._all.normal(), self._return_rate
        until_now = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s)))
        until_then = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s + within_s)))
        still_out = 1.0 - return_rate * until_now
        return return_rate * (until_then - until_now) / still_out if still_out > 0.0 else 0.0

    def _touch(self, key: Hashable) -> _Session:
        """Return the session, now the newest."""
        session = self._sessions[key] = self._sessions.get(key) or _Session()
        return session

    def _learn(self, session: _Session, gap_s: float, hint_s: float | None) -> None:
        log_s = math.log(gap_s)
        session.gaps = (session.gaps or self._all._replace(weight=1.0)).with_one(log_s)
        self._all = self._all.with_one(log_s)
        self._gaps += 1
        self._count_decided(returned=1.0)
        if hint_s is not None:
            error = log_s - math.log(hint_s)
            bounded = max(-_MOST_HINT_ERROR, min(_MOST_HINT_ERROR, error))
            self._hint_errors = self._hint_errors.with_one(bounded)

    def _next_gap(self, session: _Session, hint_s: float | None) -> NormalDist:
        """The distribution of the logarithm of the next gap, in seconds."""
        if hint_s is None:
            return (session.gaps or self._all).normal()
        return self._hint_errors.normal() + math.log(hint_s)

    def _remove_lost(self, now_s: float) -> None:
        """Remove the sessions that are lost."""
        while (key := self._lost.pop_due(now_s)) is not None:
            del self._waits[key]
            self._sessions.pop(key, None)
            self._count_decided(returned=0.0)

    def _count_decided(self, returned: float) -> None:
        self._returned = self._returned * _KEEP + returned
        self._decided = self._decided * _KEEP + 1.0
        self._return_rate = self._returned / self._decided


def _quantile_s(logs: NormalDist, share: float) -> float:
    """Seconds that this share of the gaps do not exceed."""
    return math.exp(min(math.log(_MOST_GAP_S), logs.inv_cdf(share)))
