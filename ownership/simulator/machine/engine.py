"""A simulated engine: continuous batching with chunked prefill.

It schedules as vLLM does. Running decodes take one token each; the rest of a step's tokens goes to
prefills in the order of their admission; a request is admitted while tokens and pages last. If
pages run out, the request admitted last is preempted and computed again.

Without a prefill nothing changes until a decode ends, so all steps up to there are one event. A
request that arrives meanwhile waits for the end of the current step.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from hetero_connector.planner.cost_model import CostModel
from hetero_connector.planner.pricing import EngineLoad
from ownership.simulator.clock import EventLoop
from ownership.simulator.machine.admission import Admitted, DecodePages, RequestAdmission
from ownership.simulator.machine.request import LiveRequest
from ownership.simulator.machine.staging import SsdRead
from ownership.simulator.machine.token_gaps import TokenGaps
from ownership.simulator.state.memory import WorkerMemory

_MAX_STEPS = 256
"""Decode steps in one event; pages for all of them are taken at its start."""


class EngineLimits(NamedTuple):
    """vLLM's `max_num_batched_tokens`, `max_num_seqs` and `prefix_cache_retention_interval`."""

    step_tokens: int = 8192
    max_running: int = 256
    retention_interval: int | None = 0
    """In tokens; see `Retention`."""


@dataclass
class EngineTotals:
    """Sums over everything that an engine did."""

    busy_s: float = 0.0
    decode_s: float = 0.0
    """Seconds of the steps of all decoded tokens."""
    late_s: float = 0.0
    """Seconds by which prefills in the same steps delayed decodes."""
    exposed_s: float = 0.0
    """Seconds of loading from DRAM to pages that compute did not hide."""
    preemptions: int = 0
    resident_byte_s: float = 0.0
    """Bytes of pages of running requests, times the seconds they were held."""
    resident_s: float = 0.0
    gaps: TokenGaps = field(default_factory=TokenGaps)

    def since(self, before: EngineTotals) -> EngineTotals:
        """Return what was done after a copy was made."""
        return EngineTotals(
            self.busy_s - before.busy_s,
            self.decode_s - before.decode_s,
            self.late_s - before.late_s,
            self.exposed_s - before.exposed_s,
            self.preemptions - before.preemptions,
            self.resident_byte_s - before.resident_byte_s,
            self.resident_s - before.resident_s,
            self.gaps.since(before.gaps),
        )


class StepTimes:
    """Durations of steps, by the planner's own coefficients."""

    def __init__(self, costs: CostModel) -> None:
        self._compute = costs.compute.coefficients
        self._delays = costs.delays()
        self._launch_s = self._compute.step_s
        self._num_steps = costs.num_steps
        self.overhead = costs.overhead
        """Seconds of each request besides its steps."""

    def prefill_s(self, tokens: int, work: float) -> float:
        """Return the seconds of a step without decodes. `work`: its `attention_work`."""
        step_s, token_s, attention_s = self._compute
        return step_s + token_s * tokens + attention_s * work

    def delay_s(self, tokens: int, work: float, decodes: int) -> float:
        """Return the seconds by which a prefill makes a step of so many decodes longer."""
        return self._delays.delay_s(tokens, work, 1.0)

    def decode_step_s(self, decodes: int, context_tokens: float) -> float:
        """Return the seconds of a step without a prefill; linear in the context tokens."""
        return self._delays.decode_step_s(decodes, context_tokens)

    def decode_s(self, decodes: int, context_tokens: int, steps: int = 1) -> float:
        """Return the seconds of consecutive steps; each adds a token to every context."""
        one_s = self.decode_step_s(decodes, context_tokens)
        grown = self._delays.context_s * decodes * (steps * (steps - 1) / 2)
        return steps * one_s + grown

    def alone_s(self, prompt_tokens: int, reused_tokens: int, output_tokens: int) -> float:
        """Return the seconds of a request on an idle engine, whose first tokens need no work."""
        tokens = max(1, prompt_tokens - reused_tokens)
        steps = max(1, self._num_steps(tokens))
        work = tokens * (prompt_tokens - tokens / 2)
        seconds = self.prefill_s(tokens, work) + (steps - 1) * self._launch_s
        seconds += self.overhead.delay_s(prompt_tokens) + self.overhead.blocking_s(prompt_tokens)
        return seconds + self.decode_s(1, prompt_tokens, output_tokens - 1)

    def decode_steps_until(self, decodes: int, context_tokens: int, elapsed_s: float) -> int:
        """Return the fewest steps, at least 1, that take `elapsed_s` or longer."""
        half_s = self._delays.context_s * decodes / 2
        one_s = self.decode_step_s(decodes, context_tokens) - half_s
        if half_s > 0.0:
            root = math.sqrt(one_s * one_s + 4.0 * half_s * elapsed_s)
            steps = (root - one_s) / (2.0 * half_s)
        else:
            steps = elapsed_s / one_s if one_s > 0.0 else 1.0
        found = max(1, math.ceil(steps))
        if found > 1 and self.decode_s(decodes, context_tokens, found - 1) >= elapsed_s:
            found -= 1  # rounded up past an exact answer
        return found


