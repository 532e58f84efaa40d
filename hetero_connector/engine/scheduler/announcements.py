"""Announcements: the blocks that a router may count on, derived from the chunks that are stored.

A router follows a prompt block by block, and takes a worker to have every block that was announced.
So a chunk is *announced* only if a request that goes on after it, in a chain that is stored, finds
it restored: its prefix-proportional state and that of all chunks before it is here, and further on
there is a boundary with a checkpoint, or enough of the chain for a window replay that resumes
behind this chunk. What is missing to that is the chunk's *shortfall*, in tokens.

Chunks share blocks: a short chunk and the full one that continues it, or two versions of an
adapter. So a medium's blocks are counted, and only the first announcement of a block and its last
withdrawal are published.

Pure: no vLLM, no lock, no clock. All methods belong to one thread.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Any

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange

BlockHash = int | bytes
_MAX_REMOVED = 1024
"""Blocks that one change withdraws."""
_MAX_LOOKS = 512
"""Chunks that one call of `take` looks at: a few milliseconds."""


class Medium(StrEnum):
    """A kind of storage, by the name that vLLM gives it in its events."""

    CPU = "CPU"
    STORAGE = "STORAGE"


@dataclass(frozen=True, slots=True)
class ChunkBlocks:
    """The engine's blocks within one chunk, as its events describe them."""

    chunk: ChunkRange
    root: bytes
    """The root of the chain, see `ChainHasher.root`."""
    hashes: tuple[BlockHash, ...]
    """One for each block that the chunk has whole."""
    parent_hash: BlockHash | None
    """The block before; None at the beginning of a prompt."""
    tokens: array[int]
    """The tokens of these blocks."""
    lora_id: int | None = None
    lora_name: str | None = None
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    """For each block, the rest of what its hash is made of; None if that is nothing."""
    is_replayable: bool = True
    """False if the windows before its end cannot be rebuilt by a replay."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """The blocks of a chunk from the `first` on are in `medium` now."""

    blocks: ChunkBlocks
    first: int
    medium: Medium


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """These blocks have left `medium`."""

    hashes: tuple[BlockHash, ...]
    medium: Medium


Change = BlocksStored | BlocksRemoved


class _Chunk:
    """A described chunk, its place in its chain, and the media it is announced in."""

    __slots__ = (
        "announced", "blocks", "children", "is_checkpoint", "is_stored", "media", "parent",
        "shortfall",
    )  # fmt: skip

    def __init__(self, blocks: ChunkBlocks, parent: _Chunk | None) -> None:
        self.blocks = blocks
        self.parent = parent
        self.children: dict[ChunkKey, _Chunk] = {}
        self.media: Sequence[Medium] = ()
        """The media that hold all its prefix-proportional state."""
        self.is_checkpoint = False
        """True if a request can resume at its end without a replay."""
        self.is_stored = True
        """False once nothing of it is stored, or being saved."""
        self.shortfall: float = inf
        """Tokens that its chain is too short to resume behind it; infinite without a replay."""
        self.announced: Sequence[Medium] = ()


class Announcements:
    """The described chunks of one engine and the changes that consumers have not been told."""

    def __init__(self, replay_tokens: int | None = None) -> None:
        """`replay_tokens`: the length of a window replay; None if the engine makes none."""
        self._replay_tokens = inf if replay_tokens is None else replay_tokens
        self._root: bytes | None = None
        self._chunks: dict[ChunkKey, _Chunk] = {}
        self._first: dict[ChunkKey, _Chunk] = {}
        """The first chunks of their chains."""
        self._counts: dict[Medium, dict[BlockHash, int]] = {medium: {} for medium in Medium}
        """Announced chunks that have a block, by medium."""
        self._changes: deque[Change] = deque()
        self._to_look_at: deque[_Chunk] = deque()
        """Chunks whose announcement may have to change; parents before their children."""

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, chunk: ChunkKey) -> bool:
        """Return whether the chunk is described, and so all chunks before it are."""
        return chunk in self._chunks

    def end_of(self, chunk: ChunkKey) -> int:
        """Return the boundary at the end of a described chunk."""
        return self._chunks[chunk].blocks.chunk.end

    @property
    def has_backlog(self) -> bool:
        """Return whether `take` has something to do."""
        return bool(self._changes or self._to_look_at)

    def describe(self, blocks: ChunkBlocks) -> None:
        """Add a chunk, which is announced by `update`. KeyError if its parent is not described."""
        chunk = blocks.chunk
        parent = None if chunk.parent == ROOT else self._chunks[chunk.parent]
        added = self._chunks[chunk.key] = _Chunk(blocks, parent)
        (self._first if parent is None else parent.children)[chunk.key] = added

    def update(
        self, chunk: ChunkKey, media: Sequence[Medium], *, is_checkpoint: bool, is_stored: bool
    ) -> None:
        """Note the present copies of a chunk; one that is not described is ignored.

        `media`: those that hold all its prefix-proportional state. `is_checkpoint`: its boundary
        state is stored as well, in any tier. `is_stored`: False lets it be forgotten.
        """
        found = self._chunks.get(chunk)
        if found is None:
            return
        found.media, found.is_checkpoint, found.is_stored = media, is_checkpoint, is_stored
        self._look_above(found)
        if not is_stored:
            self._forget(found)

    def set_root(self, root: bytes | None) -> None:
        """Announce only chains that begin with this root; None: none at all."""
        if root != self._root:
            self._root = root
            self._to_look_at.extend(self._first.values())

    def repeat(self) -> None:
        """Announce everything again: consumers have dropped what they knew."""
        self._changes.clear()
        for counts in self._counts.values():
            counts.clear()
        for chunk in self._chunks.values():
            chunk.announced = ()
        self._to_look_at.extend(self._first.values())

    def take(self, limit: int) -> list[Change]:
        """Return the next changes, oldest first, `limit` at most."""
        looks = _MAX_LOOKS
        while self._to_look_at and looks > len(self._changes):
            self._announce(self._to_look_at.popleft())
            looks -= 1
        taken: list[Change] = []
        while self._changes and len(taken) < limit:
            taken.append(self._next_change())
        return taken

    def _look_above(self, chunk: _Chunk) -> None:
        """Recompute the shortfall from `chunk` up, and have all be looked at where it changed."""
        path = [chunk]
        chunk.shortfall = self._shortfall(chunk)
        above = chunk.parent
        while above is not None and (shortfall := self._shortfall(above)) != above.shortfall:
            above.shortfall = shortfall
            path.append(above)
            above = above.parent
        self._to_look_at.extend(reversed(path))

    def _shortfall(self, chunk: _Chunk) -> float:
        if not chunk.media:
            return inf
        if chunk.is_checkpoint:
            return 0
        shortfall = self._replay_tokens if chunk.blocks.is_replayable else inf
        for child in chunk.children.values():
            child_range = child.blocks.chunk
            child_tokens = child_range.end - child_range.start
            shortfall = min(shortfall, max(0, child.shortfall - child_tokens))
            if not shortfall:
                break
        return shortfall

    def _announce(self, chunk: _Chunk) -> None:
        """Bring the announcement of one chunk up to date; its children follow if need be."""
        before, now = chunk.announced, self._announceable(chunk)
        if before == now:
            return
        chunk.announced = now
        for medium in now:
            if medium not in before:
                self._add(chunk.blocks, medium)
        for medium in before:
            if medium not in now:
                self._remove(chunk.blocks, medium)
        if not before or not now:
            self._to_look_at.extend(chunk.children.values())

    def _announceable(self, chunk: _Chunk) -> Sequence[Medium]:
        if chunk.parent is None:
            is_reachable = chunk.blocks.root == self._root
        else:
            is_reachable = bool(chunk.parent.announced)
        return chunk.media if is_reachable and not chunk.shortfall else ()

    def _add(self, blocks: ChunkBlocks, medium: Medium) -> None:
        """Count the blocks. Those that others have announced are the first ones: hashes chain."""
        counts, first = self._counts[medium], 0
        for block in blocks.hashes:
            count = counts.get(block, 0)
            counts[block] = count + 1
            first += count > 0
        if first < len(blocks.hashes):
            self._changes.append(BlocksStored(blocks, first, medium))

    def _remove(self, blocks: ChunkBlocks, medium: Medium) -> None:
        counts, removed = self._counts[medium], []
        for block in blocks.hashes:
            count = counts.pop(block) - 1
            if count:
                counts[block] = count
            else:
                removed.append(block)
        if removed:
            self._changes.append(BlocksRemoved(tuple(removed), medium))

    def _next_change(self) -> Change:
        """Return the next change; withdrawals that follow each other are one."""
        change = self._changes.popleft()
        if isinstance(change, BlocksStored):
            return change
        hashes = list(change.hashes)
        while self._changes and len(hashes) < _MAX_REMOVED:
            following = self._changes[0]
            if isinstance(following, BlocksStored) or following.medium is not change.medium:
                break
            hashes += following.hashes
            self._changes.popleft()
        return BlocksRemoved(tuple(hashes), change.medium)

    def _forget(self, chunk: _Chunk) -> None:
        """Forget a chunk that is not stored, and those before it that it kept, unless it has
        children."""
        above: _Chunk | None = chunk
        while above is not None and not above.children and not above.is_stored:
            self._announce(above)
            key, parent = above.blocks.chunk.key, above.parent
            del self._chunks[key]
            del (self._first if parent is None else parent.children)[key]
            above = parent
