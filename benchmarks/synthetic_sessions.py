"""Invented agent sessions: every distribution is explicit, every draw is seeded."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace, Trigger, in_time_order
from ownership.simulator.workload import PoissonStarts

_Z90 = 1.2815515655446004
"""The standard normal's 90th percentile."""


class Distribution(Protocol):
    """The distribution of one number."""

    def sample(self, rng: np.random.Generator) -> float: ...


@dataclass(frozen=True)
class Constant:
    value: float

    def sample(self, rng: np.random.Generator) -> float:
        return self.value


@dataclass(frozen=True)
class Geometric:
    """Whole numbers from 1."""

    mean: float

    def sample(self, rng: np.random.Generator) -> float:
        return float(rng.geometric(1 / self.mean))


@dataclass(frozen=True)
class LogNormal:
    """Given by two percentiles, as tables of a trace have them."""

    p50: float
    p90: float

    def sample(self, rng: np.random.Generator) -> float:
        sigma = math.log(self.p90 / self.p50) / _Z90
        return float(rng.lognormal(math.log(self.p50), sigma))


@dataclass(frozen=True, kw_only=True)
class SyntheticSpec:
    """The parameters of invented sessions. Lengths are tokens; draws are rounded, at least 1."""

    num_preambles: int
    """Number of different tools and system prompts; each session begins with one of them."""
    preamble_skew: float
    """Zipf's exponent of how often each is drawn; 0: all equally often."""
    preamble_tokens: Distribution
    first_tokens: Distribution
    """Tokens of the first prompt after the preamble."""
    turns: Distribution
    """Requests of a session without those of forks."""
    tool_fraction: float
    """Share of the turns that answer a tool; the others answer a person."""
    tool_tokens: Distribution
    """Tokens that a tool adds to the prompt, after the answer before it."""
    user_tokens: Distribution
    output_tokens: Distribution
    tool_latency_s: Distribution
    think_s: Distribution
    """Think time of a person."""
    answer_s: Distribution
    """Time of the imagined server; decides the offsets, which a closed loop ignores."""
    fork_fraction: float
    """Share of the turns whose answer several requests continue."""
    fork_width: Distribution
    """Further requests that continue it, besides the session's next turn."""
    fork_turns: Distribution
    """Length of each branch."""
    context_tokens: int
    """A longer prompt is compacted: all after its preamble is replaced by `summary_tokens`."""
    summary_tokens: Distribution


CODING_AGENT = SyntheticSpec(
    num_preambles=8,
    preamble_skew=1.0,
    preamble_tokens=LogNormal(15_000, 20_000),
    first_tokens=LogNormal(7_000, 240_000),
    turns=Geometric(60),
    tool_fraction=0.85,
    tool_tokens=LogNormal(300, 3_300),
    user_tokens=LogNormal(300, 3_300),
    output_tokens=LogNormal(216, 875),
    tool_latency_s=LogNormal(8, 68),
    think_s=LogNormal(103, 1_549),
    answer_s=LogNormal(8, 25),
    fork_fraction=0.0,
    fork_width=Constant(4),
    fork_turns=Geometric(3),
    context_tokens=200_000,
    summary_tokens=LogNormal(7_000, 20_000),
)
"""Like the published coding-agent sessions (see `agent_sessions`): p50 and p90 are those that
`heterocache trace stats` prints. The number of preambles, how often each is drawn, forks and
compaction are invented."""


def synthetic(
    spec: SyntheticSpec, *, sessions: int, rate: float, block_tokens: int, seed: int
) -> Trace:
    """Draw sessions that start at `rate` a second. Each depends on `seed` and its number alone."""
    starts = PoissonStarts(rate)
    return Trace(
        source=f"{sessions} synthetic sessions, seed {seed}",
        format="synthetic",
        block_tokens=block_tokens,
        sessions=partial(_sessions, spec, sessions, starts, block_tokens, seed),
        caveats=(starts.caveat, "Sessions are invented."),
    )


