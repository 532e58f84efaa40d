"""Feed the cost model with the measured times of steps, loads and reads.

The worker times the steps that this side chooses: steps in which every request is tracked, so that
their tokens and contexts are known, and steps that only load. A step takes longer than its forward.
The difference (sampling and the engine's own work) is measured on this side.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.containers import BoundedDict
from hetero_connector.engine.messages import Load, StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.planner.compute_model import StepMix, attention_work
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.spec import StateType
from hetero_connector.store.artifact_store import ArtifactStore

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_DECODE_STEPS_PER_SAMPLE = 16
"""Steps that only decode are much alike, so few of them are timed."""
_MAX_UNREPORTED = 64
"""A step that never ran is never reported."""
_MARGINS = 31


@dataclass
class _TimedStep:
    """A step that the workers time."""

    mix: StepMix
    load_bytes: Mapping[StateType, int]
    begun_s: float
    total_s: float | None = None
    """Seconds from its order to its report; None before the report."""


class CostLearner:
    """Chooses the steps to time and learns from their reports. Used on the scheduler's thread."""

    def __init__(
        self,
        costs: CostModel,
        layout: ArtifactLayout,
        store: ArtifactStore,
        clock: Callable[[], float],
    ) -> None:
        self._costs = costs
        self._layout = layout
        self._store = store
        self._clock = clock
        self._margins_s = deque([0.0], _MARGINS)
        """Seconds that the last steps took beyond their forwards."""
        self._last_report_s = clock()
        self._computing = False
        """True if the last step computed anything."""
        self._timed = BoundedDict[int, _TimedStep](_MAX_UNREPORTED)
        self._step = 0

    def request_timing(
        self,
        output: SchedulerOutput,
        trackers: Mapping[str, RequestTracker],
        meta: StepMetadata,
    ) -> None:
        """Order this step to be timed, if the cost model can learn from it."""
        self._step += 1
        scheduled = output.num_scheduled_tokens
        self._learn_reads()  # reads that have ended by now ran while the steps before computed
        self._computing = bool(scheduled)
        drafted = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        computed = output.total_num_scheduled_tokens - drafted
        decodes_only = computed == len(scheduled) and not meta.loads
        if not (scheduled or meta.loads):
            return
        if decodes_only and self._step % _DECODE_STEPS_PER_SAMPLE:
            return
        if any(request_id not in trackers for request_id in scheduled):
            return
        if meta.protected:  # steps of a replay may load only parts of artifacts
            return
        load_bytes = _bytes_by_type(self._layout, meta.loads)
        self._timed[self._step] = _TimedStep(
            _step_mix(scheduled, trackers), load_bytes, self._clock()
        )
        meta.timed_as = self._step

    def on_report(self, report: WorkerReport) -> None:
        """Learn from the timings of a report."""
        now_s = self._clock()
        if report.timed_step is not None and (step := self._timed.get(report.timed_step)):
            # With async scheduling a step is ordered before the one before it has been reported.
            step.total_s = now_s - max(step.begun_s, self._last_report_s)
        self._last_report_s = now_s
        for timing in report.timings:
            timed = self._timed.pop(timing.step, None)
            if timed is None:
                continue
            if timed.total_s is not None and not timed.load_bytes:
                self._margins_s.append(max(0.0, timed.total_s - timing.forward_s))
            self._costs.load.observe(Tier.DRAM, timed.load_bytes, timing.load_s)
            self._learn_step(timed.mix, timing.forward_s + median_low(self._margins_s))

    def _learn_step(self, mix: StepMix, step_s: float) -> None:
        """Learn from a step's computing. Without effect on one that only loads."""
        costs = self._costs
        costs.interference.observe(mix, step_s)
        # A decode reads its context from memory, where a prefill computes on it: its time per
        # context token, taken for attention, would make prefills over long contexts look slow.
        learned = costs.interference.coefficients
        decoding_s = learned.decode_step_s(mix.decodes, mix.context_tokens) - learned.step_s
        costs.compute.observe_work(mix.prefill_tokens, mix.prefill_work, step_s - decoding_s)

    def _learn_reads(self) -> None:
        for read in self._store.take_timings():
            self._costs.load.observe(
                read.tier,
                read.bytes_by_type,
                read.seconds,
                read.ahead_bytes,
                while_computing=self._computing,
                at_least=not read.whole,
            )


def _step_mix(scheduled: Mapping[str, int], trackers: Mapping[str, RequestTracker]) -> StepMix:
    """Return the work of a step of these requests and tokens."""
    work = 0.0
    prefill_tokens = decodes = context_tokens = 0
    for request_id, new_tokens in scheduled.items():
        tracker = trackers[request_id]
        computed = tracker.request.num_computed_tokens
        if computed >= tracker.decodes_from:
            decodes += 1
            context_tokens += computed
        else:
            work += attention_work(new_tokens, computed)
            prefill_tokens += new_tokens
    return StepMix(prefill_tokens, work, decodes, context_tokens)


def _bytes_by_type(layout: ArtifactLayout, loads: Iterable[Load]) -> dict[StateType, int]:
    """Return the loaded bytes of all ranks, without padding, by state type."""
    sizes: defaultdict[StateType, int] = defaultdict(int)
    for load in loads:
        for span in load.spans:
            # All chunks of a span but the last have one size.
            kind, chunks = span.state_type, len(span.offsets)
            last = span.start + (chunks - 1) * span.chunk_tokens
            first_end = min(span.start + span.chunk_tokens, span.end)
            size = (chunks - 1) * layout.artifact_bytes(kind, span.start, first_end)
            sizes[kind] += size + layout.artifact_bytes(kind, last, span.end)
    return dict(sizes)
