"""Counts of what is under way in a store."""

from __future__ import annotations

from typing import NamedTuple

from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.loads import Source


class Snapshot(NamedTuple):
    loads_queued: int
    loads: int
    writes_queued: int
    writing: int
    unsummed: int
    pending_claims: int
    rows_to_forget: int
    pinned: int


def snapshot(catalog: Catalog) -> Snapshot:
    """Count what is under way, all at one moment."""
    with catalog.locked():
        return Snapshot(
            loads_queued=sum(map(catalog.loads.num_queued, Source)),
            loads=len(catalog.loads),
            writes_queued=len(catalog.writes),
            writing=catalog.writes.num_writing,
            unsummed=catalog.writes.num_unsummed,
            pending_claims=len(catalog.writes.claims),
            rows_to_forget=len(catalog.tiers.forgotten) + catalog.tiers.journal_stale,
            pinned=len(catalog.tiers.pinned()),
        )
