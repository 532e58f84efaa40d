"""The load of a simulation: which sessions of a trace are sent, when, and what they share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import count, islice, repeat
from typing import Literal, get_args

import numpy as np

from hetero_connector.errors import SimulationError, TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace


@dataclass(frozen=True)
class PoissonStarts:
    """Sessions start independently of each other, at a mean rate."""

    rate_per_s: float

    def __post_init__(self) -> None:
        if not 0 < self.rate_per_s < float("inf"):
            problem = f"{self.rate_per_s!r} is not a number greater than 0"
            raise TraceError("arrivals", problem, field="rate_per_s")

    def starts_s(self, rng: np.random.Generator) -> Iterator[float]:
        """Yield seconds since the trace's start, ascending, without end."""
        time_s = 0.0
        while True:
            time_s += float(rng.exponential(1 / self.rate_per_s))
            yield time_s

    @property
    def caveat(self) -> str:
        """The sentence that a report has to print."""
        return f"Arrivals are invented: Poisson, {self.rate_per_s:g} sessions per second."


Half = Literal["first", "second"]


@dataclass(frozen=True)
class Window:
    """The part of a simulation that its figures are of, in seconds since the first session's start.

    Requests and sessions count if they arrive in it; of a constant population, sessions that end in
    it. No session starts after its end, unless the population needs it.
    """

    begin_s: float = 0.0
    end_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0.0 <= self.begin_s < self.end_s:
            problem = f"{self.begin_s!r} to {self.end_s!r} s is no span of time from 0 on"
            raise TraceError("workload", problem, field="window")

    def has(self, elapsed_s: float) -> bool:
        """Return True if that moment is in the window."""
        return self.begin_s <= elapsed_s < self.end_s


WHOLE = Window()


