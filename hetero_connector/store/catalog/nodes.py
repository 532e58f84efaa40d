"""The objects of the prefix index: a chunk of the tree, and an artifact of a chunk.

There are millions of each, and no tier's capacity includes them: every field costs memory that is
not configured, and every object that may refer to others is one more for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkKey,
    ChunkRange,
    SlotRef,
    StoredChunk,
    Tier,
)
from hetero_connector.spec.state_types import Family, StateType

_COUNT_BITS = 32
ONE = {kind: 1 << _COUNT_BITS * kind.position for kind in StateType}
"""One artifact of a type, to be added to counts by state type, which share one integer."""
_ALL = (1 << _COUNT_BITS) - 1
ANY = {kind: _ALL << _COUNT_BITS * kind.position for kind in StateType}
"""Mask the bits that count a type: `counts & ANY[kind]` is 0 if there is none."""


_CHUNK_BYTES = 700
_ARTIFACT_BYTES = 650


def index_bytes(num_chunks: int, num_types: int) -> int:
    """Estimate the memory of an index of so many chunks with an artifact of each type, in bytes.

    A quarter more than after a start: what is added while serving is in the eviction queues too.
    """
    return num_chunks * (_CHUNK_BYTES + num_types * _ARTIFACT_BYTES)


class Life(Enum):
    """The stages of an artifact's life, in order.

    A sealed artifact is *stored* while it has an SSD slot: then a restart finds it again.
    """

    RESERVED = "reserved"
    """It has a DRAM slot, whose bytes are being written. Not visible."""
    SEALED = "sealed"
    """Its bytes are complete, in at least one tier."""
    FORGOTTEN = "forgotten"
    """It has left the index; its slots are released with its last pin."""


class Artifact:
    """One artifact: its slots, pins and recency. Changed by the catalog alone, under its lock."""

    __slots__ = (
        "checksum", "dram", "dram_offset", "last_used", "life", "node", "pins", "replica",
        "size_bytes", "ssd", "state_type", "token", "uses",
    )  # fmt: skip

    def __init__(self, node: Node, state_type: StateType, size_bytes: int) -> None:
        self.node = node
        self.state_type = state_type
        self.size_bytes = size_bytes
        self.checksum: bytes | None = None
        """xxh3-128 of the bytes; None until the I/O thread has computed it."""
        self.life = Life.RESERVED
        """Changed by the index alone."""
        self.pins = 0
        """Restores, saves and transfers under way."""
        self.dram: SlotRef | None = None
        self.dram_offset = -1
        self.ssd: SlotRef | None = None
        self.replica = False
        """Another worker owns it: not written to SSD."""
        self.token = 0
        """The fencing token under which the fleet knows it as ours."""
        self.last_used = 0
        self.uses = 0

    @property
    def id(self) -> ArtifactId:
        """Return the artifact's name."""
        return ArtifactId(self.node.key, self.state_type)

    @property
    def above(self) -> Artifact | None:
        """Return the parent chunk's artifact of the same type, if it has one."""
        parent = self.node.parent
        return None if parent is None else parent.artifacts.get(self.state_type)

    @property
    def sealed(self) -> bool:
        """Return whether its bytes are complete and `match` may find it."""
        return self.life is Life.SEALED

    @property
    def forgotten(self) -> bool:
        """Return whether it has left the index."""
        return self.life is Life.FORGOTTEN

    def slot(self, tier: Tier) -> SlotRef | None:
        """Return its place in `tier`, if it has one."""
        return self.dram if tier is Tier.DRAM else self.ssd

    def __repr__(self) -> str:
        return (
            f"Artifact({self.node.key.hex()[:8]}, {self.state_type.value}, dram={self.dram}, "
            f"ssd={self.ssd}, {self.life.value}, pins={self.pins})"
        )


class Node:
    """One chunk of the tree."""

    __slots__ = (
        "artifacts", "chunk", "counts", "counts_dram", "counts_ssd", "num_children", "parent",
        "stored", "users",
    )  # fmt: skip

    def __init__(self, chunk: ChunkRange, parent: Node | None) -> None:
        self.chunk = chunk
        self.parent = parent
        self.num_children = 0
        self.artifacts: dict[StateType, Artifact] = {}
        self.counts = 0
        """Counts of children with an artifact of each type, in any tier: see `ONE`."""
        self.counts_dram = 0
        """The same counts for DRAM; below for SSD."""
        self.counts_ssd = 0
        self.users = 0
        """Sessions whose chains go through this chunk, see `ChainUsers`."""
        self.stored: StoredChunk | None = None
        """The answer of `match`; None while nothing is sealed."""

    @property
    def key(self) -> ChunkKey:
        """Return the chunk's name."""
        return self.chunk.key

    def counts_in(self, tier: Tier) -> int:
        """Return the counts of children with an artifact of each type in the tier: see `ONE`."""
        return self.counts_dram if tier is Tier.DRAM else self.counts_ssd

    def add_counts(self, tier: Tier, change: int) -> None:
        """Add to `counts_in(tier)`."""
        if tier is Tier.DRAM:
            self.counts_dram += change
        else:
            self.counts_ssd += change


class ChainPlace(NamedTuple):
    """The tiers that have the state of a chain."""

    end: int
    """Tokens up to the last stored chunk."""
    chunks: int
    by_tier: Mapping[Tier, int]
    """Chunks by the slowest tier that is needed for their prefix-proportional state."""


def place_of(
    nodes: Mapping[ChunkKey, Node], leaves: Sequence[ChunkKey], limit: int
) -> ChainPlace | None:
    """Return the place of the chain up to the first leaf that is stored, nowhere without one.

    None if it has more than `limit` chunks.
    """
    node = next((x for x in map(nodes.get, leaves) if x is not None and x.stored is not None), None)
    end = node.chunk.end if node is not None else 0
    by_tier = {Tier.DRAM: 0, Tier.SSD: 0}
    chunks = 0
    while node is not None and node.parent is not None:
        chunks += 1
        if chunks > limit:
            return None
        if (stored := node.stored) is not None:
            prefix = [tier for kind, tier in stored.tiers.items() if kind.family is Family.PREFIX]
            tiers = prefix or stored.tiers.values()
            by_tier[Tier.SSD if Tier.SSD in tiers else Tier.DRAM] += 1
        node = node.parent
    return ChainPlace(end, chunks, by_tier)


def check_node(node: Node, children: Iterable[Node]) -> None:
    """Raise AssertionError unless the node's counts and its answer agree with its artifacts."""
    num_children = counts = counts_dram = counts_ssd = 0
    for child in children:
        assert (child.parent, child.chunk.parent) == (node, node.key)
        num_children += 1
        for kind, artifact in child.artifacts.items():
            counts += ONE[kind]
            counts_dram += ONE[kind] * (artifact.dram is not None)
            counts_ssd += ONE[kind] * (artifact.ssd is not None)
    assert (num_children, counts) == (node.num_children, node.counts)
    assert (counts_dram, counts_ssd) == (node.counts_dram, node.counts_ssd)
    sealed = {a.state_type for a in node.artifacts.values() if a.sealed}
    assert sealed == set(node.stored.tiers if node.stored else ())
    for artifact in node.artifacts.values():
        assert (artifact.node, artifact.forgotten) == (node, False)
        assert artifact.pins >= 0
        assert not artifact.sealed or artifact.dram or artifact.ssd, "sealed but nowhere"
