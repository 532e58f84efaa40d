"""The values that describe stored bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, NewType

from hetero_connector.spec.state_types import StateType

ChunkKey = NewType("ChunkKey", bytes)
"""16-byte chain hash: names a chunk and, through its parents, the whole prefix before it."""

ROOT = ChunkKey(bytes(16))
"""Parent of every first chunk."""


class Tier(StrEnum):
    """Where an artifact's bytes are."""

    DRAM = "dram"
    SSD = "ssd"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """A chunk of a chain: its key, its parent's, and its tokens [start, end).

    `end` is the boundary at which a request may resume. A chunk shorter than the
    configured chunk size is a tail: the end of a request, never a parent.
    """

    key: ChunkKey
    parent: ChunkKey
    start: int
    end: int


class ArtifactId(NamedTuple):
    """Names an artifact: the model, tokens and range are inside the chunk key.

    A named tuple, not a dataclass: a long prompt makes and looks up hundreds of them
    between two steps of the engine.
    """

    chunk: ChunkKey
    state_type: StateType

    @property
    def seed(self) -> int:
        """64 bits of the id to seed the checksum: bytes of another artifact never verify."""
        kind = self.state_type.position
        return int.from_bytes(self.chunk[:8], "little") ^ (kind * 0x9E3779B97F4A7C15 & (2**64 - 1))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in a tier. `generation` grows each time the slot is given to another artifact."""

    tier: Tier
    state_type: StateType
    slot: int
    generation: int


UNNUMBERED = 255
"""The greatest byte: in place of a number."""


@dataclass(slots=True)
class StoredChunk:
    """What the store holds of a chunk. The index answers with a new one when that changes."""

    chunk: ChunkRange
    tiers: Mapping[StateType, Tier]
    """For each sealed artifact its fastest tier. Never changed; chunks that hold the same may
    share one, see `distinct_tiers`."""
    offsets: bytes = b""
    """Where its sealed artifacts lie in the DRAM arena: an int64 for each state type by
    `StateType.position`, in bytes; -1 for those that do not. Packed, because a long prompt's
    thousands of numbers are looked at at once."""
    stale: bool = True
    """Whether the index may answer differently by now."""
    number: int = UNNUMBERED
    """Of `tiers`, by the `SharedTiers` it comes from. Chunks of one number hold the same."""


class SharedTiers:
    """One mapping for all the chunks that hold the same, numbered.

    A long prompt's thousands of chunks are told apart by one byte each.
    """

    def __init__(self) -> None:
        self._known: dict[
            frozenset[tuple[StateType, Tier]], tuple[Mapping[StateType, Tier], int]
        ] = {}

    def share(self, tiers: Mapping[StateType, Tier]) -> tuple[Mapping[StateType, Tier], int]:
        """The mapping to use in place of `tiers`, which must not change any more; its number.

        `UNNUMBERED` once so many combinations have been seen.
        """
        key = frozenset(tiers.items())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tiers, min(len(self._known), UNNUMBERED)
        return known


def distinct_tiers(chunks: Sequence[StoredChunk]) -> list[Mapping[StateType, Tier]]:
    """The `tiers` of all the chunks, each mapping object once: hundreds of chunks share few."""
    all_tiers = list(map(_tiers, chunks))
    if not all_tiers:
        return []
    if all_tiers.count(all_tiers[0]) == len(all_tiers):  # compares by identity first
        return all_tiers[:1]
    return list({id(x): x for x in all_tiers}.values())


def num_unbroken(
    chunks: Sequence[StoredChunk], needed: Collection[StateType], local_tokens: int = 0
) -> int:
    """How many come before the first that ends past the local tokens and holds nothing, or lacks
    one of the `needed` types: those without which nothing after a chunk can be restored."""
    gaps = [x for x in distinct_tiers(chunks) if not x or any(t not in x for t in needed)]
    if not gaps:  # as a rule: no look at each of thousands
        return len(chunks)
    for count, stored in enumerate(chunks):
        if stored.tiers in gaps and stored.chunk.end > local_tokens:
            return count
    return len(chunks)


_tiers = attrgetter("tiers")
