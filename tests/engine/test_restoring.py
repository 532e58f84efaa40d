"""What a request plans over once a read of it has failed."""

from __future__ import annotations

import pytest

from hetero_connector.artifacts.record import ArtifactId, StoredChunk, Tier, distinct_tiers
from hetero_connector.engine.restoring import without
from tests.planner.chains import KV, SWA, chain_of

IN_DRAM, ON_SSD = {KV: Tier.DRAM, SWA: Tier.DRAM}, {KV: Tier.SSD, SWA: Tier.DRAM}


@pytest.fixture
def chunks() -> list[StoredChunk]:
    return chain_of([IN_DRAM] * 30 + [ON_SSD] * 30)


def test_what_failed_is_missing_and_the_other_chunks_are_as_they_were(
    chunks: list[StoredChunk],
) -> None:
    left = without(chunks, {ArtifactId(chunks[40].chunk.key, KV)}, dram_only=False)
    assert left[40] == StoredChunk(chunks[40].chunk, {SWA: Tier.DRAM})
    assert all(a is b for a, b in zip(left, chunks, strict=True) if a is not left[40])


def test_in_the_end_only_dram_counts_and_a_long_chain_still_holds_few_mappings(
    chunks: list[StoredChunk],
) -> None:
    left = without(chunks, {ArtifactId(chunks[10].chunk.key, SWA)}, dram_only=True)
    told = [stored.tiers for stored in left]
    assert told == [IN_DRAM] * 10 + [{KV: Tier.DRAM}] + [IN_DRAM] * 19 + [{SWA: Tier.DRAM}] * 30
    assert len(distinct_tiers(left)) == 3
