"""Keeping copies in place while another thread checks them. A private part of `Catalog`."""

from __future__ import annotations

from typing import NamedTuple

from hetero_connector.artifacts.record import ChunkKey, SlotRef, Tier
from hetero_connector.store.base import Failure
from hetero_connector.store.catalog.forgetting import forget
from hetero_connector.store.catalog.loads import Loads
from hetero_connector.store.catalog.nodes import Artifact
from hetero_connector.store.catalog.tiers import Tiers


class ScrubbedCopy(NamedTuple):
    """A copy of an artifact in one tier, that stays in its slot while it is checked."""

    artifact: Artifact
    slot: SlotRef
    offset: int
    """Its place in the arena or in the slab file."""


def begin(tiers: Tiers, chunk: ChunkKey) -> list[ScrubbedCopy]:
    """Return the copies of a chunk that have a checksum, none if it is not stored any more."""
    node, copies = tiers.index.nodes.get(chunk), list[ScrubbedCopy]()
    for artifact in node.artifacts.values() if node is not None else ():
        if not artifact.sealed or artifact.checksum is None:
            continue
        if artifact.dram is not None:
            artifact.pins += 1
            copies.append(ScrubbedCopy(artifact, artifact.dram, artifact.dram_offset))
        if artifact.ssd is not None:
            assert tiers.ssd is not None
            tiers.ssd.begin_transfer(artifact.ssd)
            copies.append(ScrubbedCopy(artifact, artifact.ssd, tiers.ssd.offset(artifact.ssd)))
    return copies


def finish(tiers: Tiers, loads: Loads, copy: ScrubbedCopy, failure: Failure | None) -> bool:
    """End the check of a copy; with a `failure` forget its artifact in both tiers.

    The other copy may have been made from this one. Return whether the damaged copy was the
    artifact's own still.
    """
    artifact, tier = copy.artifact, copy.slot.tier
    is_lost = failure is not None and artifact.slot(tier) == copy.slot and not artifact.forgotten
    if tier is Tier.SSD:
        assert tiers.ssd is not None
        tiers.ssd.end_transfer(copy.slot)
    if failure is not None and is_lost:
        loads.count_failure(failure, tier)
        if failure is Failure.IO_ERROR:
            assert tiers.ssd is not None
            tiers.ssd.retire(copy.slot)
        forget(tiers, loads, artifact)
        tiers.forget_remains(artifact.node)
    if tier is Tier.DRAM:
        tiers.unpin(artifact)
    return is_lost
