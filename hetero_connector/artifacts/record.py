"""The values that describe stored state: chunks, artifacts, slots, tiers."""

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
    """A place for artifacts' bytes. The nearest is first."""

    DRAM = "dram"
    SSD = "ssd"
    PEER = "peer"


@dataclass(frozen=True, slots=True)
class ChunkRange:
    """A chunk of a chain: its key, its parent's, and its tokens [start, end).

    `end` is the boundary at which a request may resume. A chunk shorter than the configured chunk
    size is a tail: the end of a request, never a parent.
    """

    key: ChunkKey
    parent: ChunkKey
    start: int
    end: int


class ArtifactId(NamedTuple):
    """The name of an artifact: model, tokens and range are part of the chunk key.

    A named tuple, not a dataclass, because a long prompt makes and looks up hundreds of them
    between two steps of the engine.
    """

    chunk: ChunkKey
    state_type: StateType

    @property
    def seed(self) -> int:
        """64 bits of the id that seed the checksum: bytes of another artifact never verify."""
        kind = self.state_type.position
        return int.from_bytes(self.chunk[:8], "little") ^ (kind * 0x9E3779B97F4A7C15 & (2**64 - 1))


@dataclass(frozen=True, slots=True)
class SlotRef:
    """A place in a tier. `generation` grows each time the slot gets another artifact."""

    tier: Tier
    state_type: StateType
    slot: int
    generation: int


UNNUMBERED = 255
"""Stands for "no number": the greatest byte."""


@dataclass(slots=True)
class StoredChunk:
    """A chunk with the tiers of its stored state. The index makes a new one when that changes."""

    chunk: ChunkRange
    tiers: Mapping[StateType, Tier]
    """The fastest tier of each sealed artifact. Never changed; chunks with equal tiers may share
    one mapping, see `distinct_tiers`."""
    offsets: bytes = b""
    """Offsets of its sealed artifacts in the DRAM arena, in bytes: an int64 for each state type by
    `StateType.position`; -1 if it is not there. Packed, because a long prompt has thousands that
    are used at once."""
    stale: bool = True
    """True if the index may have changed since."""
    number: int = UNNUMBERED
    """The number of `tiers` in its `SharedTiers`. Chunks with equal numbers have equal tiers."""


class SharedTiers:
    """One numbered mapping for all chunks whose state is in the same tiers.

    The numbers fit into a byte, so thousands of chunks are compared as bytes.
    """

    def __init__(self) -> None:
        self._known: dict[
            frozenset[tuple[StateType, Tier]], tuple[Mapping[StateType, Tier], int]
        ] = {}

    def share(self, tiers: Mapping[StateType, Tier]) -> tuple[Mapping[StateType, Tier], int]:
        """Return the shared mapping equal to `tiers`, and its number.

        `tiers` must not change any more. The number is `UNNUMBERED` if there are too many.
        """
        key = frozenset(tiers.items())
        known = self._known.get(key)
        if known is None:
            known = self._known[key] = tiers, min(len(self._known), UNNUMBERED)
        return known


def distinct_tiers(chunks: Sequence[StoredChunk]) -> list[Mapping[StateType, Tier]]:
    """Return the `tiers` of all chunks, each mapping object once: many chunks share few."""
    all_tiers = list(map(_tiers, chunks))
    if not all_tiers:
        return []
    if all_tiers.count(all_tiers[0]) == len(all_tiers):  # compares by identity first
        return all_tiers[:1]
    return list({id(x): x for x in all_tiers}.values())


def num_unbroken(
    chunks: Sequence[StoredChunk], needed: Collection[StateType], local_tokens: int = 0
) -> int:
    """Count the chunks before the first missing one.

    A chunk is missing if it ends after the local tokens and nothing of it is stored, or one of the
    `needed` types is not: nothing after it can be restored.
    """
    gaps = [x for x in distinct_tiers(chunks) if not x or any(t not in x for t in needed)]
    if not gaps:  # the usual case, without a look at each of thousands
        return len(chunks)
    for count, stored in enumerate(chunks):
        if stored.tiers in gaps and stored.chunk.end > local_tokens:
            return count
    return len(chunks)


_tiers = attrgetter("tiers")