class StepRecord(NamedTuple):
    """Successive steps of an engine, as one event."""

    begin_s: float
    end_s: float
    steps: int
    prefill_tokens: int
    decodes: int
    load_s: float
    """Seconds of loading from DRAM to pages at the same time."""


class _DecodeEvent(NamedTuple):
    """Steps of decodes alone, as one event."""

    begun_s: float
    steps: int
    decodes: int
    context_tokens: int


@dataclass
class BatchEngine:
    """The engine of one worker. It calls `on_prefilled` and `on_finished` for each request."""

    loop: EventLoop
    times: StepTimes
    memory: WorkerMemory
    admission: RequestAdmission
    limits: EngineLimits
    on_prefilled: Callable[[LiveRequest], None]
    on_finished: Callable[[LiveRequest], None]
    totals: EngineTotals = field(default_factory=EngineTotals)
    waiting: deque[LiveRequest] = field(default_factory=deque)
    prefilling: list[LiveRequest] = field(default_factory=list)
    context_tokens: int = 0
    """Tokens of all running decodes."""
    queued_tokens: int = 0
    """Prompt tokens not computed yet."""
    staging: int = 0
    """Requests whose state is being read from SSD. They wait, too."""
    residence_s: float = 0.0
    """Mean seconds for which recent requests held their pages."""
    on_step: Callable[[StepRecord], None] | None = None

    def __post_init__(self) -> None:
        self._decodes: list[tuple[int, int, LiveRequest]] = []
        """A heap by the step after which each ends, then by order of joining."""
        self._steps_done = self._joined = self._announced = 0
        self._scheduling_s = 0.0
        """Seconds of scheduling requests admitted since the last step, which block the engine."""
        self._is_busy = False
        self._decode_event: _DecodeEvent | None = None
        self._mixed_s = 0.0
        """Seconds of the current step, if it has prefills; and bytes of its window pages."""
        self._step_bytes = 0
        self._load_s = 0.0
        self._pages = DecodePages(self.memory.shape.page_tokens)
        self._layers = self.memory.shape.footprint.num_layers

    @property
    def running_decodes(self) -> int:
        """Number of requests that are being decoded."""
        return len(self._decodes)

    def submit(self, request: LiveRequest) -> None:
        """Queue a request."""
        request.queued_s = self.loop.now_s
        self.waiting.append(request)
        self.queued_tokens += request.expected_tokens
        self._wake(is_next=len(self.waiting) == 1)

    def _wake(self, *, is_next: bool) -> None:
        """Begin a step if none is under way. `is_next`: a queued request is to begin after it."""
        if not self._is_busy:
            self._begin()
        elif self._decode_event is not None and is_next:
            self._cut_short(self._decode_event)

    def _begin(self) -> None:
        """Admit requests and begin the next step, if there is one."""
        self._admit()
        self._is_busy = bool(self.prefilling or self._decodes)
        if self.prefilling:
            self._begin_mixed()
        elif self._decodes:
            self._begin_decodes()

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
            load = EngineLoad(0, len(self._decodes), decoded_context=self.context_tokens)
            outcome = self.admission.admit(request, now_s, load, self._begin_read)
            if outcome is Admitted.NO_PAGES:
                return
            self.waiting.popleft()
            if outcome is Admitted.STAGING:
                self.staging += 1
            else:
                self.prefilling.append(request)
                self._scheduling_s += self.times.overhead.blocking_s(request.prompt_tokens)
                rest = request.total - request.computed
                self.queued_tokens += rest - request.expected_tokens
                request.expected_tokens = rest
                left -= rest

    def _begin_read(self, read: SsdRead) -> None:
        self.loop.at(read.end_s, self._on_staged, read)

    def _on_staged(self, read: SsdRead) -> None:
        """Queue the requests whose state has been read from SSD, before all others."""
        requests = self.admission.end_read(read)
        self.staging -= len(requests)
        for request in reversed(requests):
            request.queued_s = self.loop.now_s
            self.waiting.appendleft(request)
        if requests:
            self._wake(is_next=True)

    def _begin_mixed(self) -> None:
        """Begin a step with prefills."""
        while not self.admission.grow(self._pages, self._steps_done, 1):
            self._preempt()
            if not self.prefilling:
                return self._begin_decodes()
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
            late_s = self.times.delay_s(tokens, work, decodes)
            compute_s = self.times.decode_s(decodes, self.context_tokens) + late_s
            self.totals.late_s += decodes * (scheduling_s + late_s)
        else:
            compute_s = self.times.prefill_s(tokens, work)
        seconds = compute_s
        if load_s:  # layer-wise, in parallel with the forward pass except for the first layer
            seconds = max(compute_s, load_s) + load_s / self._layers
            self.totals.exposed_s += seconds - compute_s
        self._step_bytes = self.admission.take_step_pages(tokens)
        self._mixed_s, self._load_s = scheduling_s + seconds, load_s
        self._announce_end(self._mixed_s)

    def _begin_decodes(self) -> None:
        """Begin as many steps without prefills as can be one event."""
        decodes = len(self._decodes)
        wanted = min(self._decodes[0][0] - self._steps_done, _MAX_STEPS)
        while not (steps := self.admission.grow(self._pages, self._steps_done, wanted)):
            self._preempt()
            decodes = len(self._decodes)
            assert decodes, "a request by itself has the pages it was admitted for"
        self._decode_event = _DecodeEvent(self.loop.now_s, steps, decodes, self.context_tokens)
        self._announce_end(self.times.decode_s(decodes, self.context_tokens, steps))

    def _cut_short(self, event: _DecodeEvent) -> None:
        """End the steps of an event with the current one."""
        begun_s, steps, decodes, context = event
        done = self.times.decode_steps_until(decodes, context, self.loop.now_s - begun_s)
        if done < steps:
            self.admission.shrink(self._pages, self._steps_done + done, steps - done)
            self._decode_event = event._replace(steps=done)
            end_s = begun_s + self.times.decode_s(decodes, context, done)
            self._announce_end(max(end_s, self.loop.now_s) - self.loop.now_s)

    def _announce_end(self, seconds: float) -> None:
        """End the current event then; an end announced before does not happen any more."""
        self._announced += 1
        self.loop.at(self.loop.now_s + seconds, self._on_end, self._announced)

    def _on_end(self, number: int) -> None:
        if number != self._announced:
            return
        event, self._decode_event = self._decode_event, None
        decodes = len(self._decodes)
        steps = event.steps if event else 1
        seconds = self.loop.now_s - event.begun_s if event else self._mixed_s
        self.totals.busy_s += seconds
        if self.on_step is not None:
            self._report_step(self.on_step, steps, seconds, is_mixed=event is None)
        if decodes:
            self.totals.decode_s += decodes * seconds
            self.totals.gaps.add(seconds / steps, decodes * steps)
            self._steps_done += steps
            self.context_tokens += decodes * steps
            while self._decodes and self._decodes[0][0] <= self._steps_done:
                self._finish(heapq.heappop(self._decodes)[2])
        if event is None:
            self.admission.free_step_pages(self._step_bytes)
            self._end_prefills()
        self._begin()

    def _report_step(
        self, report: Callable[[StepRecord], None], steps: int, seconds: float, *, is_mixed: bool
    ) -> None:
        tokens = sum(x.step_tokens for x in self.prefilling) if is_mixed else 0
        end_s, load_s = self.loop.now_s, self._load_s if is_mixed else 0.0
        report(StepRecord(end_s - seconds, end_s, steps, tokens, len(self._decodes), load_s))

    def _end_prefills(self) -> None:
        left = []
        for request in self.prefilling:
            request.computed += request.step_tokens
            self.queued_tokens -= request.step_tokens
            request.step_tokens = 0
            if request.computed < request.total:
                left.append(request)
            else:
                self._end_prefill(request)
        self.prefilling = left

    def _end_prefill(self, request: LiveRequest) -> None:
        if request.generated:
            self.totals.gaps.add(self.loop.now_s - request.preempted_s, 1)
        self.admission.cache_prompt(request)
        self.on_prefilled(request)
        remaining = request.output_tokens - request.generated - 1
        if request.decodes_elsewhere or remaining <= 0:
            self._leave(request, request.computed)
            return
        self._joined += 1
        request.finish_step = self._steps_done + remaining
        heapq.heappush(self._decodes, (request.finish_step, self._joined, request))
        self._pages.add(request.computed, self._steps_done)
        self.context_tokens += request.computed

    def _finish(self, request: LiveRequest) -> None:
        tokens = request.prompt_tokens + request.output_tokens - 1
        self.context_tokens -= tokens
        self._pages.remove(tokens, self._steps_done)
        self._leave(request, tokens)

    def _leave(self, request: LiveRequest, tokens: int) -> None:
        """End a request that holds pages for `tokens` tokens."""
        self.admission.end(request, tokens)
        held_s = self.loop.now_s - request.admitted_s
        self.totals.resident_s += held_s
        self.totals.resident_byte_s += held_s * self.memory.shape.request_bytes(tokens)
        self.residence_s += 0.05 * (held_s - self.residence_s)
        self.on_finished(request)

    def _preempt(self) -> None:
        """Free the pages of the request that was admitted last; it is computed again."""
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
            request.preempted_s = self.loop.now_s
            tokens = request.prompt_tokens + request.generated - 1
            self.context_tokens -= tokens
            self._pages.remove(tokens, self._steps_done)
        self.admission.free_pages(request, tokens)
        request.expected_tokens = request.prompt_tokens + request.generated
        self.queued_tokens += request.expected_tokens
        request.queued_s = self.loop.now_s
        self.waiting.appendleft(request)
