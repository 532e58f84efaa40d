"""Artifacts served from DRAM: some are checked, and what is wrong does not stay."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from hetero_connector.artifacts.record import ROOT, ChunkKey, ChunkRange
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog.hit_samples import HitSamples
from hetero_connector.store.catalog.nodes import Artifact, Node
from tests.store.filling import DENSE, SIZES, Bench, Disk, begin, chain, ids_of, intact, put, stored
from tests.waiting import until


def artifacts(count: int) -> list[Artifact]:
    keys = (ChunkKey(n.to_bytes(16, "little")) for n in range(count))
    nodes = [Node(ChunkRange(key, ROOT, 0, 256), None) for key in keys]
    return [Artifact(node, StateType.DENSE_KV, 1) for node in nodes]


@pytest.mark.parametrize("length", [1, 7, 64, 300])
def test_every_artifact_of_a_prompt_is_sampled_about_as_often(length: int) -> None:
    prompt, one_in, hits = artifacts(length), 16, 96_000
    samples, seen = HitSamples(one_in, Random(7)), Counter[Artifact]()
    for _ in range(hits // length):
        samples.hit(prompt)
        while (sample := samples.take()) is not None:
            seen[sample] += 1
    assert seen.total() == pytest.approx(hits / one_in, rel=0.03)
    expected = hits / one_in / length
    assert all(abs(seen[a] - expected) < 5 * expected**0.5 for a in prompt)


def test_samples_that_nobody_takes_are_few_and_the_newest() -> None:
    prompt = artifacts(10_000)
    samples = HitSamples(1, Random(7))
    samples.hit(prompt)
    taken = []
    while (sample := samples.take()) is not None:
        taken.append(sample)
    assert taken == prompt[-len(taken) :]
    assert 0 < len(taken) < 100


def hit(store: ArtifactStore, chunks: list[ChunkRange]) -> bool:
    """Return whether a restore of it from DRAM was right."""
    restore = begin(store, ids_of(chunks))
    assert restore.poll()
    was_right = intact(store, restore)
    restore.release()
    with store.catalog.locked():
        store.catalog._lock.notify_all()  # else the I/O thread looks once a second
    until(lambda: not store.catalog.samples)
    return was_right


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path, Disk())


def open_sampling(bench: Bench, one_in: int) -> ArtifactStore:
    store = bench.open(verify="sample")
    store.catalog.samples = HitSamples(one_in, Random(3))
    return store


def test_a_bit_that_flips_in_dram_is_found_as_soon_as_its_artifact_is_sampled(
    bench: Bench,
) -> None:
    store, one_in = open_sampling(bench, 8), 8
    chunks = chain("a", 6)
    put(store, chunks)
    assert store.flush(60)
    for _ in range(20):
        assert hit(store, chunks)
    assert bench.counts("heterocache_failures") == {}, "what is intact passes"
    expected, last = HitSamples(one_in, Random(3)), ids_of(chunks[-1:], [DENSE])[0]
    ids = [i for kind in SIZES for i in ids_of(chunks, [kind])]  # as a restore goes through them
    for _ in range(20):
        expected.hit(ids)  # type: ignore[arg-type]
    while expected.take() is not None:
        pass
    artifact = store.catalog.tiers.index.find(last)
    assert artifact is not None
    store.arena.view[artifact.dram_offset + 17] ^= 0x10
    served = 0
    is_found = False
    while not is_found:
        assert stored(store, chunks) == len(chunks)
        expected.hit(ids)  # type: ignore[arg-type]
        while (sample := expected.take()) is not None:
            is_found = is_found or sample == last
        assert not hit(store, chunks)
        served += 1
    until(lambda: stored(store, chunks) < len(chunks))
    assert bench.counts("heterocache_failures") == {"cause=checksum,tier=dram": 1}
    assert 0 < served < 5 * one_in
    assert artifact.ssd is None, "the copy on SSD is of the same bytes, for all we know"
    assert hit(store, chunks[:-1])
    put(store, chunks[-1:])
    assert hit(store, chunks)
    store.check_integrity()
    store.close()


def test_nothing_is_sampled_unless_asked(bench: Bench) -> None:
    store = bench.open(verify="ssd")
    store.catalog.samples = HitSamples(1, Random(3))
    chunks = chain("a", 4)
    put(store, chunks)
    assert store.flush(60)
    artifact = store.catalog.tiers.index.find(ids_of(chunks)[0])
    assert artifact is not None
    store.arena.view[artifact.dram_offset] ^= 1
    for _ in range(10):
        assert not hit(store, chunks)
    assert bench.counts("heterocache_failures") == {}
    store.close()


def test_nothing_is_sampled_where_nothing_has_a_checksum() -> None:
    """A store in DRAM alone has no I/O thread, which would take the samples."""
    store = Bench(None).open(verify="sample")
    store.catalog.samples = HitSamples(1, Random(3))
    chunks = chain("a", 4)
    put(store, chunks)
    restore = begin(store, ids_of(chunks))
    assert restore.poll()
    restore.release()
    assert store.io_thread is None
    assert not store.catalog.samples
    store.close()
