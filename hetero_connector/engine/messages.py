"""The messages between the scheduler side and the worker side, one of each per engine step.

They are pickled when workers run in processes of their own, so they hold plain values: no tensors,
no store objects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from hetero_connector.spec import StateType


@dataclass(frozen=True)
class Blocks:
    """A range of one request's block table, in one KV cache group.

    `ids[i]` is the engine's block for page `first_page + i`. Pages outside the range, and null
    blocks (id 0), must not be touched.
    """

    first_page: int
    ids: list[int]


class ArtifactCopy(NamedTuple):
    """One artifact's place in the arena. It is a named tuple: a long prompt has thousands."""

    state_type: StateType
    start: int
    end: int
    offset: int
    """Byte offset in the arena; rank 0's share comes first."""


@dataclass(frozen=True)
class PageCopy:
    """Artifacts of one request and the pages that they are copied to or from.

    `blocks` is by (state type, KV cache group); one entry spans all artifacts of that state type.
    """

    artifacts: list[ArtifactCopy]
    blocks: dict[tuple[StateType, int], Blocks]


class ArtifactSpan(NamedTuple):
    """Artifacts of one state type over the successive chunks of tokens [start, end)."""

    state_type: StateType
    start: int
    end: int
    chunk_tokens: int
    offsets: Sequence[int]
    """Byte offset of each chunk's artifact in the arena; only the last chunk may be shorter."""

    def artifacts(self) -> Iterator[ArtifactCopy]:
        for index, offset in enumerate(self.offsets):
            start = self.start + index * self.chunk_tokens
            end = min(start + self.chunk_tokens, self.end)
            yield ArtifactCopy(self.state_type, start, end, offset)


@dataclass(frozen=True)
class Load:
    """Order to copy from the arena to pages.

    A request whose load is `parked` waits between steps until vLLM is told that the load ended.
    """

    request_id: str
    spans: list[ArtifactSpan]
    blocks: dict[tuple[StateType, int], Blocks]
    parked: bool
    resume_tokens: int
    """The first token that the step computes; the forward writes its page, too."""
    load_id: int = 0
    """The number under which ranks report it. A request may have two loads under way."""


class LostLoad(NamedTuple):
    """A load that cannot be made although vLLM counts its tokens as computed."""

    request_id: str
    block_ids: list[int]
    """Blocks of the first KV cache group that were not loaded."""
    parked: bool


@dataclass(frozen=True)
class Save:
    """Order to copy from pages to the arena. `save_ids` are the reservations it fills."""

    save_ids: list[int]
    copy: PageCopy


class StepTiming(NamedTuple):
    """Measured times of one step on one rank."""

    step: int
    forward_s: float
    """Seconds of the forward pass, without its waits for loads.

    With vLLM's first runner on CUDA a later pipeline stage's wait for the one before is included.
    """
    load_s: float
    """Seconds of copying, also where the forward hid it; on the host, summed over threads."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The orders for one step, from the scheduler side to the worker side."""

    loads: list[Load] = field(default_factory=list)
    lost: list[LostLoad] = field(default_factory=list)
    """The worker reports these to vLLM: the scheduler side has no way to."""
    saves: list[Save] = field(default_factory=list)
    """Copied layer by layer after this step's forward has written the pages."""
    early_saves: list[Save] = field(default_factory=list)
    """Saves of finished requests. Their pages are freed: they are copied before the forward."""
    cleared: dict[int, list[int]] = field(default_factory=dict)
    """Blocks by KV cache group to fill with zeros before the forward. A replay's first tokens
    read them, and earlier requests may have left NaN there, which attention masks do not stop."""
    protected: dict[int, list[int]] = field(default_factory=dict)
    """Blocks by KV cache group that this step's forward must not write: they hold the loaded
    state of tokens that it computes again."""
    timed_as: int | None = None
    """Number under which this step's times are reported; None: the step is not timed."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """The results since the last report, from the worker side to the scheduler side.

    Saves and loads are counted by the number of ranks that finished them.
    """

    saved: Counter[int] = field(default_factory=Counter)
    loaded: Counter[int] = field(default_factory=Counter)
    timings: list[StepTiming] = field(default_factory=list)
    """The longest of several ranks' times of a step: the slowest pipeline stage sets the pace."""
    timed_step: int | None = None
    """The step of this report, if it is timed. A device may finish its timing later."""
    unsaved: Counter[int] = field(default_factory=Counter)
    """Saves that ended without a complete copy."""
    broken: bool = False
    """True once a load has failed on a rank: it loads and saves nothing from then on."""
    hidden_share: float | None = None
    """Share of a load's bytes that is copied while the forward runs, from 0 to 1; None: as before.
    """

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Return the sum of this report and another rank's."""
        assert isinstance(other, WorkerReport)
        return WorkerReport(
            saved=self.saved + other.saved,
            unsaved=self.unsaved + other.unsaved,
            loaded=self.loaded + other.loaded,
            broken=self.broken or other.broken,
            timings=_longest(self.timings, other.timings),
            timed_step=other.timed_step if self.timed_step is None else self.timed_step,
            hidden_share=_least(self.hidden_share, other.hidden_share),
        )


def _least(one: float | None, other: float | None) -> float | None:
    """Return the lower of two ranks' figures: the slowest rank sets the pace."""
    known = [x for x in (one, other) if x is not None]
    return min(known, default=None)


def _longest(one: Sequence[StepTiming], other: Sequence[StepTiming]) -> list[StepTiming]:
    """Return the longest time of each step of two ranks."""
    found: dict[int, StepTiming] = {}
    for step, forward_s, load_s in (*one, *other):
        known = found.get(step, StepTiming(step, 0.0, 0.0))
        found[step] = StepTiming(step, max(forward_s, known.forward_s), max(load_s, known.load_s))
    return list(found.values())
