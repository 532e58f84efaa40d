"""Sessions without ids: which conversation a prompt continues, and when its next turn is due.

Stock clients send no session id, so `Conversations` recognises a conversation by its tokens, and
`ThinkTimes` learns the time between turns. Time is a parameter everywhere.
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
_LOST_AT = 0.99
"""Quantile of the gap after which a session counts as lost."""
_BORROWED = 2.0
"""Weight, in gaps, of all sessions' variance in the estimate of one session's."""
_ENOUGH = 4
"""Gaps, of any session, before anything is predicted without a hint."""
_SWEEP_FROM = 64


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
        self._capacity = capacity
        self._turns: OrderedDict[ChunkKey, Sequence[_Turn]] = OrderedDict()
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
        others = [t for t in self._turns.pop(last, ()) if t.key != turn.key]
        self._turns[last] = (*others, turn)[-_MAX_PER_CHUNK:]
        if len(self._turns) > self._capacity:
            self._turns.popitem(last=False)

    def _take_recorded(self, chain: RequestChain, prompt_tokens: int, matched: int) -> int | None:
        for chunks in range(matched, max(0, matched - _MAX_CHUNKS_BACK), -1):
            key = chain.ending_at(chunks * self._chunk_tokens).key
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


class _Logs(NamedTuple):
    """Exponentially weighted mean and variance of logarithms of seconds."""

    weight: float
    mean: float
    squares: float
    """Sum of weighted squared deviations."""

    def with_one(self, log_s: float) -> _Logs:
        weight = self.weight * _KEEP + 1.0
        deviation = log_s - self.mean
        mean = self.mean + deviation / weight
        return _Logs(weight, mean, self.squares * _KEEP + deviation * (log_s - mean))

    def normal(self) -> NormalDist:
        return NormalDist(self.mean, max(_LEAST_SIGMA, math.sqrt(self.squares / self.weight)))


_NO_GAPS = _Logs(0.0, 0.0, 0.0)
_PRIOR_GAPS = _Logs(2.0, math.log(30.0), 2.0 * 1.5**2)
"""Prior of ln(gap): half a minute, times or divided by 4.5; weighs like two gaps."""
_PRIOR_WITHIN = _Logs(2.0, 0.0, 2.0 * 1.0**2)
"""Prior of ln(gap / the session's mean)."""
_PRIOR_HINT_ERRORS = _Logs(4.0, 0.0, 4.0 * 0.25**2)
"""Prior of ln(gap / hint): a quarter off; weighs like four gaps."""


@dataclass(frozen=True)
class ReturnWindow:
    """The time in which a session's next turn is expected, on the clock of the turn's end."""

    earliest_s: float
    latest_s: float
    probability: float
    """The probability that it comes in between."""


@dataclass(slots=True)
class _Session:
    gaps: _Logs = _NO_GAPS
    ended_s: float | None = None
    """End of its last turn; None while a turn runs."""
    hint_s: float | None = None
    running: int = 0
    """Turns that run now: some clients run several at once."""
    lost_s: float = math.inf
    """The time from which it counts as lost."""


@dataclass
class ThinkTimes:
    """Learns the gaps between turns and predicts the next. Keeps the newest `max_sessions`.

    The gaps of multi-turn traffic are close to log-normal, with parameters that differ by
    deployment (SAECache, arXiv:2605.18825). So the mean and variance of the logarithm are learned
    online, over all sessions and for each session. A session's own mean is drawn towards that of
    all sessions, the more so the fewer of its gaps are known and the less sessions differ (the
    normal random-effects model: Gelman et al., Bayesian Data Analysis, section 5.4). A client's
    hint is one more log-normal, centred on the hint, as wide as earlier hints were wrong.

    One thread learns; `return_probability` may be called on another.
    """

    max_sessions: int = 4096
    _sessions: OrderedDict[Hashable, _Session] = field(default_factory=OrderedDict)
    """By last event, oldest first."""
    _due: list[tuple[float, int, Hashable]] = field(default_factory=list)
    """A heap of (time from which a session counts as lost, serial number, session). An entry is
    out of date once its session has come back; it is removed when it is due, or in a sweep."""
    _serial: int = 0
    _all: _Logs = _PRIOR_GAPS
    _within: _Logs = _PRIOR_WITHIN
    """Deviations of gaps from the mean of their own session."""
    _hint_errors: _Logs = _PRIOR_HINT_ERRORS
    _gaps: int = 0
    """Gaps learned so far."""
    _returned: float = 1.0
    _decided: float = 1.0
    """Turns whose session returned, and turns of which it is known whether it did; both with
    fading weight and a prior of one."""

    def __len__(self) -> int:
        return len(self._sessions)

    def on_turn_start(self, key: Hashable, now_s: float) -> None:
        """A turn of the session has arrived."""
        session = self._sessions.get(key)
        if session is None:
            session = self._sessions[key] = _Session()
        self._sessions.move_to_end(key)
        session.running += 1
        if session.ended_s is not None:
            self._learn(session, max(_LEAST_GAP_S, now_s - session.ended_s))
            session.ended_s, session.lost_s = None, math.inf
        self._drop_oldest()

    def on_turn_end(
        self, key: Hashable, now_s: float, hint_s: float | None = None
    ) -> ReturnWindow | None:
        """A turn is over: predict the next one.

        None while other turns of the session run, and if nothing is known yet. `hint_s`: the
        client's own prediction, in seconds from now.
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
        self._serial += 1
        heappush(self._due, (session.lost_s, self._serial, key))
        self._count_lost(now_s)
        self._drop_oldest()
        if hint_s is None and self._gaps < _ENOUGH:
            return None
        return_rate = 1.0 if hint_s is not None else self._returned / self._decided
        return ReturnWindow(
            now_s + _quantile_s(normal, EARLY),
            now_s + _quantile_s(normal, LATE),
            (LATE - EARLY) * return_rate,
        )

    def return_probability(self, idle_s: float, within_s: float) -> float:
        """The probability that a session idle for `idle_s` returns in the next `within_s`.

        For an unknown session: for state of which only the last use is known.
        """
        normal, return_rate = self._all.normal(), self._returned / self._decided
        until_now = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s)))
        until_then = normal.cdf(math.log(max(_LEAST_GAP_S, idle_s + within_s)))
        still_out = 1.0 - return_rate * until_now
        return return_rate * (until_then - until_now) / still_out if still_out > 0.0 else 0.0

    def _learn(self, session: _Session, gap_s: float) -> None:
        log_s = math.log(gap_s)
        if session.gaps.weight:
            self._within = self._within.with_one(log_s - session.gaps.mean)
        session.gaps = session.gaps.with_one(log_s)
        self._all = self._all.with_one(log_s)
        self._gaps += 1
        self._count_decided(returned=1.0)
        if session.hint_s is not None:
            self._hint_errors = self._hint_errors.with_one(log_s - math.log(session.hint_s))

    def _normal(self, session: _Session) -> NormalDist:
        """The distribution of the logarithm of the next gap, in seconds."""
        if session.hint_s is not None:
            error = self._hint_errors.normal()
            return NormalDist(math.log(session.hint_s) + error.mean, error.stdev)
        everyone, own = self._all.normal(), session.gaps
        within = self._within.normal().variance
        between = max(0.0, everyone.variance - within)
        spread = (_BORROWED * within + own.squares) / (_BORROWED + own.weight)
        own_share = own.weight * between / (own.weight * between + spread)
        variance = spread + (1.0 - own_share) * between
        mean = everyone.mean + own_share * (own.mean - everyone.mean)
        return NormalDist(mean, max(_LEAST_SIGMA, math.sqrt(variance)))

    def _count_lost(self, now_s: float) -> None:
        """Remove the sessions that are lost. O(log n) a turn, amortised."""
        while self._due and self._due[0][0] <= now_s:
            entry = heappop(self._due)
            if self._is_valid(entry):
                del self._sessions[entry[-1]]
                self._count_decided(returned=0.0)
        if len(self._due) > 2 * len(self._sessions) + _SWEEP_FROM:
            self._due = [entry for entry in self._due if self._is_valid(entry)]
            heapify(self._due)

    def _is_valid(self, entry: tuple[float, int, Hashable]) -> bool:
        """True if the session has had no event since the entry was made."""
        session = self._sessions.get(entry[-1])
        return session is not None and session.lost_s == entry[0]

    def _count_decided(self, returned: float) -> None:
        self._returned = self._returned * _KEEP + returned
        self._decided = self._decided * _KEEP + 1.0

    def _drop_oldest(self) -> None:
        while len(self._sessions) > self.max_sessions:
            self._sessions.popitem(last=False)


def _quantile_s(logs: NormalDist, share: float) -> float:
    """Seconds that this share of the gaps do not exceed."""
    return math.exp(min(math.log(_MOST_GAP_S), logs.inv_cdf(share)))
