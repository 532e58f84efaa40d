"""Choose which artifacts are written to SSD, and their slots. Runs on the I/O thread."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hetero_connector.artifacts.record import SlotRef, Tier
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.slots import SlotPool
from hetero_connector.store.catalog.state import StoreState
from hetero_connector.store.ssd.admission import (
    Admission,
    deepest_on_ssd,
    parent_is_there,
    waits_for_parent,
)
from hetero_connector.store.ssd.write_queue import SpillQueue


@dataclass(frozen=True)
class Write:
    """An artifact on its way to SSD. Both slots are held."""

    artifact: Artifact
    source: SlotRef
    target: SlotRef


class Placement:
    """Takes slots for what is worth its write; what is not, or finds none, is let go."""

    def __init__(self, state: StoreState, queue: SpillQueue, admission: Admission) -> None:
        self._state = state
        self._queue = queue
        self._admission = admission

    def choose(self, artifacts: list[Artifact]) -> list[Artifact]:
        """Those to write; what makes way for them is evicted, and its rows wait for the journal."""
        ssd = self._state.tiers.ssd
        if ssd is None or not self._state.ssd_writable:
            self._queue.let_go(artifacts)
            return []
        admitted = self._admit(artifacts)
        self._make_room(admitted, ssd)
        return admitted

    def place(self, artifacts: list[Artifact]) -> list[Write]:
        """Give each an SSD slot; those without one stay in DRAM only."""
        state, ssd = self._state, self._state.tiers.ssd
        assert ssd is not None
        writes: list[Write] = []
        homeless: list[Artifact] = []
        num_refused = 0
        placed: set[Artifact] = set()
        with state.lock:
            for artifact in artifacts:
                target = None
                if not artifact.forgotten and parent_is_there(artifact, placed):
                    target = ssd.take(artifact.state_type)
                if target is None:
                    self._admission.refund(artifact)
                    homeless.append(artifact)
                    if waits_for_parent(artifact, state.spills):
                        state.offer(artifact)
                    else:
                        num_refused += not artifact.forgotten
                    continue
                assert artifact.dram is not None
                ssd.hold(target)
                state.tiers.dram.hold(artifact.dram)
                placed.add(artifact)
                writes.append(Write(artifact, artifact.dram, target))
            if num_refused:
                state.fail(Failure.NO_SLOT, Tier.SSD, num_refused)
        self._queue.let_go(homeless)
        return writes

    def _admit(self, artifacts: list[Artifact]) -> list[Artifact]:
        """Those that are ours and worth their write; the others stay in DRAM only."""
        state = self._state
        with state.lock:
            ours = state.unjudged.sift(artifacts, at_once=state.flushing)
            admitted = self._admission.admit(ours)
            taken = set(admitted)
            for artifact in ours:
                if artifact in taken:
                    continue
                if waits_for_parent(artifact, state.spills):
                    state.offer(artifact)
                    continue
                state.recorder.add(
                    "heterocache_ssd_writes_refused", state_type=artifact.state_type.value
                )
        self._queue.let_go(list(set(artifacts).difference(admitted)))
        return admitted

    def _make_room(self, artifacts: list[Artifact], ssd: SlotPool) -> None:
        """Evict from SSD what the batch needs, but never what the batch continues."""
        state = self._state
        with state.lock:
            above = [x for x in map(deepest_on_ssd, artifacts) if x is not None]
            for artifact in above:
                artifact.pins += 1
            for kind, count in Counter(a.state_type for a in artifacts).items():
                short = count - ssd.free(kind)
                while short > 0 and state.tiers.evict_ssd(kind):
                    short -= 1
            for artifact in above:
                state.tiers.unpin(artifact)
