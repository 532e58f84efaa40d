"""An engine: continuous batching with chunked prefill, one event for each step that matters.

As vLLM schedules: running decodes take one token each, what is left of a step's tokens goes to
prefills in the order they were admitted, and a request is admitted while tokens and pages last.
Without a prefill nothing changes until a decode ends, so the steps up to there are one event; a
request that comes meanwhile waits for the end of the step under way. Without pages the request
admitted last is preempted and computed again.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.admission import Admission, Verdict
from ownership.simulator.machine.decode_pages import DecodePages
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.steps import StepTimes
from ownership.simulator.state.memory import WorkerMemory
from ownership.simulator.state.runs import Run

_MOST_STEPS = 256
"""Of decodes in one event: pages are taken for so many at once."""


class EngineLimits(NamedTuple):
    """vLLM's `max_num_batched_tokens`, `max_num_seqs` and `prefix_cache_retention_interval`."""

    step_tokens: int = 8192
    max_running: int = 256
    retention_interval: int | None = 0
    """Tokens; see `Retention`."""


@dataclass
class EngineTotals:
    """What an engine did."""

    busy_s: float = 0.0
    prefilled_tokens: int = 0
    decoded_tokens: int = 0
    decode_s: float = 0.0
    """Of all decoded tokens: how long their steps took."""
    late_s: float = 0.0
    """By which decodes were late because of prefills beside them, all together."""
    exposed_s: float = 0.0
    """Of loading from DRAM to pages: what no compute hid."""
    preemptions: int = 0
    most_running: int = 0
    resident_byte_s: float = 0.0
    """Pages of running requests over the time they were held."""
    resident_s: float = 0.0


class _Decoding(NamedTuple):
    """Steps of decodes alone, as one event."""

    begun_s: float
    steps: int
    decodes: int
    context_tokens: int


