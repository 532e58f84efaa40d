"""When a session is expected back: learned from the time between its turns.

The gaps between turns of multi-turn traffic are close to log-normal, with parameters that
differ by deployment (SAECache, arXiv:2605.18825), so the logarithm's mean and variance are
learned online: of all sessions, and of each session drawn towards all the more, the fewer
of its gaps are known and the less sessions differ (the normal random-effects model: Gelman
et al., Bayesian Data Analysis, section 5.4). A client's hint is one more log-normal, around
the hint, as wide as hints were off so far.

Time comes in through parameters. One thread learns; `returns_within` may be asked on another.

Which conversation a prompt continues, told by its tokens: stock clients send no id.

A prompt that begins with all of an earlier request's prompt, up to the grain at which
requests can end, is the next turn of its conversation. Answers are left out: clients
rewrite them (stripped reasoning, another tokenisation) more often than prompts.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from statistics import NormalDist
from typing import NamedTuple

from hetero_connector.artifacts.chain import RequestChain
from hetero_connector.artifacts.record import ChunkKey

EARLY, LATE = 0.1, 0.9
"""Quantiles of the gap between which a session is expected."""
_KEEP = 1 - 1 / 256
"""Weight left to what was seen before, with each gap: about the last 256 count."""
_LEAST_GAP_S = 1e-3
_MOST_GAP_S = 1e9
"""Three decades: keeps what clients say and what follows from it within floating point."""
_LEAST_SIGMA = 0.05
_LOST_AT = 0.99
"""Quantile of the gap after which a session counts as not coming back."""
_BORROWED = 2.0
"""Gaps of a session that say as much of its regularity as what is known of all sessions'."""
_ENOUGH = 4
"""Gaps seen, of any session, before anything is predicted without a hint."""
_SWEEP_FROM = 64


class _Logs(NamedTuple):
    """Exponentially weighted mean and variance of logarithms of seconds."""

    weight: float
    mean: float
    squares: float
    """Sum of weighted squared deviations."""

    def with_one(self, log_s: float) -> _Logs:
        weight = self.weight * _KEEP + 1.0
        off = log_s - self.mean
        mean = self.mean + off / weight
        return _Logs(weight, mean, self.squares * _KEEP + off * (log_s - mean))

    def normal(self) -> NormalDist:
        return NormalDist(self.mean, max(_LEAST_SIGMA, math.sqrt(self.squares / self.weight)))


_NO_GAPS = _Logs(0.0, 0.0, 0.0)
_ANY_GAP = _Logs(2.0, math.log(30.0), 2.0 * 1.5**2)
"""Before any is seen: half a minute, give or take a factor of 4.5; counts like two gaps."""
_ANY_DRIFT = _Logs(2.0, 0.0, 2.0 * 1.0**2)
"""Of ln(gap / the session's mean) before any is seen."""
_ANY_HINT_ERROR = _Logs(4.0, 0.0, 4.0 * 0.25**2)
"""Of ln(gap / hint) before any is seen: a quarter off; counts like four."""


@dataclass(frozen=True)
class Return:
    """When a session is expected back. Times of the clock its turn's end was given in."""

    earliest_s: float
    latest_s: float
    probability: float
    """That it comes back in between."""


@dataclass(slots=True)
class _Session:
    gaps: _Logs = _NO_GAPS
    ended_s: float | None = None
    """End of its last turn; None while one runs."""
    hint_s: float | None = None
    running: int = 0
    """Turns under way: some clients run several at once."""
    lost_s: float = math.inf
    """When it counts as not coming back."""


