"""Feeding the cost model: what the engine's own steps, loads and reads took.

The worker times steps that this side asks about; only steps of tracked requests, whose
tokens and contexts are known, can be learned from, and steps that only load. A step takes longer
than its forward: what sampling and the engine's own work add is what this side sees beyond it.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.messages import Load, StepMetadata, WorkerReport
from hetero_connector.engine.scheduler.requests import RequestTracker
from hetero_connector.planner.compute_model import StepMix, attention_work
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.spec import StateType
from hetero_connector.store.base import Store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_DECODE_STEPS_PER_SAMPLE = 16
"""Steps that only decode are much alike: few are timed."""
_MAX_AWAITED = 64
_MARGINS = 31


@dataclass
class _Asked:
    """A step whose timing was asked for."""

    new_tokens: int
    work: float
    """`attention_work`, summed over requests."""
    mix: StepMix
    load_bytes: Mapping[StateType, int]
    begun_s: float
    whole_s: float | None = None
    """From here and back; None until it is back."""


class CostLearner:
    """One per engine, on the scheduler's thread."""

    def __init__(
        self,
        costs: CostModel,
        layout: ArtifactLayout,
        store: Store,
        clock: Callable[[], float],
    ) -> None:
        self._costs = costs
        self._layout = layout
        self._store = store
        self._clock = clock
        self._margins_s = deque([0.0], _MARGINS)
        """What the last steps took beyond their forwards."""
        self._back_s = clock()
        """When the last step was back."""
        self._computing = False
        """Whether the last step computed anything."""
        self._asked: dict[int, _Asked] = {}
        self._step = 0

    def ask(
        self,
        output: SchedulerOutput,
        trackers: Mapping[str, RequestTracker],
        meta: StepMetadata,
    ) -> None:
        """Have this step timed, if it can teach something."""
        self._step += 1
        scheduled = output.num_scheduled_tokens
        self._learn_reads()  # what has arrived by now did so beside the steps before this one
        self._computing = bool(scheduled)
        decodes_only = output.total_num_scheduled_tokens == len(scheduled) and not meta.loads
        if not (scheduled or meta.loads):
            return
        if decodes_only and self._step % _DECODE_STEPS_PER_SAMPLE:
            return
        if any(request_id not in trackers for request_id in scheduled):
            return
        if meta.protected:  # the steps of a replay may load less than whole artifacts
            return
        work, mix = _work(scheduled, trackers)
        load_bytes = _bytes_by_type(self._layout, meta.loads)
        self._asked[self._step] = _Asked(
            output.total_num_scheduled_tokens, work, mix, load_bytes, self._clock()
        )
        meta.timed_as = self._step
        while len(self._asked) > _MAX_AWAITED:  # a step that never ran is never reported
            del self._asked[next(iter(self._asked))]

    def learn(self, report: WorkerReport) -> None:
        """Take over what the worker timed, and what the store read meanwhile."""
        now_s = self._clock()
        if report.ran is not None and (ran := self._asked.get(report.ran)):
            # A step that was scheduled ahead began when the one before it was back.
            ran.whole_s = now_s - max(ran.begun_s, self._back_s)
        self._back_s = now_s
        for timing in report.timings:
            asked = self._asked.pop(timing.step, None)
            if asked is None:
                continue
            if asked.whole_s is not None and not asked.load_bytes:
                self._margins_s.append(max(0.0, asked.whole_s - timing.forward_s))
            self._costs.load.observe(Tier.DRAM, asked.load_bytes, timing.load_s)
            if not asked.new_tokens:  # a parked load on an engine with nothing else to do
                continue
            step_s = timing.forward_s + median_low(self._margins_s)
            self._costs.compute.observe_work(asked.new_tokens, asked.work, step_s)
            self._costs.interference.observe(asked.mix, step_s)

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


def _work(
    scheduled: Mapping[str, int], trackers: Mapping[str, RequestTracker]
) -> tuple[float, StepMix]:
    """`attention_work` of a step, summed over requests, and what it is made of."""
    decode_work = prefill_work = 0.0
    prefill_tokens = decodes = context_tokens = 0
    for request_id, new_tokens in scheduled.items():
        request = trackers[request_id].request
        computed = request.num_computed_tokens
        work = attention_work(new_tokens, computed)
        if computed >= request.num_prompt_tokens:
            decode_work += work
            decodes += 1
            context_tokens += computed
        else:
            prefill_work += work
            prefill_tokens += new_tokens
    mix = StepMix(prefill_tokens, prefill_work, decodes, context_tokens)
    return prefill_work + decode_work, mix


def _bytes_by_type(layout: ArtifactLayout, loads: Iterable[Load]) -> dict[StateType, int]:
    """Useful bytes of all ranks, who copy side by side. All but a span's last are of one size."""
    sizes: defaultdict[StateType, int] = defaultdict(int)
    for load in loads:
        for span in load.spans:
            kind, chunks = span.state_type, len(span.offsets)
            last = span.start + (chunks - 1) * span.chunk_tokens
            first_end = min(span.start + span.chunk_tokens, span.end)
            size = (chunks - 1) * layout.artifact_bytes(kind, span.start, first_end)
            sizes[kind] += size + layout.artifact_bytes(kind, last, span.end)
    return dict(sizes)