def _sessions(
    spec: SyntheticSpec, number: int, starts: PoissonStarts, block_tokens: int, seed: int
) -> Iterator[Session]:
    preamble_rng, start_rng = (np.random.default_rng([seed, 0, part]) for part in range(2))
    preambles, next_id = [], 0
    for _ in range(spec.num_preambles):
        length = min(_length(spec.preamble_tokens, preamble_rng), spec.context_tokens - 1)
        preamble = Text(block_tokens).grown(length, next_id)
        preambles.append(preamble)
        next_id += preamble.blocks.num_blocks
    popularity = np.arange(1, spec.num_preambles + 1, dtype=np.float64) ** -spec.preamble_skew
    popularity /= popularity.sum()
    starts_s = starts.starts_s(start_rng)
    for index in range(number):
        rng = np.random.default_rng([seed, 1, index])
        preamble = preambles[int(rng.choice(spec.num_preambles, p=popularity))]
        maker = _SessionMaker(spec, rng, preamble, next_id)
        yield Session(str(index), maker.requests(), next(starts_s), preamble.tokens)
        next_id = maker.next_id


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt that grows; its blocks are the full ones."""

    block_tokens: int
    tokens: int = 0
    blocks: BlockRuns = field(default_factory=BlockRuns)

    def grown(self, by_tokens: int, next_id: int) -> Text:
        """Append new text, whose blocks count from `next_id`."""
        tokens = self.tokens + by_tokens
        new_blocks = tokens // self.block_tokens - self.blocks.num_blocks
        runs = (*self.blocks.runs, (next_id, new_blocks))
        return Text(self.block_tokens, tokens, BlockRuns.of_runs(runs))


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request with its answer, which later requests continue."""

    index: int
    text: Text
    """Prompt and answer."""
    end_s: float


class _SessionMaker:
    """Draws one session."""

    def __init__(
        self, spec: SyntheticSpec, rng: np.random.Generator, preamble: Text, next_id: int
    ) -> None:
        self._spec, self._rng, self._preamble = spec, rng, preamble
        self.next_id = next_id
        self._made: list[Request] = []

    def requests(self) -> tuple[Request, ...]:
        """Draw all requests, in the order they are sent."""
        spec, rng = self._spec, self._rng
        last = self._ask(self._fresh(spec.first_tokens), None, 0.0, None, Trigger.USER)
        for _ in range(_length(spec.turns, rng) - 1):
            if rng.random() < spec.fork_fraction:
                for _ in range(_length(spec.fork_width, rng)):
                    self._continue(last, _length(spec.fork_turns, rng))
            last = self._continue(last, 1)
        return in_time_order(self._made)

    def _continue(self, last: _Answered, turns: int) -> _Answered:
        """Draw further turns, one after the other."""
        spec, rng = self._spec, self._rng
        for _ in range(turns):
            tool = rng.random() < spec.tool_fraction
            think_s = (spec.tool_latency_s if tool else spec.think_s).sample(rng)
            new_tokens = _length(spec.tool_tokens if tool else spec.user_tokens, rng)
            text = self._grown(last.text, new_tokens)
            if text.tokens > spec.context_tokens:
                text = self._fresh(spec.summary_tokens)
            trigger = Trigger.TOOL_RESULT if tool else Trigger.USER
            last = self._ask(text, last.index, last.end_s + think_s, think_s, trigger)
        return last

    def _ask(
        self,
        prompt: Text,
        parent: int | None,
        offset_s: float,
        think_s: float | None,
        trigger: Trigger,
    ) -> _Answered:
        answer_s = self._spec.answer_s.sample(self._rng)
        output_tokens = _length(self._spec.output_tokens, self._rng)
        answered = self._grown(prompt, output_tokens)
        self._made.append(
            Request(
                offset_s=offset_s,
                input_tokens=prompt.tokens,
                output_tokens=output_tokens,
                blocks=prompt.blocks,
                parent=parent,
                think_s=think_s,
                trigger=trigger,
                answered=answered.blocks,
            )
        )
        return _Answered(len(self._made) - 1, answered, offset_s + answer_s)

    def _fresh(self, length: Distribution) -> Text:
        """Draw a prompt that shares only its preamble, within the context."""
        room = self._spec.context_tokens - self._preamble.tokens
        return self._grown(self._preamble, min(_length(length, self._rng), room))

    def _grown(self, text: Text, by_tokens: int) -> Text:
        grown = text.grown(by_tokens, self.next_id)
        self.next_id += grown.blocks.num_blocks - text.blocks.num_blocks
        return grown


def _length(distribution: Distribution, rng: np.random.Generator) -> int:
    return max(1, round(distribution.sample(rng)))
