"""What a trace is like: what an endless cache would hit, and what comes back when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ownership.simulator.traces.arrivals import Arrival, arrivals
from ownership.simulator.traces.prefix_tree import PrefixTree, Touched
from ownership.simulator.traces.recency import Recency
from ownership.simulator.traces.samples import Collector, Samples
from ownership.simulator.traces.session import Trace, Trigger

SHARES_OF_PROMPTS = (0.01, 0.1, 0.5)


@dataclass(frozen=True)
class PrefixRepetition:
    """How many prompts share what, from a radix tree that counts them. In whole blocks."""

    distinct: Samples
    """Number of prompts that share a token, each distinct token once."""
    prompt: Samples
    """The same, each token once per prompt."""
    longest: Mapping[float, int]
    """By share of all prompts: tokens of the longest prefix that so many prompts have at least."""


@dataclass(frozen=True)
class TraceStatistics:
    """Figures of a trace. Reuse is of tokens that an earlier prompt had at the same place of the
    same prefix; where no starts are recorded, times and distances are within sessions."""

    source: str
    format: str
    block_tokens: int
    caveats: tuple[str, ...]
    num_sessions: int
    num_requests: int
    span_s: float | None
    """From the first arrival to the last; None where starts are not recorded."""
    hit_tokens: int
    """Prompt tokens that a cache which forgets nothing would have."""
    input_tokens: Samples
    output_tokens: Samples
    first_input_tokens: Samples
    """Of sessions' first requests."""
    turns: Samples
    """Requests per session."""
    growth_tokens: Samples
    """How much longer a prompt is than the one whose answer it waited for."""
    new_tokens: Samples
    """Of such a prompt, what no earlier prompt had."""
    think_s: Mapping[Trigger, Samples]
    """By what was waited for; where think times are recorded."""
    reuse_s: Samples
    """Seconds since a token that comes back was last used; weighted by tokens."""
    reuse_distance_tokens: Samples
    """Distinct tokens used by other prompts since then; weighted by tokens."""
    prefixes: PrefixRepetition

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts together."""
        return int(self.input_tokens.values.sum())

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that an endless cache would have."""
        return self.hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0


def measure(trace: Trace) -> TraceStatistics:
    """Read a trace once and say what it is like.

    Costs O(runs + log requests) a request, and some hundred bytes of memory.

    Raises:
        TraceError: the trace is not what its format says.
    """
    meter = _Meter(trace)
    for arrival in arrivals(trace):
        meter.add(arrival)
    return meter.statistics()


class _Meter:
    """Takes the requests one by one."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._tree = PrefixTree()
        self._recency = Recency()
        self._uses: list[tuple[int, float]] = []  # session and time of each use
        self._prompts: dict[int, list[int]] = {}  # of sessions: the lengths of their prompts
        self._hit_tokens = 0
        self._columns = {
            name: Collector()
            for name in ("input", "output", "first", "growth", "new", "reuse_s", "distance")
        }
        self._think = {trigger: Collector() for trigger in Trigger}

    def add(self, arrival: Arrival) -> None:
        """One more request, not before those added so far."""
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
        self._reuse(arrival, added.touched)
        self._uses.append((arrival.session, arrival.time_s))
        self._recency.use(request.blocks.num_blocks)

    def _reuse(self, arrival: Arrival, touched: tuple[Touched, ...]) -> None:
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
        """Of the requests added so far."""
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
