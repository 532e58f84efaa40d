"""The values that describe stored bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
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


@dataclass(frozen=True)
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
        kind = list(StateType).index(self.state_type)
        return int.from_bytes(self.chunk[:8], "little") ^ (kind * 0x9E3779B97F4A7C15 & (2**64 - 1))


@dataclass(frozen=True)
class SlotRef:
    """A place in a tier. `generation` grows each time the slot is given to another artifact."""

    tier: Tier
    state_type: StateType
    slot: int
    generation: int


@dataclass(frozen=True)
class StoredChunk:
    """A chunk the store holds: for each sealed artifact, its fastest tier."""

    chunk: ChunkRange
    tiers: Mapping[StateType, Tier]

    @cached_property
    def slowest(self) -> Tier:
        """The tier that makes a restore of the whole chunk wait longest."""
        return max(self.tiers.values(), key=_SPEED.__getitem__)


_SPEED = {Tier.DRAM: 0, Tier.PEER: 1, Tier.SSD: 2}
