"""The model of every trace: sessions of requests.

Times are seconds, lengths are tokens. Block ids are those of the whole trace and name prefixes (see
`BlockRuns`). If a recording numbers blocks per session or by content, its reader renames them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from ownership.simulator.traces.block_runs import BlockRuns


class Trigger(Enum):
    """The source of the new text in a prompt."""

    USER = "user"
    TOOL_RESULT = "tool_result"
    UNKNOWN = "unknown"
    """The trace does not say."""


@dataclass(frozen=True, slots=True)
class Request:
    """One call of the model."""

    offset_s: float
    """Recorded time when it was sent, since the session's start."""
    input_tokens: int
    output_tokens: int
    blocks: BlockRuns
    """Blocks of the prompt. A partial last block may be included or left out."""
    parent: int | None = None
    """Index in the session of the request whose answer this one waits for, if any. Two requests
    with the same parent are a fork."""
    think_s: float | None = None
    """Time between the parent's answer and this request, in which a tool ran or a person read.
    None: not recorded; then it is sent at `offset_s`, but not before that answer."""
    trigger: Trigger = Trigger.UNKNOWN
    answered: BlockRuns | None = None
    """The full blocks of the prompt with its answer, if they are known."""

    def covered_tokens(self, num_blocks: int, block_tokens: int) -> int:
        """Return the number of prompt tokens in the first `num_blocks` blocks."""
        return min(num_blocks * block_tokens, self.input_tokens)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests that belong together, in the order they were sent."""

    id: str
    requests: tuple[Request, ...]
    start_s: float | None = None
    """Time of its first request since the trace's start; None: not recorded."""
    preamble_tokens: int = 0
    """Tools and system prompt at the start of the first prompt, which other sessions may share."""
    is_named: bool = True
    """False if its request came without a session's name, so that a router knows of no session."""


@dataclass(frozen=True)
class Trace:
    """Sessions in the order of their starts, or of the file if no start is recorded.

    Each iteration reads the source again and yields the same sessions; nothing is kept in memory.
    """

    source: str
    """The file, or a description; for messages and reports."""
    format: str
    block_tokens: int
    sessions: Callable[[], Iterator[Session]]
    starts_recorded: bool = True
    """True if every session has a `start_s`; otherwise none has, and arrivals must be invented."""
    caveats: tuple[str, ...] = ()
    """Sentences that every report must print: what the recording does not say."""

    def __iter__(self) -> Iterator[Session]:
        """Yield the sessions, reading as it goes.

        Raises:
            TraceError: the file is not what the format says; names file, line and field.
        """
        return self.sessions()


def in_time_order(requests: Sequence[Request]) -> tuple[Request, ...]:
    """Sort the requests of a session whose branches were listed one after the other.

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
