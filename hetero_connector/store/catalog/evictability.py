"""Evictability: may an artifact leave a tier?

- Never: an artifact that is pinned or not sealed.
- From DRAM, while a copy is on SSD: any; those with no child in DRAM first.
- From SSD, while a copy is in DRAM: those with no child on SSD; those with no child at
  all first. So what is on SSD stays reachable without DRAM, as a restart needs it.
- The last copy of an artifact: only if no child chunk holds the same state type, and
  only if its chunk either keeps another artifact or has no children.
- The last copy, in DRAM, if no artifact in DRAM alone depends on it: any; those with no child in
  DRAM first. Of our own artifacts that is true only where another worker was the owner once.

So within a chain the deepest chunk of each state type goes first, and every stored chunk stays
reachable from the root through stored chunks, except through *missing* ones: nothing of them is
stored while something after them is, which ages like anything else.
"""

from __future__ import annotations

from enum import Enum

from hetero_connector.artifacts.record import Tier
from hetero_connector.store.catalog.nodes import ANY, Artifact, Life


class Evictability(Enum):
    """Says if an artifact may leave a tier."""

    FREE = "free"
    """Nothing deeper in the tier needs it: evict this kind first."""
    BACKED = "backed"
    """A deeper chunk depends on it, but another tier has a copy of it or of the deeper chunk."""
    BLOCKED = "blocked"
    """Must stay for now; `PrefixIndex` offers it again when that may have changed."""


def evictability(artifact: Artifact, tier: Tier) -> Evictability:
    """Return whether the artifact may leave `tier` now."""
    if artifact.pins or artifact.life is not Life.SEALED:
        return Evictability.BLOCKED
    if artifact.slot(tier) is None:
        return Evictability.BLOCKED
    node, kind = artifact.node, artifact.state_type
    if tier is Tier.DRAM and (artifact.ssd is not None or may_go_missing(artifact)):
        return Evictability.BACKED if node.counts_dram & ANY[kind] else Evictability.FREE
    if tier is Tier.SSD and artifact.dram is not None:
        if node.counts_ssd & ANY[kind]:
            return Evictability.BLOCKED
        return Evictability.BACKED if node.counts & ANY[kind] else Evictability.FREE
    if node.counts & ANY[kind] or (node.num_children and len(node.artifacts) == 1):
        return Evictability.BLOCKED
    return Evictability.FREE


def may_go_missing(artifact: Artifact) -> bool:
    """Return whether it may leave DRAM with no copy on SSD: no artifact in DRAM alone needs it.

    The last of our own artifacts of a chunk stays while a child holds another type there.
    """
    node, counted = artifact.node, ANY[artifact.state_type]
    if node.counts == node.counts_ssd:
        return True
    held = node.counts & counted
    return held == node.counts_ssd & counted and (artifact.replica or held > 0)
