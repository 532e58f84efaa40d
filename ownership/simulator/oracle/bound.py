"""A bound on what any policy can reach, for each request and each session: a relaxation.

Given away: transfers and restores take no time, state is never evicted and is everywhere as soon as
it is computed, at every boundary; every engine serves one request at a time, without a queue, by
the best coefficients of the fleet. What is left, and why nothing is faster (times are the
simulator's, `machine.steps`):

1. *Chunks.* A chunk of a request's prompt that no other request uses but those that wait for its
   answer is computed by that request, after it was sent (`first_use`). So it computes at least
   n = prompt - b tokens, b being the end of the last chunk before those.
2. *First token.* n tokens take ceil(n / step tokens) steps. One of n_i tokens takes at least
   c0 + c1 n_i + c2 w_i alone and d0 + m + p1 n_i + p2 w_i beside decodes (other prefills only add
   to it), so min(c0, d0 + m) + min(c1, p1) n_i + min(c2, p2) w_i. The w_i sum to n (b + n / 2).
   A request that is sent at a fixed time a could wait for chunks of one that comes later, and has
   its first token after that one was sent. If that is not before a + T, T being its time without
   those chunks, waiting is no better than T.
3. *Answer.* Each further token takes a step of at least d0 + d1 + d2 (context). Or the request was
   preempted: then a step without it passes (at least d0), and the token comes when its prompt is
   computed again, whose last, partial chunk no cache has: as in 2, of prompt + 1 tokens at least.
4. *Session.* A request is sent when what it waits for was answered and thought about. By induction
   over a session no request is sent, and none answered, earlier than the bounds add up to.

These hold request by request, so they hold for means and for every percentile. Requests that are
refused are outside of it: no figure of a policy that refuses is compared.

Of tokens not computed: every distinct chunk is computed once (or decoded, where answers are kept),
so all of them minus the distinct ones is the most that anybody saves. Where workers die, a request
that is sent again may find all that it computed itself; only one sent before the last of them is
back can be. Of times nothing changes: what it finds it had computed after it was sent.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass
from typing import NamedTuple

from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.oracle.family import Family
from ownership.simulator.oracle.first_use import FirstUses
from ownership.simulator.results import mean, percentile
from ownership.simulator.sessions import LiveSession, instant_s
from ownership.simulator.state.chunks import chunk_runs
from ownership.simulator.state.overlap import ChunkSet
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace


class LeastTimes(NamedTuple):
    """The best of every worker's coefficients; see the module's docstring."""

    step_s: float
    token_s: float
    attention_s: float
    decode_s: float
    """Of a decode alone: d0 + d1."""
    context_s: float
    empty_s: float
    """Of a step of decodes, whatever is in it: d0."""
    step_tokens: int

    @classmethod
    def of(cls, fleet: FleetSpec) -> LeastTimes:
        """Of a fleet's workers."""
        found = []
        for worker in fleet.workers:
            compute, delays = worker.costs.compute.coefficients, worker.costs.delays()
            found.append(
                (
                    min(compute.step_s, delays.step_s + delays.mixed_s),
                    min(compute.token_s, delays.token_s),
                    min(compute.attention_s, delays.attention_s),
                    delays.step_s + delays.decode_s,
                    delays.context_s,
                    delays.step_s,
                )
            )
        step_s, token_s, attention_s, decode_s, context_s, empty_s = map(
            min, zip(*found, strict=True)
        )
        limit = fleet.limits.step_tokens
        return cls(step_s, token_s, attention_s, decode_s, context_s, empty_s, limit)

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Seconds of computing all of a prompt but its first tokens."""
        tokens = prompt_tokens - reused_tokens
        work = tokens * (reused_tokens + tokens / 2)
        steps = -(-tokens // self.step_tokens)
        return steps * self.step_s + tokens * self.token_s + work * self.attention_s

    def decoding_s(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> float:
        """Seconds from the first token of an answer to its last.

        `cached_tokens`: of the prompt, as many as a preempted request finds at most.
        """
        again_s = self.empty_s + self.prefill_s(prompt_tokens + 1, cached_tokens)
        first_s = self.decode_s + prompt_tokens * self.context_s
        steps = output_tokens - 1
        decodes = 0 if first_s > again_s else steps
        if self.context_s:  # each is longer than the one before it
            decodes = min(decodes, 1 + int(max(0.0, again_s - first_s) / self.context_s))
        grown = decodes * (decodes - 1) / 2
        return decodes * first_s + grown * self.context_s + (steps - decodes) * again_s


@dataclass
class Bound:
    """Seconds that no policy is below, request by request and session by session."""

    ttft_s: array[float]
    step_s: array[float]
    task_s: array[float]
    task_wait_s: array[float]
    saved_tokens: int
    """Prompt tokens that need not be computed, at most."""
    prompt_tokens: int

    def figures(self) -> dict[str, float]:
        """Under the names of `Figures`, as far as there is a bound."""
        return {
            "requests": len(self.ttft_s),
            "sessions": len(self.task_s),
            "refused": 0,
            "ttft_mean_s": mean(self.ttft_s),
            "ttft_p50_s": percentile(self.ttft_s, 50),
            "ttft_p95_s": percentile(self.ttft_s, 95),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "step_p50_s": percentile(self.step_s, 50),
            "step_p95_s": percentile(self.step_s, 95),
            "step_p99_s": percentile(self.step_s, 99),
            "task_mean_s": mean(self.task_s),
            "task_p50_s": percentile(self.task_s, 50),
            "task_p95_s": percentile(self.task_s, 95),
            "task_wait_mean_s": mean(self.task_wait_s),
            "task_wait_p95_s": percentile(self.task_wait_s, 95),
            "saved_tokens": self.saved_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(slots=True)
class _Known:
    """A request, its chunks, and what is known of it so far."""

    request: Request
    number: int
    """In the trace."""
    chain: BlockRuns
    kept: BlockRuns
    """The same with its answer, where that is kept."""
    reused: int = 0
    """Leading chunks that others may have computed."""
    reused_ever: int = 0
    """The same, however long this one waits for them."""
    sent_s: float = 0.0
    first_token_s: float = 0.0
    """After it was sent."""
    answer_s: float = 0.0

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.request.input_tokens)


def bound(
    trace: Trace, fleet: FleetSpec, chunk_tokens: int, *, keep_answers: bool = False
) -> Bound:
    """Of a trace whose sessions all have a start. Holds all its requests at once.

    `keep_answers`: for policies with `answers=kept`.
    """
    return _Bounding(trace, fleet, chunk_tokens, keep_answers).bound()


class _Bounding:
    """Two passes: the second knows how early each request can be sent."""

    def __init__(
        self, trace: Trace, fleet: FleetSpec, chunk_tokens: int, keep_answers: bool
    ) -> None:
        self._least, self._size = LeastTimes.of(fleet), chunk_tokens
        self._block_tokens, self._keep = trace.block_tokens, keep_answers
        ends_s = (failure.at_s + failure.for_s for failure in fleet.failures)
        self._back_s = max(ends_s, default=-math.inf)
        self._family = Family()
        self._sessions: list[tuple[Session, list[_Known]]] = []
        known: list[_Known] = []
        for session in trace:
            found = self._read(session, len(known))
            self._family.add(session.requests)
            self._sessions.append((session, found))
            known += found
        self._known = known

    def bound(self) -> Bound:
        self._find_reuse()
        self._find_times()
        self._limit_reuse_by_time()
        self._find_times()
        tasks_s, waits_s = array("d"), array("d")
        for session, found in self._sessions:
            begun_s = session.start_s or 0.0
            tasks_s.append(max((k.sent_s + k.answer_s for k in found), default=begun_s) - begun_s)
            waits_s.append(max(0.0, tasks_s[-1] - instant_s(session.requests)))
        return Bound(
            array("d", (k.first_token_s for k in self._known)),
            array("d", (k.answer_s for k in self._known)),
            tasks_s,
            waits_s,
            self._most_saved(),
            sum(k.prompt_tokens for k in self._known),
        )

    def _read(self, session: Session, first: int) -> list[_Known]:
        """A session's requests, numbered from `first` on."""
        per_chunk = self._size // self._block_tokens
        live = LiveSession.of(0, session, 0.0)
        found: list[_Known] = []
        for index, request in enumerate(session.requests):
            chain = chunk_runs(request.blocks, per_chunk)
            kept = live.answered(index, self._block_tokens) if self._keep else None
            chains = chain, chain if kept is None else chunk_runs(kept, per_chunk)
            found.append(_Known(request, first + index, *chains))
        return found

    def _find_reuse(self) -> None:
        """Step 1, whenever others are sent."""
        uses = FirstUses(self._family.follows)
        for known in self._known:
            self._use(uses, known, 0.0)
        for known in self._known:
            known.reused = known.reused_ever = uses.reusable(known.number, known.chain)

    def _most_saved(self) -> int:
        """Prompt tokens that are not computed, at most."""
        again = [known.sent_s <= self._back_s for known in self._known]
        chunks = sum(
            self._cacheable(known) if sent_again else min(known.reused_ever, self._cacheable(known))
            for known, sent_again in zip(self._known, again, strict=True)
        )
        if not (self._keep or any(again)):
            asked = ChunkSet()
            for known in self._known:
                asked.add(known.chain)
            chunks = min(chunks, asked.total - asked.distinct())
        return chunks * self._size

    def _limit_reuse_by_time(self) -> None:
        """Step 2, of requests that are sent at a fixed time."""
        uses = FirstUses(self._family.follows)
        for known in sorted(self._known, key=lambda known: known.sent_s):
            self._use(uses, known, known.sent_s)
        for known in self._known:
            if known.request.parent is None:
                known.reused = uses.reusable(known.number, known.chain, -math.inf)
                until_s = known.sent_s + self._first_token_s(known)
                known.reused = uses.reusable(known.number, known.chain, until_s)

    def _use(self, uses: FirstUses, known: _Known, sent_s: float) -> None:
        uses.add(known.number, known.chain, sent_s)
        if known.kept is not known.chain:
            uses.add(known.number, known.kept, sent_s)

    def _find_times(self) -> None:
        """Steps 2 to 4."""
        for session, found in self._sessions:
            begun_s = session.start_s or 0.0
            for known in found:
                request = known.request
                known.sent_s = begun_s + request.offset_s
                if request.parent is not None:
                    before = found[request.parent]
                    answered_s = before.sent_s + before.answer_s
                    known.sent_s = max(answered_s, known.sent_s)
                    if request.think_s is not None:
                        known.sent_s = answered_s + request.think_s
                known.first_token_s = self._first_token_s(known)
                known.answer_s = known.first_token_s + self._least.decoding_s(
                    known.prompt_tokens,
                    max(1, request.output_tokens),
                    self._cacheable(known) * self._size,
                )

    def _first_token_s(self, known: _Known) -> float:
        return self._least.prefill_s(known.prompt_tokens, self._reused_tokens(known))

    def _reused_tokens(self, known: _Known) -> int:
        return min(known.reused, self._cacheable(known)) * self._size

    def _cacheable(self, known: _Known) -> int:
        """Chunks that an engine may find of a prompt: all full ones, but for its last token."""
        return (known.prompt_tokens - 1) // self._size
