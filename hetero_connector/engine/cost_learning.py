"""Feeding the cost model: what the engine's own steps, loads and reads took.

The worker times steps that this side asks about; only steps of tracked requests, whose
tokens and contexts are known, can be learned from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.record import Tier
from hetero_connector.engine.messages import Load, StepMetadata, StepTiming
from hetero_connector.engine.requests import RequestTracker
from hetero_connector.planner.compute_model import attention_work
from hetero_connector.planner.cost_model import CostModel
from hetero_connector.spec import StateType
from hetero_connector.store.base import Store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

_DECODE_STEPS_PER_SAMPLE = 16
"""Steps that only decode are much alike: few are timed."""
_MAX_AWAITED = 64


class _Asked(NamedTuple):
    """A step whose timing was asked for."""

    new_tokens: int
    work: float
    """`attention_work`, summed over requests."""
    load_bytes: Mapping[StateType, int]


class CostLearner:
    """One per engine, on the scheduler's thread."""

    def __init__(self, costs: CostModel, layout: ArtifactLayout, store: Store) -> None:
        self._costs = costs
        self._layout = layout
        self._store = store
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
        decodes_only = output.total_num_scheduled_tokens == len(scheduled) and not meta.loads
        if not scheduled or (decodes_only and self._step % _DECODE_STEPS_PER_SAMPLE):
            return
        if any(request_id not in trackers for request_id in scheduled):
            return
        if meta.protected:  # the steps of a replay may load less than whole artifacts
            return
        work = 0.0
        for request_id, new_tokens in scheduled.items():
            work += attention_work(new_tokens, trackers[request_id].request.num_computed_tokens)
        load_bytes = _bytes_by_type(self._layout, meta.loads)
        self._asked[self._step] = _Asked(output.total_num_scheduled_tokens, work, load_bytes)
        meta.timed_as = self._step
        while len(self._asked) > _MAX_AWAITED:  # a step that never ran is never reported
            del self._asked[next(iter(self._asked))]

    def learn(self, timings: Iterable[StepTiming]) -> None:
        """Take over what the worker timed, and what the store read meanwhile."""
        for timing in timings:
            asked = self._asked.pop(timing.step, None)
            if asked is None:
                continue
            if asked.load_bytes:
                self._costs.load.observe(Tier.DRAM, asked.load_bytes, timing.load_s)
            else:
                self._costs.compute.observe_work(asked.new_tokens, asked.work, timing.forward_s)
        for read in self._store.take_timings():
            self._costs.load.observe(read.tier, read.bytes_by_type, read.seconds, read.ahead_bytes)


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
