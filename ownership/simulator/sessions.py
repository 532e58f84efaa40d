"""Sessions under way: each sends its next request after the answer and the recorded think time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.state.chunks import ShortChunk, chunk_runs
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session


@dataclass(slots=True)
class LiveSession:
    """A session under way. Requests are named by their index in it."""

    number: int
    session: Session
    started_s: float
    followers: dict[int, list[int]]
    """For each request, those that wait for its answer."""
    left: int
    """Number of requests without an answer."""
    instant_s: float
    """Its duration if answers came at once: thinking, tools, and recorded offsets."""
    owner: str | None = None
    """The worker that decodes it."""
    was_refused: bool = False
    """True if one of its requests was refused: it does not end as recorded."""
    alone_s: dict[int, float] = field(default_factory=dict)
    """For each request that arrived, its seconds on an idle engine."""
    short_chunks: dict[int, ShortChunk] = field(default_factory=dict)
    """The short chunks of requests that were handed off."""

    @classmethod
    def of(cls, number: int, session: Session, started_s: float) -> LiveSession:
        """Start a session."""
        followers: defaultdict[int, list[int]] = defaultdict(list)
        for index, request in enumerate(session.requests):
            if request.parent is not None:
                followers[request.parent].append(index)
        left, instant = len(session.requests), instant_s(session.requests)
        return cls(number, session, started_s, followers, left, instant)

    def request(self, index: int) -> Request:
        """Return a request as recorded."""
        return self.session.requests[index]

    def is_fork(self, index: int) -> bool:
        """Return True if several requests continue the same answer."""
        parent = self.request(index).parent
        return parent is not None and len(self.followers[parent]) > 1

    def answered(self, index: int, block_tokens: int) -> BlockRuns | None:
        """Return the full blocks of a prompt with its answer; None if they are not known.

        If the trace does not say, they are those of the first prompt that follows, shares the whole
        prompt and is long enough. The state of an answer's last token is never computed.
        """
        request = self.request(index)
        tokens = request.input_tokens + request.output_tokens - 1
        if request.answered is not None:
            return request.answered.head(tokens // block_tokens)
        full = request.input_tokens // block_tokens
        for follower in map(self.request, self.followers.get(index, ())):
            shared = follower.blocks.shared_with(request.blocks)
            if follower.input_tokens > tokens and shared >= full:
                return follower.blocks.head(tokens // block_tokens)
        return None

    def begins_with(self, index: int, block_tokens: int) -> Iterator[int]:
        """Yield earlier requests whose whole prompts this one begins with, the last one first."""
        request = before = self.request(index)
        while before.parent is not None:
            number, before = before.parent, self.request(before.parent)
            full = before.input_tokens // block_tokens
            if request.input_tokens <= before.input_tokens:
                return
            if request.blocks.shared_with(before.blocks) < full:
                return
            yield number

    def boundary_tokens(self, index: int, block_tokens: int) -> int:
        """Return the tokens of a prompt that were computed when the turn before it ended."""
        request = self.request(index)
        if request.parent is None:
            return 0
        before = self.request(request.parent)
        shared = request.blocks.shared_with(before.blocks) * block_tokens
        return min(shared, before.input_tokens, request.input_tokens)


_BACK_AFTER_S = 1.0
"""Seconds after which another session follows one that was refused."""


class Population(NamedTuple):
    """Sessions of which always so many are under way."""

    number: int
    ramp_s: float
    """The first ones start evenly in this time."""


class Sessions:
    """Sends the requests of sessions in closed loops."""

    def __init__(
        self,
        loop: EventLoop,
        sessions: Iterator[Session],
        blocks_per_chunk: int,
        send: Callable[[LiveSession, LiveRequest], None],
        on_closed: Callable[[LiveSession], None],
        *,
        block_tokens: int,
        keep_answers: bool,
        population: Population | None = None,
    ) -> None:
        """`sessions`: in the order of their starts, which all have one.

        `population`: sessions start when others end, whatever starts they have; there must be
        enough of them until the simulation is stopped.

        `keep_answers`: the state of answers is kept if a later prompt can begin with them.
        `on_closed` is called when the last request of a session was answered or refused.
        """
        self.live: dict[int, LiveSession] = {}
        self.most_live = 0
        self.first_start_s = 0.0
        self._have_all_started = False
        self._loop, self._send, self._report_closed = loop, send, on_closed
        self._coming = enumerate(sessions)
        self._blocks_per_chunk = blocks_per_chunk
        self._block_tokens, self._keep_answers = block_tokens, keep_answers
        self._population = population

    def start(self) -> None:
        """Announce the first sessions."""
        if self._population is None:
            self._announce_next()
            return
        number, ramp_s = self._population
        for at in range(number):
            self._loop.at(ramp_s * at / number, self._open_next, begins=True)

    def _announce_next(self) -> None:
        """Announce the next session; each announces the one after it."""
        for number, session in self._coming:
            assert session.start_s is not None
            if number == 0:
                self.first_start_s = session.start_s
            self._loop.at(session.start_s, self._open, number, session, begins=True)
            return
        self._have_all_started = True

    @property
    def are_over(self) -> bool:
        """True when the last session has ended."""
        return self._have_all_started and not self.live

    def on_answered(self, request: LiveRequest) -> None:
        """Announce the requests that wait for this answer."""
        live, now_s = self.live[request.session], self._loop.now_s
        live.left -= 1
        for index in live.followers.get(request.index, ()):
            self._announce(live, index, now_s)
        if self._close_if_done(live) and self._population is not None:
            self._open_next()

    def on_refused(self, request: LiveRequest) -> None:
        """Give up a refused request and all that would have followed it."""
        live, lost = self.live[request.session], [request.index]
        live.was_refused = True
        while lost:
            live.left -= 1
            lost += live.followers.get(lost.pop(), ())
        if self._close_if_done(live) and self._population is not None:
            self._loop.at(self._loop.now_s + _BACK_AFTER_S, self._open_next, begins=True)

    def _close_if_done(self, live: LiveSession) -> bool:
        """Close a session without requests left; return True if it was closed."""
        if live.left:
            return False
        del self.live[live.number]
        self._report_closed(live)
        return True

    def _open_next(self) -> None:
        self._open(*next(self._coming))

    def _open(self, number: int, session: Session) -> None:
        now_s = self._loop.now_s
        live = self.live[number] = LiveSession.of(number, session, now_s)
        self.most_live = max(self.most_live, len(self.live))
        for index, request in enumerate(session.requests):
            if request.parent is None:
                self._loop.at(now_s + request.offset_s, self._arrive, live, index, begins=True)
        if self._population is None:
            self._announce_next()

    def _announce(self, live: LiveSession, index: int, answered_s: float) -> None:
        request = live.request(index)
        if request.think_s is None:
            at_s = max(answered_s, live.started_s + request.offset_s)
        else:
            at_s = answered_s + request.think_s
        self._loop.at(at_s, self._arrive, live, index, begins=True)

    def _arrive(self, live: LiveSession, index: int) -> None:
        request = live.request(index)
        prompt_tokens = max(1, request.input_tokens)
        # Some traces list a prompt's partial last block, too.
        full_chunks = prompt_tokens // (self._blocks_per_chunk * self._block_tokens)
        answered = live.answered(index, self._block_tokens) if self._keep_answers else None
        if answered is not None:
            answered = chunk_runs(answered, self._blocks_per_chunk)
        self._send(
            live,
            LiveRequest(
                session=live.number,
                index=index,
                arrived_s=self._loop.now_s,
                prompt_tokens=prompt_tokens,
                output_tokens=max(1, request.output_tokens),
                chain=chunk_runs(request.blocks, self._blocks_per_chunk).head(full_chunks),
                answered_chain=answered,
            ),
        )


def instant_s(requests: Sequence[Request], answers_s: Mapping[int, float] | None = None) -> float:
    """Return the seconds from a session's first request to its last answer.

    `answers_s`: the seconds that each request takes, by its index; None: answers come at once.
    """
    answered: list[float] = []
    for index, request in enumerate(requests):
        at_s = request.offset_s
        if request.parent is not None:
            answered_s, think_s = answered[request.parent], request.think_s
            at_s = max(answered_s, at_s) if think_s is None else answered_s + think_s
        answered.append(at_s + answers_s[index] if answers_s else at_s)
    return max(answered, default=0.0)
