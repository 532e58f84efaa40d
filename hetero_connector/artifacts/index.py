"""The prefix index: a radix over chunks, and what is stored of each.

A node is one chunk; its edges are whole chunks, so walking a chain is one dictionary
look-up a chunk. Not thread-safe: the store's lock guards it, except `match` and
`tails`, which read single attributes and may run beside a writer.

What may leave a tier (`standing`):

- Never: an artifact that is pinned or not sealed.
- From DRAM, while a copy is on SSD: any; those with no child in DRAM first.
- From SSD, while a copy is in DRAM: those with no child on SSD; those with no child at
  all first. So what is on SSD stays reachable without DRAM, as a restart needs it.
- The last copy of an artifact: only if no child chunk holds the same state type, and
  only if its chunk either keeps another artifact or has no children.

So every stored chunk stays reachable from the root through stored chunks, and within a
chain the deepest chunk of each state type goes first.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from itertools import islice
from typing import TypeVar

from hetero_connector.artifacts.record import (
    ROOT,
    ArtifactId,
    ChunkKey,
    ChunkRange,
    SharedTiers,
    SlotRef,
    StoredChunk,
    Tier,
)
from hetero_connector.spec.state_types import StateType

MAX_TAILS = 32
"""Lengths that `tails` names. Each costs whoever looks for a tail a hash of so many tokens."""
_OFFSETS = struct.Struct(f"={len(StateType)}q")
_K = TypeVar("_K")


class Standing(Enum):
    """Whether an artifact may leave a tier."""

    LEAF = "leaf"
    """Nothing deeper in the tier needs it: evict this kind first."""
    BACKED = "backed"
    """A deeper chunk is in the store, but another tier keeps a copy."""
    HELD = "held"
    """Must stay for now; `PrefixIndex` offers it again when that may have changed."""


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


class PrefixIndex:
    """Chunks and artifacts by key. `offer` hears of artifacts that may have become evictable."""

    def __init__(self, chunk_tokens: int, offer: Callable[[Artifact], None]) -> None:
        self._chunk_tokens = chunk_tokens
        self._offer = offer
        self.root = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
        self.nodes: dict[ChunkKey, Node] = {ROOT: self.root}
        self._tiers = SharedTiers()

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Longest prefix of `chain` of which every chunk has something sealed."""
        nodes = self.nodes
        found = []
        for chunk in chain:
            node = nodes.get(chunk.key)
            stored = None if node is None else node.stored
            if stored is None:
                break
            found.append(stored)
        return found

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Lengths of visible short chunks under `parent`: the newest `MAX_TAILS`."""
        node = self.nodes.get(parent)
        return () if node is None else tuple(islice(reversed(node.tails), MAX_TAILS))

    def find(self, artifact_id: ArtifactId) -> Artifact | None:
        """The artifact, sealed or being saved."""
        node = self.nodes.get(artifact_id.chunk)
        return None if node is None else node.artifacts.get(artifact_id.state_type)

    def artifacts(self) -> Iterator[Artifact]:
        """Every artifact, in no particular order."""
        for node in self.nodes.values():
            yield from node.artifacts.values()

    def add(self, chunk: ChunkRange, state_type: StateType, size_bytes: int) -> Artifact:
        """A new, unsealed artifact. `KeyError` if the parent chunk is unknown."""
        node = self.nodes.get(chunk.key)
        if node is None:
            parent = self.nodes[chunk.parent]
            node = self.nodes[chunk.key] = parent.children[chunk.key] = Node(chunk, parent)
        assert state_type not in node.artifacts, "an artifact is saved once"
        artifact = node.artifacts[state_type] = Artifact(node, state_type, size_bytes)
        assert node.parent is not None
        _count(node.parent.held, state_type, 1)
        return artifact

    def seal(self, artifact: Artifact) -> None:
        """Make it visible to `match`, and evictable once unpinned."""
        artifact.sealed = True
        self._refresh(artifact.node)
        # Another artifact of the chunk may have been kept only for being the last one.
        for sibling in artifact.node.artifacts.values():
            self._offer(sibling)

    def attach(self, artifact: Artifact, ref: SlotRef, offset: int = -1) -> None:
        """Note that the bytes are (or, unsealed, will be) in slot `ref`."""
        assert artifact.slot(ref.tier) is None, artifact
        assert not artifact.forgotten, artifact
        if ref.tier is Tier.DRAM:
            artifact.dram, artifact.dram_offset = ref, offset
        else:
            artifact.ssd = ref
        assert artifact.node.parent is not None
        _count(artifact.node.parent.held_in[ref.tier], artifact.state_type, 1)
        if artifact.sealed:
            self._refresh(artifact.node)
            self._offer(artifact)

    def detach(self, artifact: Artifact, tier: Tier) -> SlotRef:
        """Drop one copy; the artifact itself stays (see `remove`)."""
        ref = artifact.slot(tier)
        assert ref is not None
        if tier is Tier.DRAM:
            artifact.dram, artifact.dram_offset = None, -1
        else:
            artifact.ssd = None
        self._uncount(artifact, tier)
        if artifact.sealed and not artifact.forgotten:
            self._refresh(artifact.node)
        return ref

    def remove(self, artifact: Artifact) -> None:
        """Forget it. Its slots stay noted on it, for the store to give back."""
        node = artifact.node
        assert not artifact.forgotten
        artifact.forgotten = True
        del node.artifacts[artifact.state_type]
        self._uncount(artifact, None)
        for tier in (Tier.DRAM, Tier.SSD):
            if artifact.slot(tier) is not None:
                self._uncount(artifact, tier)
        self._refresh(node)
        self._prune(node)

    def clear(self) -> list[Artifact]:
        """Forget everything; returns the artifacts, their slots still noted on them."""
        for node in self.nodes.values():
            if node.stored is not None:
                node.stored.stale = True
        gone = list(self.artifacts())
        for artifact in gone:
            artifact.forgotten = True
        self.root = Node(self.root.chunk, None)
        self.nodes = {ROOT: self.root}
        return gone

    def standing(self, artifact: Artifact, tier: Tier) -> Standing:
        """Whether the artifact may leave `tier` now; the module's docstring has the rule."""
        if artifact.pins or artifact.forgotten or not artifact.sealed:
            return Standing.HELD
        if artifact.slot(tier) is None:
            return Standing.HELD
        node, kind = artifact.node, artifact.state_type
        if tier is Tier.DRAM and artifact.ssd is not None:
            return Standing.BACKED if node.held_in[tier].get(kind) else Standing.LEAF
        if tier is Tier.SSD and artifact.dram is not None:
            if node.held_in[tier].get(kind):
                return Standing.HELD
            return Standing.BACKED if node.held.get(kind) else Standing.LEAF
        if node.held.get(kind) or (node.children and len(node.artifacts) == 1):
            return Standing.HELD
        return Standing.LEAF

    def _uncount(self, artifact: Artifact, tier: Tier | None) -> None:
        """The parent has one child less that holds the type in `tier` (None: at all)."""
        parent = artifact.node.parent
        assert parent is not None
        counts = parent.held if tier is None else parent.held_in[tier]
        _count(counts, artifact.state_type, -1)
        freed = parent.artifacts.get(artifact.state_type)
        if freed is not None and artifact.state_type not in counts:
            self._offer(freed)

    def _refresh(self, node: Node) -> None:
        """Recompute what `match` answers for this chunk. A new object: old answers stay true."""
        tiers: dict[StateType, Tier] = {}
        offsets = [-1] * len(StateType)
        for kind, artifact in node.artifacts.items():
            if artifact.sealed:
                tiers[kind] = Tier.SSD if artifact.dram is None else Tier.DRAM
                offsets[kind.position] = artifact.dram_offset
        was_visible = node.stored is not None
        if node.stored is not None:
            node.stored.stale = True
        node.stored = None
        if tiers:
            shared, number = self._tiers.share(tiers)
            packed = _OFFSETS.pack(*offsets)
            node.stored = StoredChunk(node.chunk, shared, packed, stale=False, number=number)
        length = node.chunk.end - node.chunk.start
        if was_visible != bool(tiers) and length < self._chunk_tokens and node.parent is not None:
            _count(node.parent.tails, length, 1 if tiers else -1)
            if tiers:
                node.parent.tails[length] = node.parent.tails.pop(length)

    def _prune(self, node: Node) -> None:
        """Remove the node, and parents left behind, once nothing hangs on them."""
        while node.parent is not None and not node.artifacts and not node.children:
            parent = node.parent
            del self.nodes[node.key]
            del parent.children[node.key]
            if not parent.children:
                for artifact in parent.artifacts.values():
                    self._offer(artifact)
            node = parent

    def check_integrity(self) -> None:
        """Raise AssertionError if any redundant field disagrees with the tree."""
        seen: dict[ChunkKey, Node] = {}
        stack = [self.root]
        while stack:
            node = stack.pop()
            seen[node.key] = node
            self._check_node(node)
            stack.extend(node.children.values())
        assert seen == self.nodes, "a node is unreachable"

    def _check_node(self, node: Node) -> None:
        held: dict[StateType, int] = {}
        held_in: dict[Tier, dict[StateType, int]] = {Tier.DRAM: {}, Tier.SSD: {}}
        tails: dict[int, int] = {}
        for key, child in node.children.items():
            assert (child.parent, child.key) == (node, key)
            assert node is self.root or child.chunk.parent == node.key
            length = child.chunk.end - child.chunk.start
            if child.stored is not None and length < self._chunk_tokens:
                _count(tails, length, 1)
            for kind, artifact in child.artifacts.items():
                _count(held, kind, 1)
                for tier, counts in held_in.items():
                    if artifact.slot(tier) is not None:
                        _count(counts, kind, 1)
        assert (held, held_in, tails) == (node.held, node.held_in, node.tails)
        assert node is self.root or node.artifacts or node.children, "an empty leaf"
        sealed = {a.state_type for a in node.artifacts.values() if a.sealed}
        assert sealed == set(node.stored.tiers if node.stored else ())
        if node.stored is not None:
            known = self._tiers.share(node.stored.tiers)
            assert known == (node.stored.tiers, node.stored.number)
        for artifact in node.artifacts.values():
            assert (artifact.node, artifact.forgotten) == (node, False)
            assert artifact.pins >= 0
            assert not artifact.sealed or artifact.dram or artifact.ssd, "sealed but nowhere"


def _count(counts: dict[_K, int], key: _K, step: int) -> None:
    """Add to a counter that holds no zeros."""
    value = counts.get(key, 0) + step
    if value:
        counts[key] = value
    else:
        del counts[key]
