"""A save under way, as the store knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hetero_connector.artifacts.record import ChunkRange, Tier
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.base import Failure, Save
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.state import StoreState


@dataclass(frozen=True)
class ReservedSave(Save):
    """A save with the artifacts that wait for its bytes."""

    artifacts: list[Artifact]
    """Each pinned once; emptied when the save ends."""


def reserve(
    state: StoreState, chunk: ChunkRange, sizes: Mapping[StateType, int]
) -> ReservedSave | None:
    """Take all slots or none; needs the lock. None is counted."""
    tiers = state.tiers
    # The artifacts enter the index first: that keeps their parents.
    artifacts = [tiers.index.add(chunk, kind, size_bytes) for kind, size_bytes in sizes.items()]
    for artifact in artifacts:
        artifact.pins = 1
    for artifact in artifacts:
        ref = tiers.take_dram(artifact.state_type)
        if ref is None:
            state.fail(Failure.NO_SLOT, Tier.DRAM)
            for undone in artifacts:
                tiers.forget(undone)
                tiers.unpin(undone)
            return None
        tiers.attach(artifact, ref)
    offsets = {a.state_type: a.dram_offset for a in artifacts}
    return ReservedSave(chunk, offsets, dict(sizes), artifacts)


def taken(save: Save) -> list[Artifact]:
    """End a running save and return its artifacts. ValueError if it has ended before."""
    assert isinstance(save, ReservedSave), "a save that this store did not begin"
    if not save.artifacts:
        raise ValueError(f"the save of {save.chunk} has ended before")
    artifacts = list(save.artifacts)
    save.artifacts.clear()
    return artifacts
