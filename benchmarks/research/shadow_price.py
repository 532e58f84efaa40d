"""A lower bound on mean latency under limited engine capacity (Lagrangian shadow prices).

Let a second of a worker that computes cost p up to a time H, and nothing after it. Of M workers the
first of which is asked at A, all that is computed by then costs at most p M (H - A) (the price is a
multiplier of that constraint: a Lagrangian relaxation, of which nothing but this, weak duality, is
used). So the times of all requests add up to at least what times and prices of each would add up
to if it chose them for itself, less p M (H - A), for every p >= 0 and every H. That is the bound; p
and H are searched for, and any that are found are good.

*Shares.* A step of T seconds with decodes that add e_j to it and prefills that add q_i has
T >= d0 + sum e + sum q (without decodes sum q <= T). So decodes can be charged e_j T / (T - d0) and
prefills q_i, and no second is charged twice.

*A token* takes a step, T >= d0 + e, and T + p e T / (T - d0) in all: least at T = d0 + sqrt(p d0 e)
or, if that is less, at T = d0 + e. (The first is a batch of sqrt(p d0 / e): a price on engines
makes requests share them.) Or it comes after a preemption, `again_s` later, and is charged that
prefill. As a function of e this is concave, and e grows by as much with each token. So all tokens
of an answer take at least as long as so many tokens with the mean e of the first and the last.

*A request* that is answered by H takes its first token's least time (`bound`), its tokens, and p
times the prefill that no other can have done for it. For the part that a later request may do, it
either takes p times that too, or it waits until that request is sent. Let `added` be the smaller of
both minus its time alone.

*A session* is a chain of requests each of which is sent when the one before it was answered and
thought about; its last answer ends the session. If all are answered by H, time and prices are above
the session's bound by the sum of `added`. Else let k be the first that is not: those before it were
charged, and as k is answered H - (its earliest answer) late or more, so is the last. The larger of
both holds, and the least over all k.

Requests that are not in the chain are charged nothing. For TTFTs every request that is sent at a
fixed time is a session without further tokens, and no other is charged: delaying an answer costs a
mean of TTFTs nothing, and moves the requests that wait for it past H.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]
_PRICES_AN_OCTAVE, _LEAST_PRICE = 3, 1 / 64
_ENDS = 24
"""Number of values of H that are tried first, and again around the best of them."""


class Demand(NamedTuple):
    """The least that a request takes of engines, in seconds."""

    done_s: float
    """Its earliest end, on the trace's clock."""
    prefill_s: float
    """Worker seconds for the part of the prompt that no other request can compute."""
    awaitable_s: float = 0.0
    """Worker seconds for the part that a later request can compute."""
    others_s: float = math.inf
    """Seconds past its earliest first token that it would wait for that request."""
    tokens: int = 0
    """Tokens after the first one."""
    decoding_s: float = 0.0
    """Seconds from the first token to the last, alone."""
    first_s: float = 0.0
    """Seconds that the first of them adds to a step; then the last."""
    last_s: float = 0.0
    again_s: float = math.inf
    """Seconds until a token comes after a preemption."""
    again_work_s: float = 0.0
    """The part of it that it adds to a step."""


class ShadowPrices:
    """Demands of sessions on a number of workers."""

    def __init__(
        self, sessions: Iterable[Sequence[Demand]], workers: int, empty_s: float, begin_s: float
    ) -> None:
        """`empty_s`: constant part of a step of decodes. `begin_s`: the first arrival."""
        found = [session for session in sessions if session]
        table = np.array([demand for session in found for demand in session], np.float64)
        self._table = table.reshape(-1, len(Demand._fields)).T
        self._lengths = np.array([len(session) for session in found], np.int64)
        self._firsts = np.cumsum(self._lengths) - self._lengths
        self._workers, self._empty_s, self._begin_s = workers, empty_s, begin_s

    def waiting_s(self) -> float:
        """Return the least seconds that all sessions together take longer than each alone."""
        if not len(self._firsts):
            return 0.0
        return max(map(self._waiting_s, self._prices()), default=0.0)

    def at_s(self, price: float, end_s: float) -> float:
        """Return the bound for one price and one H; may be negative. O(requests)."""
        return self._by_end_s(price, self._added_s(price))(end_s)

    def _prices(self) -> Iterator[float]:
        """Yield prices up to the number of requests: more cannot wait for a second."""
        octaves = math.log2(len(self._table[0]) / _LEAST_PRICE)
        for step in range(math.ceil(_PRICES_AN_OCTAVE * octaves) + 1):
            yield _LEAST_PRICE * 2.0 ** (step / _PRICES_AN_OCTAVE)

    def _waiting_s(self, price: float) -> float:
        """Return the bound for one price and the best of some H."""
        added_s, done_s = self._added_s(price), self._table[0]
        most_s = float((done_s + added_s).max())
        ends_s = np.concatenate(
            [np.linspace(self._begin_s, done_s.max(), _ENDS), np.linspace(done_s.max(), most_s, 4)]
        )
        up_to_s = self._by_end_s(price, added_s)
        found = [*map(up_to_s, ends_s)]
        at = int(np.argmax(found))
        near_s = np.linspace(ends_s[max(0, at - 1)], ends_s[min(len(ends_s) - 1, at + 1)], _ENDS)
        return max(0.0, found[at], *map(up_to_s, near_s))

    def _by_end_s(self, price: float, added_s: _Floats) -> Callable[[float], float]:
        """Return the bound for one price as a function of H."""
        done_s, firsts = self._table[0], self._firsts
        before_s = np.cumsum(added_s) - added_s
        before_s -= np.repeat(before_s[firsts], self._lengths)
        all_s = np.add.reduceat(added_s, firsts)

        def up_to_s(end_s: float) -> float:
            least_s = np.minimum.reduceat(np.maximum(before_s, end_s - done_s), firsts)
            charged_s = price * self._workers * max(0.0, end_s - self._begin_s)
            return float(np.minimum(least_s, all_s).sum()) - charged_s

        return up_to_s

    def _added_s(self, price: float) -> _Floats:
        """Return `[requests]`: time and price of each, minus its time alone."""
        (
            _,
            prefill_s,
            awaitable_s,
            others_s,
            tokens,
            decoding_s,
            first_s,
            last_s,
            again_s,
            again_work_s,
        ) = self._table
        again_s = again_s + price * again_work_s
        ends = (np.minimum(self._token_s(price, x), again_s) for x in (first_s, last_s))
        answer_s = tokens * sum(ends) / 2
        prompt_s = price * prefill_s + np.minimum(price * awaitable_s, others_s)
        added_s: _Floats = prompt_s + np.maximum(0.0, answer_s - decoding_s)
        return added_s

    def _token_s(self, price: float, work_s: _Floats) -> _Floats:
        """Return `[requests]`: time and price of a token that adds `work_s` to a step."""
        empty_s = self._empty_s
        priced_s = price * empty_s
        alone_s = (1.0 + price) * (empty_s + work_s)
        shared_s = empty_s + price * work_s + 2.0 * np.sqrt(priced_s * work_s)
        token_s: _Floats = np.where(work_s >= priced_s, alone_s, shared_s)
        return token_s