@dataclass(frozen=True)
class Workload:
    """The changes that are made to a trace."""

    rate: float | None = None
    """Sessions started per second; None: as recorded."""
    sharing: float | None = None
    """Share of each preamble that all sessions have in common, see `draw_sessions`; None: sessions
    are not drawn but taken as they are, once each."""
    sessions: int | None = None
    """Number of sessions; None: as many as the trace has. Of a trace that has more, the seed draws
    where a stretch of so many begins. More than it has can only be drawn, with `sharing`."""
    seed: int = 0
    speed: float | None = None
    """Recorded starts come so many times as fast; think times stay. None: as recorded."""
    population: int | None = None
    """Sessions under way for each worker at all times: one that ends is followed by another, drawn
    as with `sharing`. None: sessions start when they start."""
    half: Half | None = None
    """The part of the trace's sessions that is used: parameters are tuned on one half and reported
    on the other. None: all."""
    window: Window = WHOLE

    def trace(self, recorded: Trace) -> Trace:
        """Return the trace to replay; each of its sessions has a start.

        Raises:
            SimulationError: no rate is given and none recorded; or one is given and all recorded
                sessions start at once (raised with the first session); or two of the parameters
                contradict each other; or the trace has fewer sessions.
            TraceError: a number is out of its range, or the trace is bad.
        """
        self.check(recorded)
        if self.sessions is not None and self.sessions < 1:
            raise TraceError("workload", f"{self.sessions} is not above 0", field="sessions")
        if self.half is not None:
            recorded = half_of(recorded, self.half)
        sent = self._sent(recorded)
        if self.window.end_s == math.inf or self.population is not None:
            return sent
        return replace(sent, sessions=partial(_until, sent, self.window.end_s))

    def parameters(self) -> dict[str, float | str]:
        """Return what was changed, but for the seed."""
        given = {x.name: getattr(self, x.name) for x in fields(self) if x.name != "seed"}
        begin_s, end_s = (window := given.pop("window")).begin_s, window.end_s
        given |= {"begin_s": begin_s or None, "end_s": end_s if end_s < math.inf else None}
        return {name: value for name, value in given.items() if value is not None}

    def drawn(self, recorded: Trace, number: int) -> int:
        """Return what the seed draws: if two seeds draw the same, they send the same sessions at
        the same times.

        `number`: of the trace's sessions. Raises SimulationError if it has too few.
        """
        if self.half is not None:
            number = number // 2 if self.half == "first" else number - number // 2
        is_whole = self.sharing is not None or self.population is not None
        first = 0 if is_whole else self._first(recorded, number)
        return self.seed if is_whole or not recorded.starts_recorded else first

    def check(self, recorded: Trace) -> None:
        """Raise SimulationError or TraceError if parameters are out of range or contradict."""

        def error(problem: str, field: str) -> SimulationError:
            return SimulationError(recorded.source, problem, field)

        if self.speed is not None:
            if not 0.0 < self.speed < math.inf:
                raise TraceError("workload", f"{self.speed!r} is not above 0", field="speed")
            if self.rate is not None or self.sharing is not None or self.population is not None:
                raise error("recorded starts are sped up: give no other ones", "speed")
            if not recorded.starts_recorded:
                raise error("no starts are recorded that could be sped up", "speed")
        if self.population is not None:
            if self.population < 1:
                raise TraceError(
                    "workload", f"{self.population} is not above 0", field="population"
                )
            if self.rate is not None or self.sessions is not None:
                raise error(
                    "sessions follow each other: give neither rate nor sessions", "population"
                )
            if self.window.end_s == math.inf:
                raise error("sessions follow each other without end: give end_s", "population")

    def _sent(self, recorded: Trace) -> Trace:
        if self.population is not None:
            return draw_sessions(recorded, None, None, self.sharing or 0.0, self.seed)
        if self.sharing is not None:
            number = self.sessions or sum(1 for _ in recorded)
            starts = self._starts(recorded)
            return draw_sessions(recorded, number, starts, self.sharing, self.seed)
        chosen = self._stretch(recorded)
        if not recorded.starts_recorded:
            starts = self._starts(recorded)
            return replace(
                chosen,
                sessions=partial(_started, chosen, starts, self.seed),
                starts_recorded=True,
                caveats=(*recorded.caveats, starts.caveat),
            )
        if self.speed is not None:
            caveat = f"Sessions start {self.speed:g} times as fast as recorded."
            sessions = partial(_sped_up, chosen, self.speed)
            return replace(chosen, sessions=sessions, caveats=(*recorded.caveats, caveat))
        if self.rate is None:
            return chosen
        PoissonStarts(self.rate)  # checks the rate
        return replace(
            chosen,
            sessions=partial(_at_rate, chosen, self.rate),
            caveats=(*recorded.caveats, f"Starts are scaled to {self.rate:g} sessions per second."),
        )

    def _stretch(self, recorded: Trace) -> Trace:
        """Return as many sessions as wanted, from a place on that the seed draws."""
        if self.sessions is None:
            return recorded
        first = self._first(recorded, sum(1 for _ in recorded))
        return replace(recorded, sessions=partial(islice, recorded, first, first + self.sessions))

    def _first(self, recorded: Trace, number: int) -> int:
        """Return the place of the first session that is sent of `number` ones."""
        spare = 0 if self.sessions is None else number - self.sessions
        if spare < 0:
            problem = f"the trace has {number}, not {self.sessions}: give fewer, or draw them with"
            raise SimulationError(recorded.source, f"{problem} sharing", "sessions")
        return int(np.random.default_rng([self.seed, 3]).integers(spare + 1))

    def _starts(self, recorded: Trace) -> PoissonStarts:
        if self.rate is None:
            raise SimulationError(recorded.source, "no starts are recorded: give a rate", "rate")
        return PoissonStarts(self.rate)


def half_of(recorded: Trace, half: Half) -> Trace:
    """Return the first or the second half of a trace's sessions, in its order."""
    if half not in get_args(Half):
        raise TraceError("workload", f"{half!r} is neither first nor second", field="half")
    middle = sum(1 for _ in recorded) // 2
    bounds = (0, middle) if half == "first" else (middle, None)
    return replace(
        recorded,
        source=f"the {half} half of {recorded.source}",
        sessions=lambda: islice(recorded, *bounds),
    )


def _until(sent: Trace, end_s: float) -> Iterator[Session]:
    """Yield the sessions that start less than `end_s` after the first one."""
    first_s: float | None = None
    for session in sent:
        start_s = session.start_s or 0.0
        first_s = start_s if first_s is None else first_s
        if start_s - first_s >= end_s:
            return
        yield session


def _started(recorded: Trace, starts: PoissonStarts, seed: int) -> Iterator[Session]:
    """Yield sessions in file order, one at each start."""
    times = starts.starts_s(np.random.default_rng([seed, 2]))
    for session, start_s in zip(recorded, times, strict=False):
        yield replace(session, start_s=start_s)


