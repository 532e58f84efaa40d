"""New traces from recorded sessions: which ones, when, and what they share is drawn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from hetero_connector.errors import TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace
from ownership.simulator.traces.starts import StartProcess


def bootstrap(
    trace: Trace,
    *,
    num_sessions: int,
    starts: StartProcess,
    shared_fraction: float,
    seed: int,
) -> Trace:
    """Sessions of a trace, drawn with replacement, under invented arrivals and sharing.

    Two copies of a session share nothing but what all sessions do: the first `shared_fraction`
    of each session's tools and system prompt (`preamble_tokens`) is taken to be the same text in
    all of them, as far as each reaches. What the recording knows of sharing across sessions is
    dropped. Holds the recorded sessions, not the drawn ones.

    Raises:
        TraceError: the trace is bad or empty, or a parameter is out of its range.
    """
    if not 0 <= shared_fraction <= 1:
        problem = f"{shared_fraction!r} is not between 0 and 1"
        raise TraceError("bootstrap", problem, field="shared_fraction")
    if num_sessions < 1:
        problem = f"{num_sessions!r} is not greater than 0"
        raise TraceError("bootstrap", problem, field="num_sessions")
    recorded = list(trace)
    if not recorded:
        raise TraceError(trace.source, "no session to draw from")
    draw = partial(_drawn, recorded, trace.block_tokens, num_sessions, starts, shared_fraction)
    return Trace(
        source=f"{num_sessions} sessions drawn from {trace.source}, seed {seed}",
        format=trace.format,
        block_tokens=trace.block_tokens,
        sessions=partial(draw, seed),
        caveats=(
            f"Arrivals are invented: {starts.as_text()}.",
            f"Sharing is invented: {shared_fraction:.0%} of each preamble is common to all.",
        ),
    )


def _drawn(
    recorded: Sequence[Session],
    block_tokens: int,
    num_sessions: int,
    starts: StartProcess,
    shared_fraction: float,
    seed: int,
) -> Iterator[Session]:
    choices, times = (np.random.default_rng([seed, part]) for part in range(2))
    shared = [
        int(shared_fraction * s.preamble_tokens) // block_tokens for s in recorded
    ]  # blocks of each that are common to all
    next_id = max(shared)
    starts_s = starts.starts_s(times)
    for number in range(num_sessions):
        which = int(choices.integers(len(recorded)))
        session = recorded[which]
        yield Session(
            id=f"{session.id}#{number}",
            requests=_renamed(session.requests, shared[which], next_id),
            start_s=next(starts_s),
            preamble_tokens=session.preamble_tokens,
        )
        next_id += _width(session)


def _renamed(requests: Sequence[Request], shared_blocks: int, first_id: int) -> tuple[Request, ...]:
    """The requests under ids of their own, but for the head that all sessions have in common."""
    common = requests[0].blocks.head(shared_blocks)
    shift = first_id - _lowest_id(requests)

    def renamed(request: Request) -> Request:
        answered = request.answered
        return replace(
            request,
            blocks=_rename(request.blocks, common, shift),
            answered=None if answered is None else _rename(answered, common, shift),
        )

    return tuple(map(renamed, requests))


def _rename(blocks: BlockRuns, common: BlockRuns, shift: int) -> BlockRuns:
    """Ids of the common head count from 0; it has the same ids in every session."""
    head = blocks.shared_with(common)
    return BlockRuns.of_runs([(0, head), *blocks.tail(head).shifted(shift).runs])


def _lowest_id(requests: Sequence[Request]) -> int:
    return min((first for first, _ in _runs(requests)), default=0)


def _width(session: Session) -> int:
    """How many ids it takes to keep its own apart from the next session's."""
    ends = (first + count for first, count in _runs(session.requests))
    return max(ends, default=0) - _lowest_id(session.requests)


def _runs(requests: Sequence[Request]) -> Iterator[tuple[int, int]]:
    for request in requests:
        yield from request.blocks.runs
        if request.answered is not None:
            yield from request.answered.runs
