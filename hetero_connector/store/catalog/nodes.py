"""The prefix index's own objects: a chunk of the tree, and an artifact of a chunk.

There are millions of each, outside of any tier's capacity: every field costs memory that nobody
configured, and every object that may refer to others is one more for the garbage collector.
"""

from __future__ import annotations

from collections.abc import Iterable

from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkKey,
    ChunkRange,
    SlotRef,
    StoredChunk,
    Tier,
)
from hetero_connector.spec.state_types import StateType

_COUNT_BITS = 32
ONE = {kind: 1 << _COUNT_BITS * kind.position for kind in StateType}
"""To be added to counts by state type, which are all in one integer: `held_in_dram`."""
_ALL = (1 << _COUNT_BITS) - 1
ANY = {kind: _ALL << _COUNT_BITS * kind.position for kind in StateType}
"""Mask the bits that count a type: `counts & ANY[kind]` is 0 if there is none."""


_CHUNK_BYTES = 700
_ARTIFACT_BYTES = 650


def index_bytes(num_chunks: int, num_types: int) -> int:
    """About what an index of so many chunks takes in memory, with an artifact of each type.

    A quarter more than after a start: what is added while serving waits in eviction's queues.
    """
    return num_chunks * (_CHUNK_BYTES + num_types * _ARTIFACT_BYTES)


class Artifact:
    """One artifact: its slots, pins and recency. Mutated by the store, under its lock."""

    __slots__ = (
        "checksum", "dram", "dram_offset", "forgotten", "last_used", "node", "pins", "replica",
        "sealed", "size_bytes", "ssd", "state_type", "token", "uses",
    )  # fmt: skip

    def __init__(self, node: Node, state_type: StateType, size_bytes: int) -> None:
        self.node = node
        self.state_type = state_type
        self.size_bytes = size_bytes
        self.checksum: bytes | None = None
        """xxh3-128 of the bytes; None until the I/O thread has computed it."""
        self.sealed = False
        self.pins = 0
        """Restores, saves and transfers under way."""
        self.forgotten = False
        """No longer in the index; slots are given back when the last pin goes."""
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
        """Its name."""
        return ArtifactId(self.node.key, self.state_type)

    def slot(self, tier: Tier) -> SlotRef | None:
        """Its place in `tier`, if any."""
        return self.dram if tier is Tier.DRAM else self.ssd

    def __repr__(self) -> str:
        return (
            f"Artifact({self.node.key.hex()[:8]}, {self.state_type.value}, dram={self.dram}, "
            f"ssd={self.ssd}, sealed={self.sealed}, pins={self.pins}, gone={self.forgotten})"
        )


class Node:
    """One chunk of the radix."""

    __slots__ = (
        "artifacts", "chunk", "held", "held_in_dram", "held_on_ssd", "num_children", "parent",
        "stored", "users",
    )  # fmt: skip

    def __init__(self, chunk: ChunkRange, parent: Node | None) -> None:
        self.chunk = chunk
        self.parent = parent
        self.num_children = 0
        self.artifacts: dict[StateType, Artifact] = {}
        self.held = 0
        """Counts of children with an artifact of each type, in any tier: see `ONE`."""
        self.held_in_dram = 0
        """The same counts for DRAM; below for SSD."""
        self.held_on_ssd = 0
        self.users = 0
        """Sessions whose chains go through this chunk, see `ChainUsers`."""
        self.stored: StoredChunk | None = None
        """The answer of `match`; None while nothing is sealed."""

    @property
    def key(self) -> ChunkKey:
        """Its chunk's name."""
        return self.chunk.key

    def held_in(self, tier: Tier) -> int:
        """Return the counts of children with an artifact of each type in the tier: see `ONE`."""
        return self.held_in_dram if tier is Tier.DRAM else self.held_on_ssd

    def count_held(self, tier: Tier, change: int) -> None:
        """Add to `held_in`."""
        if tier is Tier.DRAM:
            self.held_in_dram += change
        else:
            self.held_on_ssd += change


def check_node(node: Node, children: Iterable[Node]) -> None:
    """Raise AssertionError unless what the node counts and says agrees with what it has."""
    num_children = held = held_in_dram = held_on_ssd = 0
    for child in children:
        assert (child.parent, child.chunk.parent) == (node, node.key)
        num_children += 1
        for kind, artifact in child.artifacts.items():
            held += ONE[kind]
            held_in_dram += ONE[kind] * (artifact.dram is not None)
            held_on_ssd += ONE[kind] * (artifact.ssd is not None)
    assert (num_children, held) == (node.num_children, node.held)
    assert (held_in_dram, held_on_ssd) == (node.held_in_dram, node.held_on_ssd)
    sealed = {a.state_type for a in node.artifacts.values() if a.sealed}
    assert sealed == set(node.stored.tiers if node.stored else ())
    for artifact in node.artifacts.values():
        assert (artifact.node, artifact.forgotten) == (node, False)
        assert artifact.pins >= 0
        assert not artifact.sealed or artifact.dram or artifact.ssd, "sealed but nowhere"
