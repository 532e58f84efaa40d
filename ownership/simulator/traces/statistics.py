"""Statistics of a trace: the hits of an endless cache, and the times of reuse."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ownership.simulator.traces.prefix_tree import PrefixTree, Touched
from ownership.simulator.traces.session import Request, Session, Trace, Trigger

SHARES_OF_PROMPTS = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class Samples:
    """Weighted samples: values in ascending order (`[n] float64`), and their weights."""

    values: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    @property
    def total(self) -> float:
        """Sum of the weights; the number of samples if each weighs 1."""
        return float(self.weights.sum())

    @property
    def mean(self) -> float:
        """Weighted mean; NaN without samples."""
        return float(np.average(self.values, weights=self.weights)) if self.total else float("nan")

    def percentile(self, q: float) -> float:
        """Return the least value that at least `q` percent of the weight do not exceed, or NaN."""
        if not self.total:
            return float("nan")
        sums = np.cumsum(self.weights)
        # Rounding must not push a limit that is met exactly past its value.
        reached = int(np.searchsorted(sums, sums[-1] * q / 100 * (1 - 1e-12)))
        return float(self.values[min(reached, len(sums) - 1)])

    def share_up_to(self, limit: float) -> float:
        """Return the share of the weight on values that do not exceed `limit`, or NaN."""
        if not self.total:
            return float("nan")
        below = np.searchsorted(self.values, limit, side="right")
        return float(self.weights[:below].sum()) / self.total

    def as_json(self) -> dict[str, float | None]:
        """Return the figures of a table row; None without samples."""
        figures = {"total": self.total, "mean": self.mean}
        figures |= {f"p{q}": self.percentile(q) for q in (10, 50, 90, 99, 100)}
        return {name: None if np.isnan(v) else round(v, 6) for name, v in figures.items()}


class Collector:
    """Gathers samples, 16 bytes each."""

    def __init__(self) -> None:
        self._values, self._weights = array("d"), array("d")

    def add(self, value: float, weight: float = 1.0) -> None:
        self._values.append(value)
        self._weights.append(weight)

    def samples(self) -> Samples:
        values, weights = np.array(self._values), np.array(self._weights)
        order = np.argsort(values, kind="stable")
        return Samples(values[order], weights[order])


class Recency:
    """Counts the distinct blocks used since an earlier use: a Fenwick tree over uses.

    Every call is O(log uses), whatever the number of blocks.
    """

    def __init__(self) -> None:
        self._sums = [0]  # [i]: blocks of the uses (i - lowest set bit of i, i], from 1
        self._total = 0

    def use(self, num_blocks: int) -> int:
        """Add a use that is the last one of `num_blocks`; return its number, from 0."""
        index = len(self._sums)
        self._total += num_blocks
        below = self._up_to(index - 1) - self._up_to(index & (index - 1))
        self._sums.append(below + num_blocks)
        return index - 1

    def forget(self, use: int, num_blocks: int) -> None:
        """Subtract blocks of a use that have a later use now."""
        index = use + 1
        self._total -= num_blocks
        while index < len(self._sums):
            self._sums[index] -= num_blocks
            index += index & -index

    def used_after(self, use: int) -> int:
        """Return the number of distinct blocks whose last use came after `use`."""
        return self._total - self._up_to(use + 1)

    def _up_to(self, index: int) -> int:
        blocks = 0
        while index:
            blocks += self._sums[index]
            index &= index - 1
        return blocks


@dataclass(frozen=True)
class PrefixRepetition:
    """The number of prompts that share a prefix, in whole blocks."""

    distinct: Samples
    """Number of prompts that share a token, each distinct token once."""
    prompt: Samples
    """The same, each token once per prompt."""
    longest: Mapping[float, int]
    """By share of all prompts: tokens of the longest prefix that at least so many prompts have."""


@dataclass(frozen=True)
class TraceStatistics:
    """The figures of a trace.

    A token is used again if an earlier prompt had it at the same place of the same prefix. If no
    starts are recorded, times and distances of reuse are those within sessions.
    """

    source: str
    format: str
    block_tokens: int
    caveats: tuple[str, ...]
    num_sessions: int
    num_requests: int
    span_s: float | None
    """From the first arrival to the last; None if starts are not recorded."""
    hit_tokens: int
    """Prompt tokens that an endless cache would have."""
    input_tokens: Samples
    output_tokens: Samples
    first_input_tokens: Samples
    """Prompts of sessions' first requests."""
    turns: Samples
    """Requests per session."""
    growth_tokens: Samples
    """Length of a prompt minus that of the prompt whose answer it waited for."""
    new_tokens: Samples
    """The tokens of such a prompt that no earlier prompt had."""
    think_s: Mapping[Trigger, Samples]
    """Recorded think times, by the source of the new text."""
    reuse_s: Samples
    """Seconds between two uses of a token; weighted by tokens."""
    reuse_distance_tokens: Samples
    """Distinct tokens used between two uses of a token; weighted by tokens."""
    prefixes: PrefixRepetition

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return int(self.input_tokens.values.sum())

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that an endless cache would have."""
        return self.hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request with its place in the trace."""

    time_s: float
    """Since the trace's start; since the session's if no start is recorded."""
    session: int
    """The session's place in the trace, from 0."""
    request: Request


