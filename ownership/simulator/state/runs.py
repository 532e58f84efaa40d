"""Runs of chunks, the nodes of a tier's tree, and the part of them that an eviction policy sees."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import ROOT, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.evictability import Evictability
from hetero_connector.store.catalog.nodes import Artifact, Life, Node

_NO_PLACE = ChunkRange(ROOT, ROOT, 0, 0)
_SHARED_NODE = Node(_NO_PLACE, None)
"""The node of every run whose place no policy asks for. Depth breaks ties of recency only, and no
two runs that may leave were used last by the same request."""


class Run:
    """Consecutive chunks of one chain that the same requests used last."""

    __slots__ = (
        "checkpoints", "children", "count", "first", "held", "is_missing", "last_chunk",
        "last_used", "owner", "parent", "pins", "start", "uses",
    )  # fmt: skip

    def __init__(self, first: int, count: int, start: int, parent: Run | None) -> None:
        self.first, self.count, self.start, self.parent = first, count, start, parent
        self.children: dict[int, Run] = {}
        self.checkpoints: list[int] = []
        """The boundaries that have a checkpoint, as numbers of chunks before them, ascending; each
        is in (start, start + count]."""
        self.last_used = self.uses = self.pins = 0
        self.held = 0
        """Pins of this run and of all that continue it: it stays while there is one."""
        self.owner: str | None = None
        """The worker that owns the chunks, of which this is a replica; None: no replica."""
        self.is_missing = False
        """True if the tier holds none of these chunks, only chunks that continue them."""
        self.last_chunk: LastChunk | None = None

    @property
    def end(self) -> int:
        """Number of the chain's chunks up to the last one of the run."""
        return self.start + self.count


class LastChunk(Artifact):
    """The last chunk of a run, as an eviction policy sees it."""

    __slots__ = ("run",)

    def __init__(self, run: Run, state_type: StateType, size_bytes: int, *, placed: bool) -> None:
        """`placed`: the policy asks where in its prompt the chunk is; see `place`."""
        node = Node(_NO_PLACE, None) if placed else _SHARED_NODE
        super().__init__(node, state_type, size_bytes)
        self.run = run
        self.life = Life.SEALED

    def place(self, chunk_tokens: int) -> None:
        """Set the tokens of the chunk, which change as the run shrinks."""
        end = self.run.end * chunk_tokens
        self.node.chunk = ChunkRange(ROOT, ROOT, end - chunk_tokens, end)


class Match(NamedTuple):
    """The longest prefix of a chain in a tier."""

    path: Sequence[Run]
    chunks: int
    """Number of matched chunks. The last run may be longer."""

    def owned(self) -> list[tuple[int, int]]:
        """Return the ranges of chunks that are here and no replica."""
        return [
            (run.start, min(run.end, self.chunks))
            for run in self.path
            if run.owner is None and not run.is_missing
        ]

    def checkpoints(self) -> Iterator[int]:
        """Yield the boundaries that have a checkpoint, the deepest first."""
        for run in reversed(self.path):
            known = run.checkpoints
            yield from reversed(known[: bisect_right(known, self.chunks)])

    def deepest_checkpoint(self, limit: int) -> int:
        """Return the deepest checkpoint at or before `limit` chunks; 0 if there is none."""
        limit = min(limit, self.chunks)
        for run in reversed(self.path):
            if known := bisect_right(run.checkpoints, limit):
                return run.checkpoints[known - 1]
        return 0


NO_MATCH = Match((), 0)


class ChunkSizes(NamedTuple):
    """Sizes of a chunk and of a checkpoint in a tier; slots are as large as the largest."""

    tokens: int
    chunk_bytes: int
    checkpoint_bytes: int


def evictability(artifact: Artifact) -> Evictability:
    """Return whether the last chunk of a run may leave its tier."""
    assert isinstance(artifact, LastChunk)
    run = artifact.run
    stays = artifact.life is Life.FORGOTTEN or run.pins or run.children
    return Evictability.BLOCKED if stays else Evictability.FREE
