"""Stores of which most chunks have no checkpoint: a full tier must still make room."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ChunkRange
from hetero_connector.store.artifact_store import ArtifactStore
from tests.store.filling import DENSE, SIZES, Bench, Disk, chain, put

BARE = {DENSE: SIZES[DENSE]}


def turn(store: ArtifactStore, chunks: list[ChunkRange]) -> None:
    """Only the last chunk gets a checkpoint."""
    put(store, chunks[:-1], BARE)
    put(store, chunks[-1:])


@pytest.mark.parametrize("eviction", ["leaf_lru", "value"])
def test_a_full_dram_tier_goes_on_taking_new_sessions(eviction: str) -> None:
    store = Bench(None).open(dram_chunks=8, eviction=eviction)
    for number in range(10):
        chunks = chain(f"s{number}", 4)
        turn(store, chunks)
        assert len(store.match(chunks)) == 4
        store.check_integrity()
    assert store.match(chain("s0", 4)) == [], "the oldest made room"
    store.close()


@pytest.mark.parametrize("eviction", ["leaf_lru", "value"])
def test_a_full_ssd_tier_goes_on_taking_new_sessions(eviction: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ssd", Disk())
    store = bench.open(dram_chunks=8, ssd_chunks=12, eviction=eviction)
    for number in range(10):
        turn(store, chain(f"s{number}", 4))
        assert store.flush(60)
        store.check_integrity()
    store.close()
    store = bench.open(dram_chunks=8, ssd_chunks=12, eviction=eviction)
    last = store.match(chain("s9", 4))
    assert len(last) == 4
    assert set(last[-1].tiers) == set(SIZES)
    store.check_integrity()
    store.close()
