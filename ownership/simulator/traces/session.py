"""What every trace is made of: sessions of requests.

Times are seconds, lengths are tokens. Block ids hold for the whole trace and name prefixes (see
`BlockRuns`): where a recording numbers them per session, or names blocks by their content alone,
its reader renumbers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ownership.simulator.traces.block_runs import BlockRuns


class Trigger(Enum):
    """What the client answers with: what is new in a prompt."""

    USER = "user"
    TOOL_RESULT = "tool_result"
    UNKNOWN = "unknown"
    """The trace does not say."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the model."""

    offset_s: float
    """When it was sent, since the session's start; as recorded."""
    input_tokens: int
    output_tokens: int
    blocks: BlockRuns
    """Of the prompt. The last block may be partial (then they reach past `input_tokens`), or a
    partial one may be missing (then they end before it)."""
    parent: int | None = None
    """Index in the session of the request whose answer this one waits for; None: of none. Two
    requests with the same parent are a fork."""
    think_s: float | None = None
    """Between the parent's answer and this request: a tool ran or a person read. None: not
    recorded; then it is sent at `offset_s`, though not before that answer."""
    service_s: float | None = None
    """What the recorded server took to answer; for comparison, never for replay."""
    trigger: Trigger = Trigger.UNKNOWN
    model: str | None = None
    """Which model was called, where the trace says so."""
    answered: BlockRuns | None = None
    """The full blocks of the prompt with its answer behind it, where they are known."""

    def covered_tokens(self, num_blocks: int, block_tokens: int) -> int:
        """Prompt tokens in the first `num_blocks` blocks."""
        return min(num_blocks * block_tokens, self.input_tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that belong together, in the order they were sent."""

    id: str
    requests: tuple[Request, ...]
    start_s: float | None = None
    """When its first request was sent, since the trace's start; None: not recorded."""
    preamble_tokens: int = 0
    """Tools and system prompt at the head of the first prompt, which other sessions may share."""


@dataclass(frozen=True)
class Trace:
    """Sessions in order of their start (in file order where no start is recorded).

    Iterating reads the source again and again yields the same sessions; nothing is kept.
    """

    source: str
    """File, or how it was made; for messages and reports."""
    format: str
    block_tokens: int
    sessions: Callable[[], Iterator[Session]]
    starts_recorded: bool = True
    """Whether every session has a `start_s`, or none: then arrivals must be invented."""
    caveats: tuple[str, ...] = ()
    """What the recording leaves open: sentences that belong into every report on it."""

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, reading as it goes.

        Raises:
            TraceError: the file is not what the format says; names file, line and field.
        """
        return self.sessions()


def in_time_order(requests: Sequence[Request]) -> tuple[Request, ...]:
    """A session's requests by when they were sent, where branches were listed one by one.

    A parent comes before its children in both orders.
    """
    order = sorted(range(len(requests)), key=lambda index: requests[index].offset_s)
    if order == list(range(len(requests))):
        return tuple(requests)
    place = {old: new for new, old in enumerate(order)}
    return tuple(
        replace(request, parent=None if request.parent is None else place[request.parent])
        for request in (requests[old] for old in order)
    )
