"""What the scheduler's thread and the I/O thread share: tiers, queues, and the lock over them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from hetero_connector.artifacts.index import Artifact
from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, ReadTiming, StoreConfig
from hetero_connector.store.tiers import Tiers

if TYPE_CHECKING:
    from hetero_connector.store.restore import ArtifactRestore

GAUGE_INTERVAL_S = 1.0


@dataclass(eq=False)
class Load:
    """One artifact to bring to DRAM or, if it is there, to verify; shared by all who wait.

    It pins the artifact from the start to `settle`.
    """

    artifact: Artifact
    target: SlotRef | None
    """DRAM slot to read into; None: the bytes are in DRAM and only their checksum is checked."""
    waiting: list[ArtifactRestore] = field(default_factory=list)


@dataclass(frozen=True)
class Spill:
    """A sealed artifact on its way to the I/O thread."""

    artifact: Artifact
    due_s: float
    """Clock time before which its write need not start."""


class StoreState:
    """Guarded by `lock` (a condition that wakes the I/O thread); never held during I/O."""

    def __init__(
        self,
        tiers: Tiers,
        config: StoreConfig,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self.lock = threading.Condition()
        self.tiers = tiers
        self.config = config
        self.recorder = recorder
        self.clock = clock
        self.loads: deque[Load] = deque()
        """Not yet taken by the I/O thread, oldest first."""
        self.loading: dict[Artifact, Load] = {}
        """Every load that is not settled."""
        self.reading_bytes = 0
        """Of the loads that are not settled and have to be read."""
        self.spills: deque[Spill] = deque()
        self.spilling = 0
        """Artifacts the I/O thread is writing."""
        self.used: list[list[Artifact]] = []
        """What released restores had pinned, for the journal's recency."""
        self.timings: deque[ReadTiming] = deque(maxlen=256)
        """Appended by the I/O thread, taken by the scheduler's; needs no lock."""
        self.flushing = False
        """Spills are due at once."""
        self.closing = False
        self.io_alive = True
        """Whether loads will be served."""
        self.ssd_writable = config.ssd_dir is not None
        self._gauges_due_s = 0.0

    @property
    def wants_spills(self) -> bool:
        """Whether the I/O thread has anything to do with a newly sealed artifact."""
        return self.ssd_writable or (self.config.verify == "all" and self.io_alive)

    def fail(self, cause: Failure, tier: Tier, count: int = 1) -> None:
        """Count failures."""
        self.recorder.add("heterocache_failures", count, cause=cause.value, tier=tier.value)

    def count_read(self, tier: Tier, state_type: StateType, size_bytes: int) -> None:
        """Count bytes served from a tier."""
        self.recorder.add(
            "heterocache_read_bytes", size_bytes, tier=tier.value, state_type=state_type.value
        )

    def disown(self, load: Load, failure: Failure) -> None:
        """Tell those who wait that it failed, though its transfer goes on; needs the lock."""
        for restore in load.waiting:
            restore.arrived(load.artifact, failure)
        load.waiting.clear()

    def settle(self, load: Load, failure: Failure | None) -> None:
        """End a load, with the lock held: tell those who wait, and drop the load's pin."""
        artifact = load.artifact
        del self.loading[artifact]
        if load.target is not None:
            self.reading_bytes -= artifact.size_bytes
        for restore in load.waiting:
            restore.arrived(artifact, failure)
        load.waiting.clear()
        self.tiers.unpin(artifact)

    def refresh_gauges(self) -> None:
        """Publish occupancy, at most once a second; needs the lock."""
        now = self.clock()
        if now >= self._gauges_due_s:
            self._gauges_due_s = now + GAUGE_INTERVAL_S
            self.tiers.publish_gauges()
            if self.config.ssd_dir is not None:
                self.recorder.set("heterocache_ssd_writable", float(self.ssd_writable))
