"""What the two sides say to each other, once per engine step.

Everything here is pickled when workers live in processes of their own, so it is plain
values: no tensors, no store objects.
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
from hetero_connector.store.arena import ArenaHandle


@dataclass(frozen=True)
class Blocks:
    """Part of one request's block table in one KV cache group.

    `ids[i]` is the engine's block of page `first_page + i`; pages outside, and null
    blocks (id 0), must not be touched.
    """

    first_page: int
    ids: list[int]


class ArtifactCopy(NamedTuple):
    """One artifact's place in the arena. A named tuple: a long prompt makes thousands."""

    state_type: StateType
    start: int
    end: int
    offset: int
    """Arena byte offset of the artifact (rank 0's share first)."""


@dataclass(frozen=True)
class PageCopy:
    """Copies of one request between its pages and the arena.

    `blocks` maps (state type, group) to the pages in question; one entry spans all
    the artifacts of that state type.
    """

    artifacts: list[ArtifactCopy]
    blocks: dict[tuple[StateType, int], Blocks]


class ArtifactSpan(NamedTuple):
    """Artifacts of one state type over successive chunks of tokens [start, end)."""

    state_type: StateType
    start: int
    end: int
    chunk_tokens: int
    offsets: Sequence[int]
    """Arena byte offset of each chunk's artifact; only the last chunk may be shorter."""

    def artifacts(self) -> Iterator[ArtifactCopy]:
        """One by one."""
        for index, offset in enumerate(self.offsets):
            start = self.start + index * self.chunk_tokens
            end = min(start + self.chunk_tokens, self.end)
            yield ArtifactCopy(self.state_type, start, end, offset)


@dataclass(frozen=True)
class Load:
    """Arena -> pages. A parked load is answered between steps, in `finished_recving`."""

    request_id: str
    spans: list[ArtifactSpan]
    blocks: dict[tuple[StateType, int], Blocks]
    parked: bool
    resume: int | None = None
    """The step that loads computes from this token on; None: from the end of the spans."""

    @property
    def resume_tokens(self) -> int:
        """The first token that the step computes: its page is written by the forward too."""
        return max(x.end for x in self.spans) if self.resume is None else self.resume

    @property
    def copy(self) -> PageCopy:
        """Spelled out, for the worker."""
        return PageCopy([a for span in self.spans for a in span.artifacts()], self.blocks)


class LostLoad(NamedTuple):
    """A load that will not be made although vLLM counts its tokens as computed."""

    request_id: str
    block_ids: list[int]
    """Blocks of the first KV cache group that hold nothing."""
    parked: bool


@dataclass(frozen=True)
class Save:
    """Pages -> arena. `save_ids` name the store's reservations that it completes."""

    save_ids: list[int]
    copy: PageCopy


class StepTiming(NamedTuple):
    """How long one rank worked for a step."""

    step: int
    forward_s: float
    """Without the stretches in which the forward waited for loads."""
    load_s: float
    """Copying, however much of it the forward hid; on the host the sum over its threads."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler side -> worker side."""

    arena: ArenaHandle | None = None
    loads: list[Load] = field(default_factory=list)
    lost: list[LostLoad] = field(default_factory=list)
    """For the worker to tell vLLM: only workers can."""
    saves: list[Save] = field(default_factory=list)
    """Copied layer by layer as this step's forward fills the pages."""
    early_saves: list[Save] = field(default_factory=list)
    """Pages of finished requests, already freed: copied before anything may overwrite them."""
    cleared: dict[int, list[int]] = field(default_factory=dict)
    """Blocks by KV cache group to fill with zeros before the forward: a replay's first tokens
    read them, and what earlier requests left there may be NaN, which masks do not stop."""
    protected: dict[int, list[int]] = field(default_factory=dict)
    """Blocks by KV cache group that this step's forward must not write: they hold loaded state
    of tokens that it computes once more."""
    timed_as: int | None = None
    """The step is to be timed and reported under this number."""


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Worker side -> scheduler side: how many ranks finished each save and load."""

    saved: Counter[int] = field(default_factory=Counter)
    loaded: Counter[str] = field(default_factory=Counter)
    timings: list[StepTiming] = field(default_factory=list)
    """Of one rank: they all do the same."""
    ran: int | None = None
    """The step that this comes with, if it was to be timed: a device may tell its timing later."""
    unsaved: Counter[int] = field(default_factory=Counter)
    """Saves that are over too, but of which something was not copied."""
    broken: bool = False
    """A rank could not load: it loads and saves nothing any more."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        """Add another rank's report."""
        assert isinstance(other, WorkerReport)
        timings = self.timings or other.timings
        ran = other.ran if self.ran is None else self.ran
        return WorkerReport(
            saved=self.saved + other.saved,
            unsaved=self.unsaved + other.unsaved,
            loaded=self.loaded + other.loaded,
            broken=self.broken or other.broken,
            timings=timings,
            ran=ran,
        )