def _sped_up(recorded: Trace, speed: float) -> Iterator[Session]:
    """Yield sessions that start so many times as fast."""
    for session in recorded:
        yield replace(session, start_s=(session.start_s or 0.0) / speed)


def _at_rate(recorded: Trace, rate: float) -> Iterator[Session]:
    """Yield sessions with their recorded starts stretched to another mean rate."""
    starts = [s.start_s or 0.0 for s in recorded]
    factor = 1.0
    if len(starts) > 1:
        span_s = starts[-1] - starts[0]
        if not span_s:
            problem = f"all {len(starts)} sessions start at once: that is no rate to change"
            raise SimulationError(recorded.source, problem, "rate")
        factor = (len(starts) - 1) / rate / span_s
    for session, start_s in zip(recorded, starts, strict=True):
        yield replace(session, start_s=start_s * factor)


def draw_sessions(
    trace: Trace,
    number: int | None,
    starts: PoissonStarts | None,
    shared_fraction: float,
    seed: int,
) -> Trace:
    """Draw sessions of a trace with replacement, with invented arrivals and sharing.

    `number`: None: without end. `starts`: None: each starts when another one ends.

    Two copies of a session share only what all sessions share: the first `shared_fraction` of each
    session's tools and system prompt (`preamble_tokens`) is taken to be the same text in all of
    them, as far as each reaches. Recorded sharing between sessions is dropped. Holds the recorded
    sessions in memory, not the drawn ones.

    Raises:
        TraceError: the trace is bad or empty, or a parameter is out of its range.
    """
    if not 0 <= shared_fraction <= 1:
        problem = f"{shared_fraction!r} is not between 0 and 1"
        raise TraceError("workload", problem, field="sharing")
    recorded = list(trace)
    if not recorded:
        raise TraceError(trace.source, "no session to draw from")
    sessions: Callable[[], Iterator[Session]] = partial(
        _drawn, recorded, trace.block_tokens, number, starts, shared_fraction, seed
    )
    return Trace(
        source=f"{number or 'any number of'} sessions drawn from {trace.source}, seed {seed}",
        format=trace.format,
        block_tokens=trace.block_tokens,
        sessions=sessions,
        caveats=(
            starts.caveat if starts else "A session that ends is followed by another one.",
            f"Sharing is invented: {shared_fraction:.0%} of each preamble is common to all.",
        ),
    )


def _drawn(
    recorded: Sequence[Session],
    block_tokens: int,
    number: int | None,
    starts: PoissonStarts | None,
    shared_fraction: float,
    seed: int,
) -> Iterator[Session]:
    choices, times = (np.random.default_rng([seed, part]) for part in range(2))
    shared_blocks = [int(shared_fraction * s.preamble_tokens) // block_tokens for s in recorded]
    next_id = max(shared_blocks)
    starts_s = starts.starts_s(times) if starts else repeat(0.0)
    for copy in count() if number is None else range(number):
        which = int(choices.integers(len(recorded)))
        session = recorded[which]
        yield replace(
            session,
            id=f"{session.id}#{copy}",
            requests=_renamed(session.requests, shared_blocks[which], next_id),
            start_s=next(starts_s),
        )
        next_id += _id_span(session)


def _renamed(requests: Sequence[Request], shared_blocks: int, first_id: int) -> tuple[Request, ...]:
    """Return the requests with new block ids, except in the part that all sessions share."""
    common = requests[0].blocks.head(shared_blocks)
    shift = first_id - _lowest_id(requests)

    def renamed(blocks: BlockRuns) -> BlockRuns:
        """The common part has ids from 0 on, the same in every session."""
        head = blocks.shared_with(common)
        return BlockRuns.of_runs([(0, head), *blocks.tail(head).shifted(shift).runs])

    return tuple(
        replace(
            request,
            blocks=renamed(request.blocks),
            answered=None if request.answered is None else renamed(request.answered),
        )
        for request in requests
    )


def _lowest_id(requests: Sequence[Request]) -> int:
    return min((first for first, _ in _runs(requests)), default=0)


def _id_span(session: Session) -> int:
    """Return the number of ids from a session's lowest to its highest."""
    ends = (first + count for first, count in _runs(session.requests))
    return max(ends, default=0) - _lowest_id(session.requests)


def _runs(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    for request in requests:
        yield from request.blocks.runs
        if request.answered is not None:
            yield from request.answered.runs
