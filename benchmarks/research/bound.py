"""A lower bound on the times of any policy, for each request and each session: a relaxation.

Assumed away: transfers and restores take no time; state is never evicted, and is everywhere as soon
as it is computed, at every boundary; every engine serves one request at a time, without a queue, by
the best coefficients of the fleet. The rest, and the proof that nothing is faster (times are those
of the simulator's `StepTimes`):

1. *Chunks.* A chunk of a request's prompt that no other request uses but those that wait for its
   answer is computed by that request, after it was sent (`first_use`). So it computes at least
   n = prompt - b tokens, b being the end of the last chunk before those.
2. *First token.* n tokens take ceil(n / step tokens) steps. One of n_i tokens takes at least
   c0 + c1 n_i + c2 w_i alone and d0 + m + p1 n_i + p2 w_i together with decodes (other prefills
   only add to it), so min(c0, d0 + m) + min(c1, p1) n_i + min(c2, p2) w_i. The w_i sum to
   n (b + n / 2).
   A request that is sent at a fixed time a could wait for chunks of one that comes later, and has
   its first token after that one was sent. If that is not before a + T, T being its time without
   those chunks, waiting is no better than T.
   By a roofline it takes at least launch + n_i (operations + exchange) + pairs, in both cases.
3. *Answer.* Each further token takes a step of at least d0 + d1 + d2 (context); by a
   roofline launch + the products of one token + the context: it grows with the batch. Or it was
   preempted: then a step without it passes (at least d0), and the token comes when its prompt is
   computed again, whose last token no cache has: as in 2, of prompt + 1 tokens at least.
4. *Session.* A request is sent when what it waits for was answered and thought about. By induction
   over a session no request is sent, and none answered, earlier than the bounds add up to.

These hold request by request, so they hold for means and for every percentile. Means have a second
bound, which takes the number of engines into account: `shadow_price`. Figures of a policy that
refuses requests are not compared.

Tokens not computed: every distinct chunk is computed once (or decoded, if answers are kept), so all
chunks minus the distinct ones is the most that any policy saves.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks.research.first_use import Family, FirstUses
from benchmarks.research.shadow_price import Demand, ShadowPrices
from ownership.simulator.figures import ChunkSet, mean, percentile
from ownership.simulator.fleet_file import FleetSpec
from ownership.simulator.sessions import LiveSession, instant_s
from ownership.simulator.simulate import chunk_tokens_of
from ownership.simulator.state.chunks import chunk_runs
from ownership.simulator.traces.block_runs import BlockRuns
from ownership.simulator.traces.session import Request, Session, Trace
from ownership.simulator.workload import Workload


class LeastTimes(NamedTuple):
    """Seconds, each the least of all workers. The letters are those of the module's docstring."""

    step_s: float
    """Constant part of a step with a prefill: c0 or d0 + m."""
    token_s: float
    attention_s: float
    empty_s: float
    """Constant part of a step of decodes: d0."""
    decode_s: float
    """d1, added by a decode; then d2, added by every token of its context."""
    context_s: float
    step_tokens: int
    alone_s: float = 0.0
    """By how much a step with one decode takes longer than these say."""

    @classmethod
    def of(cls, fleet: FleetSpec, weights: float = 0.0) -> LeastTimes:
        """Take the least of a fleet's workers.

        `weights`: of a roofline, the share in which reading weights counts in every step. The rest
        is operations, and the larger of both is more than any mean of them.
        """
        found = []
        for worker in fleet.workers:
            compute, delays = worker.costs.compute.coefficients, worker.costs.delays()
            if (roof := worker.roofline) is not None:
                step_s = roof.launch_s + weights * roof.weights_s * roof.used_share
                token_s = (1.0 - weights) * roof.token_s + roof.exchange_s
                alone_s = roof.launch_s + roof.products_s(1.0) - step_s - token_s
                found.append(
                    (step_s, token_s, roof.pair_s, step_s, token_s, roof.context_s, alone_s)
                )
                continue
            found.append(
                (
                    min(compute.step_s, delays.step_s + delays.mixed_s),
                    min(compute.token_s, delays.token_s),
                    min(compute.attention_s, delays.attention_s),
                    delays.step_s,
                    delays.decode_s,
                    delays.context_s,
                    0.0,
                )
            )
        step_s, token_s, attention_s, empty_s, decode_s, context_s, alone_s = map(
            min, zip(*found, strict=True)
        )
        return cls(
            step_s, token_s, attention_s, empty_s, decode_s, context_s,
            fleet.limits.step_tokens, alone_s,
        )  # fmt: skip

    def prefill_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Return the seconds of computing a prompt after its first `reused_tokens`."""
        steps = -(-(prompt_tokens - reused_tokens) // self.step_tokens)
        seconds = steps * self.step_s + self.prefill_work_s(prompt_tokens, reused_tokens)
        return max(seconds, self.step_s + self.alone_s)

    def prefill_work_s(self, prompt_tokens: int, reused_tokens: int) -> float:
        """Return the same without the constant part of each step."""
        tokens = prompt_tokens - reused_tokens
        work = tokens * (reused_tokens + tokens / 2)
        return tokens * self.token_s + work * self.attention_s

    def decode_work_s(self, context_tokens: int) -> float:
        """Return the seconds by which a decode makes a step longer."""
        return self.decode_s + context_tokens * self.context_s

    def again_s(self, prompt_tokens: int, cached_tokens: int) -> float:
        """Return the seconds until a preempted request has its next token.

        `cached_tokens`: the most tokens of its prompt that it finds.
        """
        return self.empty_s + self.alone_s + self.prefill_s(prompt_tokens + 1, cached_tokens)

    def decoding_s(self, prompt_tokens: int, output_tokens: int, cached_tokens: int) -> float:
        """Return the seconds from the first token of an answer to its last."""
        again_s = self.again_s(prompt_tokens, cached_tokens)
        first_s = self.empty_s + self.alone_s + self.decode_work_s(prompt_tokens)
        steps = output_tokens - 1
        decodes = 0 if first_s > again_s else steps
        if self.context_s:  # each is longer than the one before it
            decodes = min(decodes, 1 + int(max(0.0, again_s - first_s) / self.context_s))
        grown = decodes * (decodes - 1) / 2
        return decodes * first_s + grown * self.context_s + (steps - decodes) * again_s


@dataclass
class Bound:
    """Seconds that no policy is below, for each request and each session."""

    ttft_s: array[float]
    step_s: array[float]
    task_s: array[float]
    task_wait_s: array[float]
    ttft_queue_s: float
    """Seconds of waiting for engines (`shadow_price`), in the mean TTFT; then in the mean task."""
    task_queue_s: float
    saved_tokens: int
    """The most prompt tokens that need not be computed."""
    prompt_tokens: int

    def figures(self) -> dict[str, float]:
        """Return the bounds under the names of `Figures`."""
        return {
            "requests": len(self.ttft_s),
            "sessions": len(self.task_s),
            "refused": 0,
            "ttft_mean_s": mean(self.ttft_s) + self.ttft_queue_s,
            "ttft_mean_alone_s": mean(self.ttft_s),
            "ttft_p50_s": percentile(self.ttft_s, 50),
            "ttft_p95_s": percentile(self.ttft_s, 95),
            "ttft_p99_s": percentile(self.ttft_s, 99),
            "step_p50_s": percentile(self.step_s, 50),
            "step_p95_s": percentile(self.step_s, 95),
            "step_p99_s": percentile(self.step_s, 99),
            "task_mean_s": mean(self.task_s) + self.task_queue_s,
            "task_p50_s": percentile(self.task_s, 50),
            "task_p95_s": percentile(self.task_s, 95),
            "task_wait_mean_s": mean(self.task_wait_s) + self.task_queue_s,
            "task_wait_mean_alone_s": mean(self.task_wait_s),
            "task_wait_p95_s": percentile(self.task_wait_s, 95),
            "saved_tokens": self.saved_tokens,
            "prompt_tokens": self.prompt_tokens,
        }


@dataclass(slots=True)
class _Known:
    """A request, its chunks, and its bounds so far."""

    request: Request
    number: int
    """Its number in the trace."""
    chain: BlockRuns
    kept: BlockRuns
    """The chunks with its answer, if that is kept."""
    begun_tokens: int = 0
    """Leading tokens that a kept earlier prompt covers, after its handoff."""
    reused: int = 0
    """Leading chunks that others may have computed."""
    reused_ever: int = 0
    """The same, if this request waits without limit."""
    sent_s: float = 0.0
    first_token_s: float = 0.0
    """Seconds after it was sent."""
    answer_s: float = 0.0
    others_s: float = math.inf
    """No request that may compute more of it is sent before."""
    waited: bool = False
    """It was sent at a time that depends on an answer."""

    @property
    def prompt_tokens(self) -> int:
        return max(1, self.request.input_tokens)


def bound(
    trace: Trace, fleet: FleetSpec, chunk_tokens: int, *, keep_answers: bool = False
) -> Bound:
    """Compute the bound of a trace whose sessions all have a start. Holds all requests in memory.

    `keep_answers`: for policies with `answers=kept`.
    """
    return _Bounding(trace, fleet, chunk_tokens, keep_answers).bound()


class _Bounding:
    """Two passes: the second knows how early each request can be sent."""

    def __init__(
        self, trace: Trace, fleet: FleetSpec, chunk_tokens: int, keep_answers: bool
    ) -> None:
        self._least, self._size = LeastTimes.of(fleet), chunk_tokens
        self._shared = [self._least]
        """Each gives a bound on waiting."""
        if any(worker.roofline for worker in fleet.workers):
            self._shared += [LeastTimes.of(fleet, weights) for weights in (0.25, 0.5, 0.75)]
        self._workers, self._model = len(fleet.workers), fleet.model
        self._block_tokens, self._keep = trace.block_tokens, keep_answers
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
            self._queue_s(
                lambda least: (self._first_token(least, x) for x in self._known), len(self._known)
            ),
            self._queue_s(
                lambda least: (self._chain(least, found) for _, found in self._sessions),
                len(tasks_s),
            ),
            self._most_saved(),
            sum(k.prompt_tokens for k in self._known),
        )

    def _queue_s(
        self, sessions: Callable[[LeastTimes], Iterable[Sequence[Demand]]], count: int
    ) -> float:
        """Return the mean seconds that each of `count` sessions waits for engines."""
        begin_s = min((known.sent_s for known in self._known), default=0.0)
        waits_s = (
            ShadowPrices(sessions(least), self._workers, least.empty_s, begin_s).waiting_s()
            for least in self._shared
        )
        return max(waits_s) / max(1, count)

    def _first_token(self, least: LeastTimes, known: _Known) -> Sequence[Demand]:
        """Return the demand of a first token, if the request is sent at a fixed time."""
        if known.request.parent is not None:
            return ()
        return (Demand(known.sent_s + known.first_token_s, *self._prompt(least, known)),)

    def _chain(self, least: LeastTimes, requests: Sequence[_Known]) -> Sequence[Demand]:
        """Return the demands of the requests that the end of a session waits for, in order."""
        last = max(requests, key=lambda known: known.sent_s + known.answer_s, default=None)
        chain: list[Demand] = []
        while last is not None:
            chain.append(self._answer(least, last))
            last = requests[last.request.parent or 0] if last.waited else None
        return chain[::-1]

    def _answer(self, least: LeastTimes, known: _Known) -> Demand:
        tokens = known.prompt_tokens
        further = max(1, known.request.output_tokens) - 1
        cached_tokens = self._findable_tokens(known)
        return Demand(
            known.sent_s + known.answer_s,
            *self._prompt(least, known),
            further,
            known.answer_s - known.first_token_s,
            least.decode_work_s(tokens),
            least.decode_work_s(tokens + max(0, further - 1)),
            least.again_s(tokens, cached_tokens),
            least.prefill_work_s(tokens + 1, cached_tokens),
        )

    def _prompt(self, least: LeastTimes, known: _Known) -> tuple[float, float, float]:
        """Return the demand of a prompt: the second to fourth field of `Demand`."""
        tokens = known.prompt_tokens
        ever = self._reused_ever(known)
        own_s = least.prefill_work_s(tokens, ever)
        more_s = least.prefill_work_s(tokens, self._reused_tokens(known)) - own_s
        return own_s, more_s, max(0.0, known.others_s - known.sent_s - known.first_token_s)

    def _read(self, session: Session, first: int) -> list[_Known]:
        """Read the requests of a session, numbered from `first` on."""
        per_chunk = self._size // self._block_tokens
        live = LiveSession.of(0, session, 0.0)
        found: list[_Known] = []
        for index, request in enumerate(session.requests):
            chain = chunk_runs(request.blocks, per_chunk)
            kept = live.answered(index, self._block_tokens) if self._keep else None
            chains = chain, chain if kept is None else chunk_runs(kept, per_chunk)
            known = _Known(request, first + index, *chains)
            before = next(live.begins_with(index, self._block_tokens), None) if self._keep else None
            if before is not None:
                known.begun_tokens = self._findable_tokens(found[before])
            found.append(known)
        return found

    def _find_reuse(self) -> None:
        """Make step 1, without regard to the time at which others are sent."""
        uses = FirstUses(self._family.follows)
        for known in self._known:
            self._use(uses, known, 0.0)
        for known in self._known:
            found = uses.reusable(known.number, known.chain)
            known.reused = known.reused_ever = found.chunks

    def _most_saved(self) -> int:
        """Return the most prompt tokens that are not computed."""
        tokens = sum(map(self._reused_ever, self._known))
        if not self._keep:
            asked = ChunkSet()
            for known in self._known:
                asked.add(known.chain)
            tokens = min(tokens, (asked.total() - asked.distinct()) * self._size)
        return tokens

    def _limit_reuse_by_time(self) -> None:
        """Make step 2 for requests that are sent at a fixed time."""
        uses = FirstUses(self._family.follows)
        for known in sorted(self._known, key=lambda known: known.sent_s):
            self._use(uses, known, known.sent_s)
        for known in self._known:
            if known.request.parent is None:
                known.reused = uses.reusable(known.number, known.chain, -math.inf).chunks
                until_s = known.sent_s + self._first_token_s(known)
                found = uses.reusable(known.number, known.chain, until_s)
                known.reused, known.others_s = found

    def _use(self, uses: FirstUses, known: _Known, sent_s: float) -> None:
        uses.add(known.number, known.chain, sent_s)
        if known.kept is not known.chain:
            uses.add(known.number, known.kept, sent_s)

    def _find_times(self) -> None:
        """Make steps 2 to 4."""
        for session, found in self._sessions:
            begun_s = session.start_s or 0.0
            for known in found:
                request = known.request
                known.sent_s = begun_s + request.offset_s
                if request.parent is not None:
                    before = found[request.parent]
                    answered_s = before.sent_s + before.answer_s
                    known.waited = request.think_s is not None or answered_s >= known.sent_s
                    if known.waited:
                        known.sent_s = answered_s + (request.think_s or 0.0)
                known.first_token_s = self._first_token_s(known)
                known.answer_s = known.first_token_s + self._least.decoding_s(
                    known.prompt_tokens,
                    max(1, request.output_tokens),
                    self._findable_tokens(known),
                )

    def _first_token_s(self, known: _Known) -> float:
        return self._least.prefill_s(known.prompt_tokens, self._reused_tokens(known))

    def _reused_tokens(self, known: _Known) -> int:
        return max(known.begun_tokens, min(known.reused, self._cacheable(known)) * self._size)

    def _reused_ever(self, known: _Known) -> int:
        return max(known.begun_tokens, min(known.reused_ever, self._cacheable(known)) * self._size)

    def _cacheable(self, known: _Known) -> int:
        """Return the chunks of a prompt that an engine may find: all before its last token."""
        return (known.prompt_tokens - 1) // self._size

    def _findable_tokens(self, known: _Known) -> int:
        """Return the tokens of a prompt that an engine may find if this request computed them."""
        if self._workers == 1:
            return self._cacheable(known) * self._size
        return self._model.handoff_end(known.prompt_tokens)


ORACLES = {"oracle": False, "oracle+answers=kept": True}
"""The bound's names among policies; True: for policies with `answers=kept`."""


def oracle_result(
    policy: str, trace: Trace, fleet: FleetSpec, workload: Workload
) -> dict[str, Any]:
    """Return the bound as `SimulationResult.as_json` returns a policy's figures."""
    if workload.population is not None:
        raise ValueError("with a constant population, starts depend on the policy: no bound")
    sent = workload.trace(trace)
    chunk_tokens = chunk_tokens_of(trace, fleet, fleet.model)
    found = bound(sent, fleet, chunk_tokens, keep_answers=ORACLES[policy])
    return {
        "policy": policy,
        "workers": len(fleet.workers),
        "model": fleet.model_name,
        "trace": sent.source,
        "caveats": sent.caveats,
        "seed": workload.seed,
        "parameters": workload.parameters(),
        "figures": found.figures(),
    }
