"""Define the I/O thread's work: loads, writes of sealed artifacts, journal rows to forget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hetero_connector.artifacts.copies import PeerCopy
from hetero_connector.artifacts.record import ArtifactId, SlotRef, Tier
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.nodes import Artifact


class Waiting(Protocol):
    """Who waits for a load: a restore, or a prefetch."""

    def arrived(self, artifact: Artifact, failure: Failure | None) -> None:
        """The load has ended. Called once, with the store's lock held."""
        ...


@dataclass(eq=False)
class Load:
    """One artifact to bring to DRAM or, if it is there, to verify; shared by all who wait.

    It pins the artifact from the start to `settle`.
    """

    artifact: Artifact
    target: SlotRef | None
    """DRAM slot to read into; None: the bytes are in DRAM and only their checksum is checked."""
    waiting: list[Waiting] = field(default_factory=list)
    copy: PeerCopy | None = None
    """Where another engine has it, or left it; None: it is read from our own SSD."""
    counts: bool = False
    """True if it is among `StoreState.reading_bytes`."""
    late: bool = False
    """True if its read was given up, and has not ended."""

    @property
    def adopts(self) -> bool:
        """Return whether it is read from what a dead engine left on an SSD."""
        return self.copy is not None and bool(self.copy.storage)

    @property
    def tier(self) -> Tier:
        """Where the bytes come from."""
        if self.target is None:
            return Tier.DRAM
        return Tier.SSD if self.copy is None or self.adopts else Tier.PEER


@dataclass(frozen=True)
class Spill:
    """A sealed artifact on its way to the I/O thread."""

    artifact: Artifact
    due_s: float
    """Clock time before which its write need not start."""


@dataclass(frozen=True)
class Forgotten:
    """An SSD slot whose journal row must be gone before the slot may be written again."""

    id: ArtifactId
    ref: SlotRef
