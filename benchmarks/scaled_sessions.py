"""Recorded agent sessions, made short enough for a small model on a CPU.

Lengths and think times are divided; forks, growth, compaction and the order of requests stay. A
prompt either continues its parent's answer or begins anew after tools and system prompt, whichever
the recording is nearer to.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import numpy as np

from benchmarks.synthetic_sessions import Text
from ownership.simulator.traces.session import Request, Session, Trace

_CONTINUED = 0.9
"""Share of the parent's blocks from which on a prompt continues it."""


def scaled(
    trace: Trace,
    *,
    sessions: int,
    rate: float,
    block_tokens: int,
    factor: float,
    think_factor: float,
    longest_think_s: float,
    max_turns: int,
    context_tokens: int,
    seed: int,
) -> Trace:
    """Draw sessions that start at `rate` a second, each with its first `max_turns` requests.

    Tokens are divided by `factor`, think times by `think_factor`. Sessions that begin with more
    than half of `context_tokens` are left out, and what follows a longer prompt is cut off.
    """
    fits = [
        session
        for session in trace
        if session.requests[0].input_tokens <= factor * context_tokens / 2
    ]
    chosen = np.random.default_rng(seed).permutation(len(fits))[:sessions]

    def made() -> Iterator[Session]:
        names = count(0)
        rng, start_s = np.random.default_rng([seed, 1]), 0.0
        for number in chosen.tolist():
            maker = _Maker(fits[number], block_tokens, factor, names)
            requests = maker.requests(think_factor, longest_think_s, max_turns, context_tokens)
            yield Session(fits[number].id, requests, start_s, maker.preamble.tokens)
            start_s += float(rng.exponential(1.0 / rate))

    return Trace(
        f"{len(chosen)} sessions of {trace.source}, lengths over {factor:g}",
        "scaled",
        block_tokens,
        partial(made),
        caveats=(*trace.caveats, "Lengths and think times are divided."),
    )


class _Maker:
    """Makes one session's requests."""

    def __init__(
        self, session: Session, block_tokens: int, factor: float, names: Iterator[int]
    ) -> None:
        self._session, self._factor, self._names = session, factor, names
        first = session.requests[0].input_tokens
        length = min(session.preamble_tokens, first - 1)
        self.preamble = self._grown(Text(block_tokens), self._tokens(length))

    def requests(
        self, think_factor: float, longest_think_s: float, max_turns: int, context_tokens: int
    ) -> tuple[Request, ...]:
        made: list[Request] = []
        texts: list[Text] = []
        for recorded in self._session.requests[:max_turns]:
            text, parent = self.preamble, recorded.parent
            new_tokens = self._tokens(recorded.input_tokens) - text.tokens
            if parent is not None:
                before = self._session.requests[parent]
                shared = recorded.blocks.shared_with(before.blocks)
                if shared >= _CONTINUED * before.blocks.num_blocks:
                    text = texts[parent]
                    told = before.input_tokens + before.output_tokens
                    new_tokens = self._tokens(recorded.input_tokens - told)
            prompt = self._grown(text, max(1, new_tokens))
            answered = self._grown(prompt, self._tokens(recorded.output_tokens))
            if answered.tokens > context_tokens:
                break
            think_s = recorded.think_s
            if parent is not None:
                think_s = min((think_s or 0.0) / think_factor, longest_think_s)
            made.append(
                Request(
                    offset_s=recorded.offset_s / think_factor,
                    input_tokens=prompt.tokens,
                    output_tokens=answered.tokens - prompt.tokens,
                    blocks=prompt.blocks,
                    parent=parent,
                    think_s=think_s,
                    trigger=recorded.trigger,
                    answered=answered.blocks,
                )
            )
            texts.append(answered)
        return tuple(made)

    def _tokens(self, recorded: int) -> int:
        return max(1, round(recorded / self._factor))

    def _grown(self, text: Text, by_tokens: int) -> Text:
        """Append new text. Blocks of each piece have names of their own."""
        return text.grown(by_tokens, next(self._names) << 20)
