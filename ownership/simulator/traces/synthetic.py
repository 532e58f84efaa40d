"""Made-up agent sessions: every distribution is explicit, every draw is seeded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from hetero_connector.errors import TraceError
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.distributions import Distribution
from ownership.simulator.traces.session import Request, Session, Trace, Trigger, in_time_order
from ownership.simulator.traces.starts import StartProcess
from ownership.simulator.traces.synthetic_spec import SyntheticSpec


def synthetic(
    spec: SyntheticSpec,
    *,
    num_sessions: int,
    starts: StartProcess,
    block_tokens: int,
    seed: int,
) -> Trace:
    """Sessions drawn as `spec` says. A session depends on `seed` and its number alone.

    Raises:
        TraceError: a number is out of its range.
    """
    for name, value in (("num_sessions", num_sessions), ("block_tokens", block_tokens)):
        if value < 1:
            raise TraceError("synthetic", f"{value!r} is not greater than 0", field=name)
    parameters = (f"{name} = {value}" for name, value in spec.as_mapping().items())
    return Trace(
        source=f"{num_sessions} synthetic sessions, seed {seed}",
        format="synthetic",
        block_tokens=block_tokens,
        sessions=partial(_sessions, spec, num_sessions, starts, block_tokens, seed),
        caveats=(
            f"Arrivals are invented: {starts.as_text()}.",
            f"Sessions are invented: {', '.join(parameters)}.",
        ),
    )


def _sessions(
    spec: SyntheticSpec, num_sessions: int, starts: StartProcess, block_tokens: int, seed: int
) -> Iterator[Session]:
    preamble_rng, start_rng = (np.random.default_rng([seed, 0, part]) for part in range(2))
    preambles, next_id = [], 0
    for _ in range(spec.num_preambles):
        length = min(_length(spec.preamble_tokens, preamble_rng), spec.context_tokens - 1)
        preamble = _Text(block_tokens).grown(length, next_id)
        preambles.append(preamble)
        next_id += preamble.blocks.num_blocks
    popularity = np.arange(1, spec.num_preambles + 1, dtype=np.float64) ** -spec.preamble_skew
    popularity /= popularity.sum()
    starts_s = starts.starts_s(start_rng)
    for number in range(num_sessions):
        rng = np.random.default_rng([seed, 1, number])
        preamble = preambles[int(rng.choice(spec.num_preambles, p=popularity))]
        maker = _SessionMaker(spec, rng, preamble, next_id)
        yield Session(str(number), maker.requests(), next(starts_s), preamble.tokens)
        next_id = maker.next_id


@dataclass(frozen=True, slots=True)
class _Text:
    """A prompt that grows; its blocks are the full ones."""

    block_tokens: int
    tokens: int = 0
    blocks: BlockRuns = field(default_factory=BlockRuns)

    def grown(self, by_tokens: int, next_id: int) -> _Text:
        """With as much new text behind it, whose blocks count from `next_id`."""
        tokens = self.tokens + by_tokens
        new_blocks = tokens // self.block_tokens - self.blocks.num_blocks
        runs = (*self.blocks.runs, (next_id, new_blocks))
        return _Text(self.block_tokens, tokens, BlockRuns.of_runs(runs))


@dataclass(frozen=True, slots=True)
class _Answered:
    """A request that was made, and what a request after it starts from."""

    index: int
    text: _Text
    """Prompt and answer."""
    end_s: float


class _SessionMaker:
    """Draws one session."""

    def __init__(
        self, spec: SyntheticSpec, rng: np.random.Generator, preamble: _Text, next_id: int
    ) -> None:
        self._spec, self._rng, self._preamble = spec, rng, preamble
        self.next_id = next_id
        self._made: list[Request] = []

    def requests(self) -> tuple[Request, ...]:
        """All of them, in the order they are sent."""
        spec, rng = self._spec, self._rng
        last = self._ask(self._fresh(spec.first_tokens), None, 0.0, None, Trigger.USER)
        for _ in range(_length(spec.turns, rng) - 1):
            if rng.random() < spec.fork_fraction:
                for _ in range(_length(spec.fork_width, rng)):
                    self._continue(last, _length(spec.fork_turns, rng))
            last = self._continue(last, 1)
        return in_time_order(self._made)

    def _continue(self, last: _Answered, turns: int) -> _Answered:
        """So many further turns, one after the other."""
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
        prompt: _Text,
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
                service_s=answer_s,
                trigger=trigger,
                answered=answered.blocks,
            )
        )
        return _Answered(len(self._made) - 1, answered, offset_s + answer_s)

    def _fresh(self, length: Distribution) -> _Text:
        """A prompt that shares its preamble and no more, within the context."""
        most = self._spec.context_tokens - self._preamble.tokens
        return self._grown(self._preamble, min(_length(length, self._rng), most))

    def _grown(self, text: _Text, by_tokens: int) -> _Text:
        grown = text.grown(by_tokens, self.next_id)
        self.next_id += grown.blocks.num_blocks - text.blocks.num_blocks
        return grown


def _length(distribution: Distribution, rng: np.random.Generator) -> int:
    return max(1, round(distribution.sample(rng)))