@dataclass
class ThinkTimes:
    """Learns gaps, and predicts the next. Remembers the newest `max_sessions` sessions."""

    max_sessions: int = 4096
    _sessions: OrderedDict[Hashable, _Session] = field(default_factory=OrderedDict)
    """Least recently heard of first."""
    _due: list[tuple[float, int, Hashable]] = field(default_factory=list)
    """A heap: when a session counts as lost, in what order that was said, and whose it is. What
    was said of one that has come back since stays until then, or until there is much of it."""
    _said: int = 0
    _all: _Logs = _ANY_GAP
    _within: _Logs = _ANY_DRIFT
    _hint_errors: _Logs = _ANY_HINT_ERROR
    _seen: int = 0
    _back: float = 1.0
    _asked: float = 1.0
    """Turns whose session came back, and all that were decided; fading, and a prior of one."""

    def __len__(self) -> int:
        return len(self._sessions)

    def began(self, key: Hashable, now_s: float) -> None:
        """A turn of the session has arrived."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
        self._sessions.move_to_end(key)
        session.running += 1
        if session.ended_s is not None:
            self._learn(session, max(_LEAST_GAP_S, now_s - session.ended_s))
            session.ended_s, session.lost_s = None, math.inf
        self._forget()

    def ended(self, key: Hashable, now_s: float, hint_s: float | None = None) -> Return | None:
        """A turn is over: when the next is due. None while others run, or nothing is known.

        `hint_s`: what the client says, in seconds from now.
        """
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
        self._sessions.move_to_end(key)
        session.running = max(0, session.running - 1)
        if session.running:
            return None
        session.ended_s = now_s
        session.hint_s = None
        if hint_s is not None:
            session.hint_s = min(_MOST_GAP_S, max(_LEAST_GAP_S, hint_s))
        normal = self._normal(session)
        session.lost_s = now_s + _quantile_s(normal, _LOST_AT)
        self._said += 1
        heappush(self._due, (session.lost_s, self._said, key))
        self._count_lost(now_s)
        self._forget()
        if hint_s is None and self._seen < _ENOUGH:
            return None
        rate = 1.0 if hint_s is not None else self._back / self._asked
        return Return(
            now_s + _quantile_s(normal, EARLY),
            now_s + _quantile_s(normal, LATE),
            (LATE - EARLY) * rate,
        )

    def returns_within(self, idle_s: float, within_s: float) -> float:
        """How likely a session unheard of for `idle_s` comes back in the next `within_s`.

        Of any session: for what is known of state by its last use alone.
        """
        normal, rate = self._all.normal(), self._back / self._asked
        until_now = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s)))
        until_then = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s + within_s)))
        still_out = 1.0 - rate * until_now
        return rate * (until_then - until_now) / still_out if still_out > 0.0 else 0.0

    def _learn(self, session: _Session, gap_s: float) -> None:
        log_s = math.log(gap_s)
        if session.gaps.weight:
            self._within = self._within.with_one(log_s - session.gaps.mean)
        session.gaps = session.gaps.with_one(log_s)
        self._all = self._all.with_one(log_s)
        self._seen += 1
        self._decided(back=1.0)
        if session.hint_s is not None:
            self._hint_errors = self._hint_errors.with_one(log_s - math.log(session.hint_s))

    def _normal(self, session: _Session) -> NormalDist:
        """Of the logarithm of the next gap, in seconds."""
        if session.hint_s is not None:
            error = self._hint_errors.normal()
            return NormalDist(math.log(session.hint_s) + error.mean, error.stdev)
        everyone, own = self._all.normal(), session.gaps
        within = self._within.normal().variance
        between = max(0.0, everyone.variance - within)
        spread = (_BORROWED * within + own.squares) / (_BORROWED + own.weight)
        pull = own.weight * between / (own.weight * between + spread)
        variance = spread + (1.0 - pull) * between
        mean = everyone.mean + pull * (own.mean - everyone.mean)
        return NormalDist(mean, max(_LEAST_SIGMA, math.sqrt(variance)))

    def _count_lost(self, now_s: float) -> None:
        """Those that are overdue. O(log n) a turn, amortised."""
        while self._due and self._due[0][0] <= now_s:
            entry = heappop(self._due)
            if self._stands(entry):
                del self._sessions[entry[-1]]
                self._decided(back=0.0)
        if len(self._due) > 2 * len(self._sessions) + _SWEEP_FROM:
            self._due = [entry for entry in self._due if self._stands(entry)]
            heapify(self._due)

    def _stands(self, entry: tuple[float, int, Hashable]) -> bool:
        """Whether its session has not been heard of since."""
        session = self._sessions.get(entry[-1])
        return session is not None and session.lost_s == entry[0]

    def _decided(self, back: float) -> None:
        self._back = self._back * _KEEP + back
        self._asked = self._asked * _KEEP + 1.0

    def _forget(self) -> None:
        while len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)


def _quantile_s(logs: NormalDist, share: float) -> float:
    """Seconds that this share of the gaps do not exceed."""
    return math.exp(min(math.log(_MOST_GAP_S), logs.inv_cdf(share)))


_MAX_STEPS = 64
"""Chunks looked back from where a prompt leaves what is stored."""
_MAX_SIDE_BY_SIDE = 8
"""Conversations remembered that end within one and the same chunk after a common prefix."""


@dataclass(frozen=True)
class _Turn:
    end: int
    key: ChunkKey
    """Names all the prompt's tokens up to `end`."""
    conversation: int


class Conversations:
    """Conversations by the end of their last prompt; the newest `capacity` chunks of ends.

    Prompts shorter than a chunk are nobody's continuation. Not thread-safe.
    """

    def __init__(self, chunk_tokens: int, alignment: int, capacity: int = 4096) -> None:
        """`alignment`: tokens at whose multiples a request may end in the store."""
        self._chunk_tokens = chunk_tokens
        self._alignment = alignment
        self._capacity = capacity
        self._turns: OrderedDict[ChunkKey, Sequence[_Turn]] = OrderedDict()
        """By the last full chunk of the prompt, newest turn last."""
        self._count = 0

    def __len__(self) -> int:
        return len(self._turns)

    def of(self, chain: RequestChain, prompt_tokens: int, matched_chunks: int) -> int:
        """The conversation this request goes on with, or a new one. Each is found once.

        `matched_chunks`: leading full chunks of it that are stored: only those are looked at.
        """
        found = self._continued(chain, prompt_tokens, matched_chunks)
        if found is None:
            self._count += 1
            return self._count
        return found

    def note(self, chain: RequestChain, prompt_tokens: int, conversation: int) -> None:
        """The conversation's latest turn has this prompt."""
        full = min(prompt_tokens, chain.num_tokens) // self._chunk_tokens
        if not full:
            return
        end = prompt_tokens - prompt_tokens % self._alignment
        turn = _Turn(end, chain.ending_at(end).key, conversation)
        last = chain.ending_at(full * self._chunk_tokens).key
        others = [t for t in self._turns.pop(last, ()) if t.key != turn.key]
        self._turns[last] = (*others, turn)[-_MAX_SIDE_BY_SIDE:]
        if len(self._turns) > self._capacity:
            self._turns.popitem(last=False)

    def _continued(self, chain: RequestChain, prompt_tokens: int, matched: int) -> int | None:
        for chunks in range(matched, max(0, matched - _MAX_STEPS), -1):
            key = chain.ending_at(chunks * self._chunk_tokens).key
            for turn in reversed(self._turns.get(key, ())):
                if turn.end <= prompt_tokens and chain.ending_at(turn.end).key == turn.key:
                    self._drop(key, turn)
                    return turn.conversation
        return None

    def _drop(self, key: ChunkKey, turn: _Turn) -> None:
        left = tuple(t for t in self._turns[key] if t is not turn)
        if left:
            self._turns[key] = left
        else:
            del self._turns[key]
