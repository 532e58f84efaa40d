"""Copies of an artifact, as one engine describes its own to the fleet, and finds another's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True, slots=True)
class ExportedCopy:
    """This engine's copy of an artifact."""

    dram_offset: int
    """Byte offset in the DRAM arena; -1 if it is on SSD only, where peers cannot read it."""
    generation: int
    """Generation of the DRAM slot; 0 without one."""
    size_bytes: int
    checksum: bytes
    on_ssd: bool = False


@dataclass(frozen=True, slots=True)
class ExportChange:
    """The present copy of an artifact in this engine, or None if it has left."""

    chunk: ChunkRange
    state_type: StateType
    copy: ExportedCopy | None
    token: int = 0
    """The fencing token under which this engine owns it; 0 if no ownership is known."""

    @property
    def id(self) -> ArtifactId:
        """The artifact's name."""
        return ArtifactId(self.chunk.key, self.state_type)


class PeerCopy(NamedTuple):
    """Another engine's copy of an artifact, as the directory lists it. Nothing in it is trusted.

    It is in that engine's DRAM or, if `storage` is set, on the SSD of an engine whose lease has
    ended. A named tuple, not a dataclass, because the lookup of a long prompt makes thousands.
    """

    holder: int
    """The epoch under which the worker listed it."""
    dram_offset: int
    """Byte offset in that worker's DRAM arena."""
    generation: int
    """Generation of the slot there. A different one means that the slot was used again."""
    size_bytes: int
    checksum: bytes
    """xxh3-128 of the bytes, seeded with the artifact's id."""
    token: int = 0
    """The fencing token it was listed under. Only the fence uses it, see `Peers.may_use`."""
    asked_s: float = 0.0
    """The fence's clock before the directory was asked."""
    storage: str = ""
    """The SSD directory that its dead holder left it in; "" if it is served from DRAM."""
