"""The prefix index's own objects: a chunk of the tree, and an artifact of a chunk."""

from __future__ import annotations

from hetero_connector.artifacts.record import (
    ArtifactId,
    ChunkKey,
    ChunkRange,
    SlotRef,
    StoredChunk,
    Tier,
)
from hetero_connector.spec.state_types import StateType


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
        "artifacts", "children", "chunk", "held", "held_in", "parent", "readers", "stored", "tails",
    )  # fmt: skip

    def __init__(self, chunk: ChunkRange, parent: Node | None) -> None:
        self.chunk = chunk
        self.parent = parent
        self.children: dict[ChunkKey, Node] = {}
        self.artifacts: dict[StateType, Artifact] = {}
        self.held: dict[StateType, int] = {}
        """How many children hold an artifact of the type, in any tier."""
        self.held_in: dict[Tier, dict[StateType, int]] = {Tier.DRAM: {}, Tier.SSD: {}}
        """How many children hold one in that tier."""
        self.readers = 0
        """Sessions whose chains go through this chunk, see `store.readers`."""
        self.stored: StoredChunk | None = None
        """What `match` answers; None while nothing is sealed."""
        self.tails: dict[int, int] = {}
        """Visible children shorter than a full chunk: token length -> how many; the length of
        that which came last is last."""

    @property
    def key(self) -> ChunkKey:
        """Its chunk's name."""
        return self.chunk.key