def arrivals(trace: Trace) -> Iterator[Arrival]:
    """Yield the requests of all sessions by time; session by session if no start is recorded.

    Holds the sessions under way, not the trace.
    """
    waiting: list[tuple[float, int, int, Session]] = []
    for ordinal, session in enumerate(trace):
        if session.start_s is None:
            for request in session.requests:
                yield Arrival(request.offset_s, ordinal, request)
            continue
        while waiting and waiting[0][0] <= session.start_s:
            yield _next(waiting)
        heapq.heappush(waiting, (session.start_s, ordinal, 0, session))
    while waiting:
        yield _next(waiting)


def _next(waiting: list[tuple[float, int, int, Session]]) -> Arrival:
    """Take the earliest request, and leave the next one of its session."""
    time_s, ordinal, index, session = waiting[0]
    assert session.start_s is not None
    if index + 1 < len(session.requests):
        next_s = session.start_s + session.requests[index + 1].offset_s
        heapq.heapreplace(waiting, (next_s, ordinal, index + 1, session))
    else:
        heapq.heappop(waiting)
    return Arrival(time_s, ordinal, session.requests[index])


def measure(trace: Trace) -> TraceStatistics:
    """Read a trace once and compute its figures.

    Costs O(runs + log requests) a request, and some hundred bytes of memory.

    Raises:
        TraceError: the trace is not what its format says.
    """
    meter = _Meter(trace)
    for arrival in arrivals(trace):
        meter.add(arrival)
    return meter.statistics()


class _Meter:
    """Takes the requests one by one, in the order of time."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tree = PrefixTree()
        self._recency = Recency()
        self._uses: list[tuple[int, float]] = []
        """Session and time of each use."""
        self._prompts: dict[int, list[int]] = {}
        """Lengths of the prompts of each session."""
        self._hit_tokens = 0
        self._columns = {
            name: Collector()
            for name in ("input", "output", "first", "growth", "new", "reuse_s", "distance")
        }
        self._think = {trigger: Collector() for trigger in Trigger}

    def add(self, arrival: Arrival) -> None:
        request, columns = arrival.request, self._columns
        added = self._tree.add(request.blocks, use=len(self._uses))
        hit_tokens = request.covered_tokens(added.known_blocks, self._trace.block_tokens)
        self._hit_tokens += hit_tokens
        columns["input"].add(request.input_tokens)
        columns["output"].add(request.output_tokens)
        prompts = self._prompts.setdefault(arrival.session, [])
        if not prompts:
            columns["first"].add(request.input_tokens)
        if request.parent is not None:
            columns["growth"].add(request.input_tokens - prompts[request.parent])
            columns["new"].add(request.input_tokens - hit_tokens)
            if request.think_s is not None:
                self._think[request.trigger].add(request.think_s)
        prompts.append(request.input_tokens)
        self._add_reuse(arrival, added.touched)
        self._uses.append((arrival.session, arrival.time_s))
        self._recency.use(request.blocks.num_blocks)

    def _add_reuse(self, arrival: Arrival, touched: tuple[Touched, ...]) -> None:
        size, depth = self._trace.block_tokens, 0
        for part in touched:
            session, time_s = self._uses[part.last_use]
            tokens = arrival.request.covered_tokens(depth + part.num_blocks, size) - depth * size
            depth += part.num_blocks
            if self._trace.starts_recorded or session == arrival.session:
                self._columns["reuse_s"].add(arrival.time_s - time_s, tokens)
                distance = self._recency.used_after(part.last_use)
                self._columns["distance"].add(distance * size, tokens)
        for part in touched:
            self._recency.forget(part.last_use, part.num_blocks)

    def statistics(self) -> TraceStatistics:
        samples = {name: column.samples() for name, column in self._columns.items()}
        turns = Collector()
        for prompts in self._prompts.values():
            turns.add(len(prompts))
        times = [time_s for _, time_s in self._uses]
        recorded = self._trace.starts_recorded and times
        return TraceStatistics(
            source=self._trace.source,
            format=self._trace.format,
            block_tokens=self._trace.block_tokens,
            caveats=self._trace.caveats,
            num_sessions=len(self._prompts),
            num_requests=len(self._uses),
            span_s=times[-1] - times[0] if recorded else None,
            hit_tokens=self._hit_tokens,
            input_tokens=samples["input"],
            output_tokens=samples["output"],
            first_input_tokens=samples["first"],
            turns=turns.samples(),
            growth_tokens=samples["growth"],
            new_tokens=samples["new"],
            think_s={trigger: column.samples() for trigger, column in self._think.items()},
            reuse_s=samples["reuse_s"],
            reuse_distance_tokens=samples["distance"],
            prefixes=self._repetition(),
        )

    def _repetition(self) -> PrefixRepetition:
        size, num_prompts = self._trace.block_tokens, len(self._uses)
        distinct, prompt = Collector(), Collector()
        longest = dict.fromkeys(SHARES_OF_PROMPTS, 0)
        for node in self._tree.prefixes():
            tokens = node.num_blocks * size
            distinct.add(node.prompts, tokens)
            prompt.add(node.prompts, tokens * node.prompts)
            for share in SHARES_OF_PROMPTS:
                if node.prompts >= share * num_prompts:
                    longest[share] = max(longest[share], node.depth_blocks * size + tokens)
        return PrefixRepetition(distinct.samples(), prompt.samples(), longest)
