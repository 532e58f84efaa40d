"""What an engine tells its fleet about an artifact it holds."""

from __future__ import annotations

from dataclasses import dataclass

from hetero_connector.artifacts.record import ArtifactId, ChunkRange
from hetero_connector.spec.state_types import StateType


@dataclass(frozen=True, slots=True)
class ExportedCopy:
    """Where an artifact lies in this engine, and how to know it."""

    dram_offset: int
    """Byte offset in the DRAM arena; -1 when it is on SSD only, where peers cannot read it."""
    generation: int
    """Of the DRAM slot; 0 without one."""
    size_bytes: int
    checksum: bytes
    replica: bool
    """Somebody else's artifact: read from a peer, or computed here as well."""
    on_ssd: bool = False


@dataclass(frozen=True, slots=True)
class ExportChange:
    """An artifact as it stands now: where it is, or (None) that it has left this engine."""

    chunk: ChunkRange
    state_type: StateType
    copy: ExportedCopy | None
    token: int = 0
    """The fencing token under which this engine owns it; 0: it is not known to."""

    @property
    def id(self) -> ArtifactId:
        """The artifact's name."""
        return ArtifactId(self.chunk.key, self.state_type)