@dataclass
class BatchEngine:
    """One worker's engine. `prefilled` and `finished` are told of requests as it happens."""

    loop: EventLoop
    times: StepTimes
    memory: WorkerMemory
    admission: Admission
    limits: EngineLimits
    prefilled: Callable[[LiveRequest], None]
    finished: Callable[[LiveRequest], None]
    worked: Callable[[float], None]
    """Told the seconds of every step."""
    totals: EngineTotals = field(default_factory=EngineTotals)
    waiting: deque[LiveRequest] = field(default_factory=deque)
    prefilling: list[LiveRequest] = field(default_factory=list)
    context_tokens: int = 0
    """Of running decodes."""
    queued_tokens: int = 0
    """Prompt tokens not computed yet."""
    residence_s: float = 0.0
    """For which requests hold their pages lately."""

    def __post_init__(self) -> None:
        self._decodes: list[tuple[int, int, LiveRequest]] = []
        """By the step after which they end."""
        self._steps_done = self._joined = self._stamp = 0
        self._scheduling_s = 0.0
        """Of requests admitted since the last step: the engine is held up by it."""
        self._staged_for: dict[LiveRequest, Run | None] = {}
        """What is being read from SSD: for whom, and what is pinned meanwhile."""
        self._crashes = 0
        self._busy = False
        self._alone: _Decoding | None = None
        self._pages = DecodePages(self.memory.shape.page_tokens)
        self._layers = self.memory.shape.footprint.num_layers

    @property
    def running_decodes(self) -> int:
        """Requests that are being decoded."""
        return len(self._decodes)

    def submit(self, request: LiveRequest, *, first: bool = False) -> None:
        """Queue a request; `first`: before all others, as one whose state has been staged."""
        request.queued_s = self.loop.now_s
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
            self.queued_tokens += request.expected_tokens
        if not self._busy:
            self._begin()
        elif self._alone is not None and (first or len(self.waiting) == 1):
            self._cut_short(self._alone)

    def crash(self) -> list[LiveRequest]:
        """Everything under way is lost; the requests it was for, in no state that matters."""
        decoding = [request for *_, request in self._decodes]
        lost = [*self.waiting, *self._staged_for, *self.prefilling, *decoding]
        self.waiting.clear()
        self._staged_for.clear()
        self.prefilling, self._decodes = [], []
        self._pages = DecodePages(self.memory.shape.page_tokens)
        self.context_tokens = self.queued_tokens = 0
        self._scheduling_s = 0.0
        self._busy, self._alone = False, None
        self._stamp += 1  # whatever was announced does not happen
        self._crashes += 1
        return lost

    def _begin(self) -> None:
        self._admit()
        self._busy = bool(self.prefilling or self._decodes)
        if self.prefilling:
            self._begin_mixed()
        elif self._decodes:
            self._begin_alone()

    def _admit(self) -> None:
        if not self.waiting:
            return
        now_s, limits = self.loop.now_s, self.limits
        left = limits.step_tokens - len(self._decodes)
        left -= sum(r.total - r.computed for r in self.prefilling)
        while self.waiting and left > 0:
            if len(self.prefilling) + len(self._decodes) >= limits.max_running:
                return
            request = self.waiting[0]
            verdict = self.admission.admit(request, now_s, len(self._decodes), self._staging)
            if verdict is Verdict.NO_PAGES:
                return
            self.waiting.popleft()
            if verdict is Verdict.ADMITTED:
                self.prefilling.append(request)
                self._scheduling_s += self.times.overhead.blocking_s(request.prompt_tokens)
                running = len(self.prefilling) + len(self._decodes)
                self.totals.most_running = max(self.totals.most_running, running)
                rest = request.total - request.computed
                self.queued_tokens += rest - request.expected_tokens
                request.expected_tokens = rest
                left -= rest

    def _staging(self, request: LiveRequest, end_s: float, pinned: Run | None) -> None:
        self._staged_for[request] = pinned
        self.loop.at(end_s, self._staged, request, self._crashes)

    def _staged(self, request: LiveRequest, crashes: int) -> None:
        if crashes != self._crashes:
            return
        pinned = self._staged_for.pop(request)
        if pinned is not None:
            self.memory.dram.unpin(pinned)
        self.submit(request, first=True)

    def _begin_mixed(self) -> None:
        while not self.admission.grow(self._pages, self._steps_done, 1):
            self._preempt()
            if not self.prefilling:
                return self._begin_alone()
        decodes, tokens, work, load_s = len(self._decodes), 0, 0.0, 0.0
        left = max(1, self.limits.step_tokens - decodes)
        for request in self.prefilling:
            count = min(left, request.total - request.computed)
            request.step_tokens = count
            if not count:
                break
            work += count * (request.computed + count / 2)
            load_s += request.load_s
            request.load_s = 0.0
            tokens += count
            left -= count
        scheduling_s, self._scheduling_s = self._scheduling_s, 0.0
        if decodes:
            late_s = self.times.delay_s(tokens, work)
            compute_s = self.times.decode_s(decodes, self.context_tokens) + late_s
            self.totals.late_s += decodes * (scheduling_s + late_s)
        else:
            compute_s = self.times.prefill_s(tokens, work)
        seconds = compute_s
        if load_s:  # layer by layer beside the forward pass, but for the first layer
            seconds = max(compute_s, load_s) + load_s / self._layers
            self.totals.exposed_s += seconds - compute_s
        self.totals.prefilled_tokens += tokens
        self._step_bytes = self.admission.hold_step(tokens)
        self._announce(scheduling_s + seconds)

    def _begin_alone(self) -> None:
        decodes = len(self._decodes)
        wanted = min(self._decodes[0][0] - self._steps_done, _MOST_STEPS)
        while not (steps := self.admission.grow(self._pages, self._steps_done, wanted)):
            self._preempt()
            decodes = len(self._decodes)
            assert decodes, "a request alone has the pages that it was let in for"
        self._alone = _Decoding(self.loop.now_s, steps, decodes, self.context_tokens)
        self._announce(self.times.decode_s(decodes, self.context_tokens, steps))

    def _cut_short(self, alone: _Decoding) -> None:
        """Let the steps of decodes alone end with the one under way."""
        begun_s, steps, decodes, context = alone
        done = self.times.decode_steps_until(decodes, context, self.loop.now_s - begun_s)
        if done < steps:
            self.admission.shrink(self._pages, self._steps_done + done, steps - done)
            self._alone = alone._replace(steps=done)
            end_s = begun_s + self.times.decode_s(decodes, context, done)
            self._announce(max(end_s, self.loop.now_s) - self.loop.now_s)

    def _announce(self, seconds: float) -> None:
        self._stamp += 1
        self.loop.at(self.loop.now_s + seconds, self._ended, self._stamp)
        if self._alone is None:
            self._mixed_s = seconds

    def _ended(self, stamp: int) -> None:
        if stamp != self._stamp:
            return  # cut short meanwhile
        alone, self._alone = self._alone, None
        decodes = len(self._decodes)
        steps = alone.steps if alone else 1
        seconds = self.loop.now_s - alone.begun_s if alone else self._mixed_s
        self.totals.busy_s += seconds
        self.worked(seconds)
        if decodes:
            self.totals.decode_s += decodes * seconds
            self.totals.decoded_tokens += decodes * steps
            self._steps_done += steps
            self.context_tokens += decodes * steps
            while self._decodes and self._decodes[0][0] <= self._steps_done:
                self._finish(heapq.heappop(self._decodes)[2])
        if alone is None:
            self.admission.release_step(self._step_bytes)
            self._end_prefills()
        self._begin()

    def _end_prefills(self) -> None:
        left = []
        for request in self.prefilling:
            request.computed += request.step_tokens
            self.queued_tokens -= request.step_tokens
            request.step_tokens = 0
            if request.computed < request.total:
                left.append(request)
            else:
                self._prefilled(request)
        self.prefilling = left

    def _prefilled(self, request: LiveRequest) -> None:
        self.admission.prefilled(request)
        self.prefilled(request)
        remaining = request.output_tokens - request.generated - 1
        if request.decodes_elsewhere or remaining <= 0:
            self._let_go(request, request.computed)
            self.finished(request)
            return
        self._joined += 1
        request.finish_step = self._steps_done + remaining
        heapq.heappush(self._decodes, (request.finish_step, self._joined, request))
        self._pages.join(request.computed, self._steps_done)
        self.context_tokens += request.computed

    def _finish(self, request: LiveRequest) -> None:
        tokens = request.prompt_tokens + request.output_tokens - 1
        self.context_tokens -= tokens
        self._pages.leave(tokens, self._steps_done)
        self._let_go(request, tokens)
        self.finished(request)

    def _let_go(self, request: LiveRequest, tokens: int) -> None:
        self.admission.ended(request, tokens)
        held_s = self.loop.now_s - request.admitted_s
        self.totals.resident_s += held_s
        self.totals.resident_byte_s += held_s * self.memory.shape.request_bytes(tokens)
        self.residence_s += 0.05 * (held_s - self.residence_s)

    def _preempt(self) -> None:
        """Take the pages of the request that was admitted last; it is computed again."""
        self.totals.preemptions += 1
        if self.prefilling:
            request = self.prefilling.pop()
            self.queued_tokens -= request.total - request.computed
            tokens = request.total
        else:
            at = max(range(len(self._decodes)), key=lambda i: self._decodes[i][1])
            finish_step, _, request = self._decodes.pop(at)
            heapq.heapify(self._decodes)
            request.generated = request.output_tokens - (finish_step - self._steps_done)
            tokens = request.prompt_tokens + request.generated - 1
            self.context_tokens -= tokens
            self._pages.leave(tokens, self._steps_done)
        self.admission.let_go(request, tokens)
        request.preemptions += 1
        request.expected_tokens = request.prompt_tokens + request.generated
        self.queued_tokens += request.expected_tokens
        request.queued_s = self.loop.now_s
        self.waiting.appendleft(request)
