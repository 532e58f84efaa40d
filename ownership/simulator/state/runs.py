"""Runs of chunks: what a tier's tree is made of, and how an eviction policy sees them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hetero_connector.artifacts.record import ROOT, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.catalog.evictability import Evictability
from hetero_connector.store.catalog.nodes import Artifact, Life, Node
from ownership.simulator.traces.block_runs import BlockRuns

_NOWHERE = ChunkRange(ROOT, ROOT, 0, 0)
_SHARED = Node(_NOWHERE, None)
"""Of all chunks whose place nobody asks for: the depth breaks ties of recency, and two runs that
may leave never have the same."""


class Run:
    """Chunks of one chain, one after the other, that the same requests used last."""

    __slots__ = (
        "checkpoints", "children", "count", "first", "gap", "last_used", "owner", "parent", "pins",
        "start", "tail", "uses",
    )  # fmt: skip

    def __init__(self, first: int, count: int, start: int, parent: Run | None) -> None:
        self.first, self.count, self.start, self.parent = first, count, start, parent
        self.children: dict[int, Run] = {}
        self.checkpoints: list[int] = []
        """Chunks before each boundary that has one, ascending; in (start, start + count]."""
        self.last_used = self.uses = self.pins = 0
        self.owner: str | None = None
        """The worker whose replica it is; None: it is no replica."""
        self.gap = False
        """Nothing of it is here, only of what continues it."""
        self.tail: Tail | None = None

    @property
    def end(self) -> int:
        """Chunks of the chain up to its last one."""
        return self.start + self.count

    def chain(self) -> BlockRuns:
        """All chunks up to its last one."""
        pieces: list[tuple[int, int]] = []
        run: Run | None = self
        while run is not None:
            pieces.append((run.first, run.count))
            run = run.parent
        return BlockRuns.of_runs(reversed(pieces))


class Tail(Artifact):
    """A run's last chunk, as an eviction policy sees it."""

    __slots__ = ("run",)

    def __init__(self, run: Run, state_type: StateType, size_bytes: int, *, placed: bool) -> None:
        """`placed`: the policy asks where in its prompt it is; see `place`."""
        node = Node(_NOWHERE, None) if placed else _SHARED
        super().__init__(node, state_type, size_bytes)
        self.run = run
        self.life = Life.SEALED

    def place(self, chunk_tokens: int) -> None:
        """Say which chunk the run's last one is by now."""
        end = self.run.end * chunk_tokens
        self.node.chunk = ChunkRange(ROOT, ROOT, end - chunk_tokens, end)


class Found(NamedTuple):
    """Where a chain leads in a tier."""

    path: Sequence[Run]
    chunks: int
    """Leading chunks that are there. The last run may reach further, or branch off later."""

    def owned(self) -> list[tuple[int, int]]:
        """Stretches that are here and no replica: from where, up to where."""
        return [
            (run.start, min(run.end, self.chunks))
            for run in self.path
            if run.owner is None and not run.gap
        ]

    def checkpoints(self) -> Iterator[int]:
        """Boundaries on the way that have a checkpoint, the deepest first."""
        for run in reversed(self.path):
            known = run.checkpoints
            yield from reversed(known[: bisect_right(known, self.chunks)])

    def deepest_checkpoint(self, limit: int) -> int:
        """The deepest at or before `limit` chunks; 0: there is none."""
        limit = min(limit, self.chunks)
        for run in reversed(self.path):
            if known := bisect_right(run.checkpoints, limit):
                return run.checkpoints[known - 1]
        return 0


NOTHING = Found((), 0)
"""Of a chain that leads nowhere."""


class ChunkSizes(NamedTuple):
    """What a chunk and a checkpoint take in a tier, in bytes; slots are as large as the largest."""

    tokens: int
    chunk_bytes: int
    checkpoint_bytes: int


def evictability(artifact: Artifact) -> Evictability:
    """Whether a run's last chunk may leave."""
    assert isinstance(artifact, Tail)
    run = artifact.run
    held = artifact.forgotten or run.pins or run.children
    return Evictability.BLOCKED if held else Evictability.FREE
