"""The prefix index: a tree of chunks, and the artifacts of each.

A node is one chunk, so walking a chain is one dictionary look-up a chunk. A private part of
`Catalog`, which holds the lock; `match`, `holdings` and `tails` need no lock, for they read single
attributes.

A chunk is *missing* if nothing of it is stored while something after it is, see `evictability`.
What follows a missing range can be restored again when a peer's copy fills the range, or when it
has been computed again. After a restart only the last chunk of a missing range is known, by its
name. Its parent is unknown: it is kept below the root until it is added with its parent.
"""

from __future__ import annotations

import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from operator import attrgetter

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
from hetero_connector.store.catalog.evictability import may_go_missing
from hetero_connector.store.catalog.nodes import ANY, ONE, Artifact, Life, Node, check_node

_OFFSETS = struct.Struct(f"={len(StateType)}q")
_NOTHING: Mapping[StateType, Tier] = {}
_NOWHERE = _OFFSETS.pack(*[-1] * len(StateType))
_key = attrgetter("key")
_TURNS_IN_A_CHUNK = 4
"""More ends within one chunk are taken for those of several chains."""
MAX_TAILS = 32
"""Lengths that are returned. Each costs a search for a tail one hash of that many tokens."""


class PrefixIndex:
    """Chunks and artifacts by key. `offer` is called with artifacts that may be evictable now."""

    def __init__(self, chunk_tokens: int, offer: Callable[[Artifact], None]) -> None:
        self._chunk_tokens = chunk_tokens
        self._offer = offer
        self.root = Node(ChunkRange(ROOT, ROOT, 0, 0), None)
        self.nodes: dict[ChunkKey, Node] = {ROOT: self.root}
        self.num_missing = 0
        """Missing chunks: nothing of them is stored, and something after them is."""
        self.num_added = 0
        """Chunks that were ever added."""
        self.changed: OrderedDict[ChunkKey, None] | None = None
        """Chunks of which a sealed copy came or left, the oldest change first; None: not noted."""
        self._tails = TailLengths()
        self._tiers = SharedTiers()

    def note_changes(self) -> None:
        """Note changed chunks from now on."""
        if self.changed is None:
            self.changed = OrderedDict()

    def match(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return the longest prefix of `chain` of which every chunk has something sealed."""
        return self._stored_prefix(chain)[0]

    def holdings(self, chain: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return what is sealed of the chain, also after missing ranges; see `ArtifactStore`."""
        chunks = iter(chain)
        found, missing = self._stored_prefix(chunks)
        if missing is not None and self.num_missing:
            rest = [missing, *chunks]
            # As a rule the missing chunks are of another chain: then make no object for each.
            if not self.nodes.keys().isdisjoint(map(_key, rest)):
                found += self._after_missing(rest)
        return found

    def _stored_prefix(
        self, chain: Iterable[ChunkRange]
    ) -> tuple[list[StoredChunk], ChunkRange | None]:
        """Return what is sealed of the chain, and its first chunk without anything, if any.

        A long prompt has hundreds of chunks, all there as a rule: the loop does no more for each
        than it must.
        """
        nodes = self.nodes
        found: list[StoredChunk] = []
        for chunk in chain:
            try:
                stored = nodes[chunk.key].stored
            except KeyError:
                return found, chunk
            if stored is None:
                return found, chunk
            found.append(stored)
        return found, None

    def tails(self, parent: ChunkKey) -> tuple[int, ...]:
        """Return the lengths of visible short chunks after `parent`: the newest `MAX_TAILS`."""
        return self._tails.of(parent)

    def is_fork(self, key: ChunkKey) -> bool:
        """Return whether several chains leave each other at the end of a chunk.

        A session's turns may end in several short chunks, of which the next turn makes one full
        chunk: only many of them are a fork.
        """
        node = self.nodes.get(key)
        if node is None or node.num_children < 2:
            return False
        num_full = node.num_children - self._tails.number(key)
        return num_full > 1 or node.num_children > _TURNS_IN_A_CHUNK

    def find(self, artifact_id: ArtifactId) -> Artifact | None:
        """Return the artifact, sealed or being saved."""
        node = self.nodes.get(artifact_id.chunk)
        return None if node is None else node.artifacts.get(artifact_id.state_type)

    def artifacts(self) -> Iterator[Artifact]:
        """Yield every artifact, in no particular order."""
        for node in self.nodes.values():
            yield from node.artifacts.values()

    def add(self, chunk: ChunkRange, state_type: StateType, size_bytes: int) -> Artifact:
        """Add an unsealed artifact. KeyError if the parent chunk is unknown."""
        node = self.nodes.get(chunk.key)
        if node is None:
            node = self._new(chunk, self.nodes[chunk.parent])
        else:
            if self._has_unknown_parent(node):
                self._attach_to_parent(node, chunk, self.nodes[chunk.parent])
            self.num_missing -= not node.artifacts
        assert state_type not in node.artifacts, "an artifact is saved once"
        artifact = node.artifacts[state_type] = Artifact(node, state_type, size_bytes)
        assert node.parent is not None
        node.parent.counts += ONE[state_type]
        return artifact

    def agrees_with(self, chunk: ChunkRange) -> bool:
        """Return whether what is known of the chunk and of its parent agrees with `chunk`.

        If so it may be added after `presume_parent`.
        """
        node, before = self.nodes.get(chunk.key), self.nodes.get(chunk.parent)
        if node is not None and not self._has_unknown_parent(node):
            return node.chunk == chunk
        if node is not None and (node.chunk.start, node.chunk.end) != (chunk.start, chunk.end):
            return False
        if before is not None:
            return before.chunk.end == chunk.start
        on_grid = chunk.start > 0 and not chunk.start % self._chunk_tokens
        return on_grid and chunk.key != chunk.parent

    def has_place_for(self, chunk: ChunkRange) -> bool:
        """Return whether it may be added: its parent is known, and what is known agrees with it."""
        return chunk.parent in self.nodes and self.agrees_with(chunk)

    def presume_parent(self, chunk: ChunkRange) -> None:
        """Let `chunk` be added although the one before it, a full one, is known by name alone.

        Add something of `chunk` at once.
        """
        if chunk.parent not in self.nodes:
            start = chunk.start - self._chunk_tokens
            assert start >= 0, chunk
            self._new(ChunkRange(chunk.parent, ROOT, start, chunk.start), self.root)
            self.num_missing += 1

    def adopt(
        self, key: ChunkKey, parent: ChunkKey, start: int, end: int, size_bytes: int, ref: SlotRef
    ) -> Artifact | None:
        """Add a sealed artifact that a journal lists; None if it contradicts what is here.

        What it continues may be missing, see `presume_parent`. Call `show_adopted` once after the
        last: until then `match` does not see it, and it is not offered.
        """
        node, above = self.nodes.get(key), self.nodes.get(parent)
        if node is not None and ref.state_type in node.artifacts:
            return None
        if above is not None and above.chunk.end == start:  # as a rule: no objects of its own
            parent, start = above.chunk.key, above.chunk.end
        is_new = node is None or node.parent is not above
        chunk = ChunkRange(key, parent, start, end) if node is None or is_new else node.chunk
        if (chunk.start, chunk.end) != (start, end) or not self.agrees_with(chunk):
            return None
        self.presume_parent(chunk)
        artifact = self.add(chunk, ref.state_type, size_bytes)
        artifact.life, artifact.ssd = Life.SEALED, ref
        assert artifact.node.parent is not None
        artifact.node.parent.counts_ssd += ONE[ref.state_type]
        return artifact

    def show_adopted(self) -> None:
        """Let `match` see what was adopted. O(chunks)."""
        for node in self.nodes.values():
            if node.artifacts:
                self._refresh(node)

    def seal(self, artifact: Artifact) -> None:
        """Make it visible to `match`, and evictable once unpinned."""
        artifact.life = Life.SEALED
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
        parent = artifact.node.parent
        assert parent is not None
        parent.add_counts(ref.tier, ONE[artifact.state_type])
        if ref.tier is Tier.SSD:
            self._offer_above_ssd(parent)
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
        """Forget it. Its slots stay noted on it, for `Tiers` to release."""
        node = artifact.node
        assert not artifact.forgotten
        artifact.life = Life.FORGOTTEN
        del node.artifacts[artifact.state_type]
        self.num_missing += not node.artifacts
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
            artifact.life = Life.FORGOTTEN
            artifact.node.artifacts.clear()  # else these two would be a cycle
        if self.changed is not None:
            self.changed.update(dict.fromkeys(self.nodes))
        self.root = Node(self.root.chunk, None)
        self.nodes = {ROOT: self.root}
        self._tails = TailLengths()
        self.num_missing = 0
        return gone

    def _uncount(self, artifact: Artifact, tier: Tier | None) -> None:
        """The parent has one child less that holds the type in `tier` (None: at all)."""
        parent, kind = artifact.node.parent, artifact.state_type
        assert parent is not None
        if tier is None:
            parent.counts -= ONE[kind]
        else:
            parent.add_counts(tier, -ONE[kind])
        freed = parent.artifacts.get(kind)
        counts = parent.counts if tier is None else parent.counts_in(tier)
        if freed is not None and not counts & ANY[kind]:
            self._offer(freed)
        self._offer_above_ssd(parent)

    def _offer_above_ssd(self, node: Node) -> None:
        """Offer what has no other copy and what no artifact in DRAM alone depends on any more."""
        for artifact in node.artifacts.values():
            if artifact.ssd is None and may_go_missing(artifact):
                self._offer(artifact)

    def _after_missing(self, chunks: Iterable[ChunkRange]) -> list[StoredChunk]:
        """Return the chunks up to the last with something sealed; missing ones hold nothing."""
        found: list[StoredChunk] = []
        last = 0
        for chunk in chunks:
            node = self.nodes.get(chunk.key)
            stored = None if node is None else node.stored
            found.append(StoredChunk(chunk, _NOTHING) if stored is None else stored)
            last = last if stored is None else len(found)
        return found[:last]

    def _new(self, chunk: ChunkRange, parent: Node) -> Node:
        node = self.nodes[chunk.key] = Node(chunk, parent)
        parent.num_children += 1
        self.num_added += 1
        return node

    def _has_unknown_parent(self, node: Node) -> bool:
        """Return whether the chunk's parent is unknown."""
        return node.parent is self.root and node.chunk.start > 0

    def _attach_to_parent(self, node: Node, chunk: ChunkRange, parent: Node) -> None:
        """Give a node whose parent was unknown its parent, and its place in the chain."""
        self.root.num_children -= 1
        parent.num_children += 1
        node.chunk, node.parent = chunk, parent
        above: Node | None = parent
        while above is not None and above is not self.root:  # which their users count already
            above.users += node.users
            above = above.parent

    def _refresh(self, node: Node) -> None:
        """Recompute what `match` answers for this chunk. A new object: old answers stay true.

        It is put in place at once: `match` looks without the lock, and would miss it in between.
        """
        tiers: dict[StateType, Tier] = {}
        offsets = [-1] * len(StateType)
        for kind, artifact in node.artifacts.items():
            if artifact.sealed:
                tiers[kind] = Tier.SSD if artifact.dram is None else Tier.DRAM
                offsets[kind.position] = artifact.dram_offset
        before, stored = node.stored, None
        if tiers:
            shared, number = self._tiers.share(tiers)
            packed = _OFFSETS.pack(*offsets) if max(offsets) >= 0 else _NOWHERE
            stored = StoredChunk(node.chunk, shared, packed, stale=False, number=number)
        node.stored = stored
        if before is not None:
            before.stale = True
        if self.changed is not None:
            self.changed[node.key] = None
        length = node.chunk.end - node.chunk.start
        if (before is None) != (stored is None) and length < self._chunk_tokens:
            self._tails.count(node.chunk.parent, length, 1 if tiers else -1)

    def _prune(self, node: Node) -> None:
        """Remove the node, and parents left behind, once nothing hangs on them."""
        while node.parent is not None and not node.artifacts and not node.num_children:
            parent = node.parent
            del self.nodes[node.key]
            parent.num_children -= 1
            self.num_missing -= 1
            if not parent.num_children:
                for artifact in parent.artifacts.values():
                    self._offer(artifact)
            node = parent

    def check_integrity(self) -> None:
        """Raise AssertionError if any redundant field disagrees with the tree."""
        children: defaultdict[ChunkKey, list[Node]] = defaultdict(list)
        for key, node in self.nodes.items():
            assert node.key == key
            if node.parent is not None:
                assert self.nodes.get(node.parent.key) is node.parent, "a node is unreachable"
                children[node.parent.key].append(node)
        for node in self.nodes.values():
            below, end = children[node.key], node.chunk.end
            check_node(node, below)
            assert all(x.chunk.start == end or self._has_unknown_parent(x) for x in below)
            assert not any(self._has_unknown_parent(x) and x.artifacts for x in below)
            assert node is self.root or node.artifacts or below, "an empty leaf"
            stored = node.stored
            if stored is not None:
                assert self._tiers.share(stored.tiers) == (stored.tiers, stored.number)
        visible = (x.chunk for x in self.nodes.values() if x.stored is not None)
        lengths = ((x.parent, x.end - x.start) for x in visible)
        self._tails.check(x for x in lengths if x[1] < self._chunk_tokens)
        assert self.num_missing == sum(not x.artifacts for x in self.nodes.values()) - 1, (
            "but the root"
        )


class TailLengths:
    """Counts visible chunks shorter than a full one by their parent and their length in tokens."""

    def __init__(self) -> None:
        self._counts: dict[ChunkKey, dict[int, int]] = {}
        """By parent; the newest length is last. Replaced, never changed: `of` takes no lock."""

    def of(self, parent: ChunkKey) -> tuple[int, ...]:
        """Return the newest `MAX_TAILS` lengths. Needs no lock."""
        return tuple(islice(reversed(self._counts.get(parent, {})), MAX_TAILS))

    def number(self, parent: ChunkKey) -> int:
        """Return the number of visible short chunks after `parent`. Needs no lock."""
        return sum(self._counts.get(parent, {}).values())

    def count(self, parent: ChunkKey, length: int, step: int) -> None:
        """Add `step` to the count: 1 for a chunk that became visible, -1 for one that left."""
        lengths = dict(self._counts.get(parent, {}))
        count = lengths.get(length, 0) + step
        if step > 0 or not count:
            lengths.pop(length, None)
        if count:
            lengths[length] = count
        if lengths:
            self._counts[parent] = lengths
        else:
            self._counts.pop(parent, None)

    def check(self, visible: Iterable[tuple[ChunkKey, int]]) -> None:
        """Raise AssertionError unless exactly these (parent, length) are counted."""
        lengths: defaultdict[ChunkKey, Counter[int]] = defaultdict(Counter)
        for parent, length in visible:
            lengths[parent][length] += 1
        assert lengths == self._counts
