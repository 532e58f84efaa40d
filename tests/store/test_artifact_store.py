"""The store in DRAM alone."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from hetero_connector.artifacts.record import ROOT, ArtifactId, ChunkKey, ChunkRange, Tier
from hetero_connector.errors import ConfigError, StoreClosedError
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store.arena import Arena
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, StoreConfig, Wanted
from hetero_connector.store.catalog.restore import Restore
from tests.store.filling import (
    CHUNK,
    CHUNK_BYTES,
    DENSE,
    FINGERPRINT,
    SIZES,
    WINDOW,
    Bench,
    begin,
    chain,
    contents,
    fill,
    ids_of,
    intact,
    put,
    stored,
    wait,
)
from tests.store.under_way import snapshot
from tests.waiting import until


@pytest.fixture
def bench() -> Bench:
    return Bench(None)


@pytest.fixture
def store(bench: Bench):
    opened = bench.open(dram_chunks=8)
    yield opened
    opened.check_integrity()
    opened.close()


def test_what_was_saved_is_matched_and_restored_byte_for_byte(store: ArtifactStore) -> None:
    chunks = chain("a", 5)
    put(store, chunks)
    found = store.match(chunks)
    assert [x.chunk for x in found] == chunks
    assert found[0].tiers == {DENSE: Tier.DRAM, WINDOW: Tier.DRAM}
    restore = begin(store, ids_of(chunks))
    assert restore.poll()
    assert set(restore.offsets) == set(ids_of(chunks))
    assert not restore.failed
    assert intact(store, restore)
    restore.release()


def test_nothing_is_visible_before_it_is_complete(store: ArtifactStore) -> None:
    (chunk,) = chain("a", 1)
    save = store.begin_save(chunk, SIZES)
    assert save is not None
    assert stored(store, [chunk]) == 0
    assert store.missing(chunk, [DENSE, WINDOW, StateType.RECURRENT]) == [StateType.RECURRENT]
    restore = begin(store, ids_of([chunk]))
    assert restore.poll()
    assert set(restore.failed.values()) == {Failure.GONE}
    store.complete_save(save)
    assert stored(store, [chunk]) == 1


def test_an_abandoned_save_leaves_no_trace(store: ArtifactStore) -> None:
    (chunk,) = chain("a", 1)
    for _ in range(20):  # more often than there are slots
        save = store.begin_save(chunk, SIZES)
        assert save is not None
        store.abandon_save(save)
    assert store.missing(chunk, list(SIZES)) == list(SIZES)
    with pytest.raises(ValueError, match="ended before"):
        store.abandon_save(save)


def test_types_of_one_chunk_may_be_saved_one_by_one(store: ArtifactStore) -> None:
    (chunk,) = chain("a", 1)
    put(store, [chunk], {DENSE: SIZES[DENSE]})
    assert store.missing(chunk, list(SIZES)) == [WINDOW]
    put(store, [chunk], {WINDOW: SIZES[WINDOW]})
    assert store.missing(chunk, list(SIZES)) == []
    with pytest.raises(ValueError, match="already saved"):
        store.begin_save(chunk, {WINDOW: SIZES[WINDOW]})


@pytest.mark.parametrize(
    "sizes", [{}, {DENSE: 0}, {DENSE: 12_289}, {StateType.RECURRENT: 10}], ids=str
)
def test_sizes_the_store_was_not_opened_for_are_refused(
    store: ArtifactStore, sizes: dict[StateType, int]
) -> None:
    with pytest.raises(ValueError, match=r"cannot have|nothing to save"):
        store.begin_save(chain("a", 1)[0], sizes)


def test_a_chunk_nobody_could_reach_is_not_saved(store: ArtifactStore, bench: Bench) -> None:
    assert store.begin_save(chain("a", 2)[1], SIZES) is None
    assert bench.counts("heterocache_failures") == {"cause=gone,tier=dram": 1}


def test_eviction_takes_the_deepest_of_the_oldest_chain(store: ArtifactStore) -> None:
    old, new = chain("old", 5), chain("new", 5)
    put(store, old)
    put(store, new[:3])
    restore = begin(store, ids_of(old[:4]))
    restore.release()
    put(store, new[3:])  # two slots short: the old leaf, the only one not used again, and...
    assert stored(store, new) == 5
    assert stored(store, old) == 3


def test_eviction_spares_the_chain_that_is_being_extended(store: ArtifactStore) -> None:
    chunks = chain("a", 12)
    put(store, chunks[:8])
    assert store.begin_save(chunks[8], SIZES) is None, "only its own ancestors could go"
    assert stored(store, chunks) == 8


def test_pinned_artifacts_stay_and_a_full_store_says_so(store: ArtifactStore, bench: Bench) -> None:
    chunks = chain("a", 8)
    put(store, chunks)
    restore = begin(store, ids_of(chunks))
    (other,) = chain("b", 1)
    assert store.begin_save(other, SIZES) is None
    assert bench.counts("heterocache_failures") == {"cause=no_slot,tier=dram": 1}
    assert intact(store, restore)
    restore.release()
    restore.release()
    put(store, [other])
    assert stored(store, chunks) == 7


def test_two_restores_pin_independently(store: ArtifactStore) -> None:
    chunks = chain("a", 8)
    put(store, chunks)
    first, second = (begin(store, ids_of(chunks)) for _ in range(2))
    first.release()
    assert store.begin_save(chain("b", 1)[0], SIZES) is None
    second.release()
    put(store, chain("b", 1))


def test_an_outdated_match_is_looked_up_again(store: ArtifactStore) -> None:
    chunks = chain("a", 8)
    put(store, chunks)
    found = store.match(chunks)
    put(store, chain("b", 1))
    restore = store.begin_restore([Wanted(DENSE, found), Wanted(WINDOW, found[-1:])])
    assert [offset < 0 for offset in restore.columns[0]] == [False] * 7 + [True]
    assert dict(restore.failed) == dict.fromkeys(ids_of(chunks[-1:]), Failure.GONE)
    assert len(restore.offsets) == 7
    assert intact(store, restore)
    restore.release()


@pytest.mark.parametrize("end", [Restore.release, Restore.abandon])
def test_a_restore_that_has_ended_says_no_place(
    store: ArtifactStore, end: Callable[[Restore], None]
) -> None:
    chunks = chain("a", 1)
    put(store, chunks)
    end(restore := begin(store, ids_of(chunks)))
    with pytest.raises(AssertionError, match="evicted"):
        restore.poll()
    with pytest.raises(AssertionError, match="evicted"):
        _ = restore.columns


def test_a_hold_ends_with_each_restore_of_its_own(store: ArtifactStore) -> None:
    chunks = chain("a", 8)
    put(store, chunks)
    restores = [begin(store, ids_of(chunks)) for _ in range(3)]
    store.reset()
    for restore in restores:
        assert store.catalog.tiers.dram.num_used(DENSE) == 8
        assert intact(store, restore)
        restore.release()
    assert store.catalog.tiers.dram.num_used(DENSE) == 0


def test_reset_forgets_all_but_keeps_pinned_memory_until_released(store: ArtifactStore) -> None:
    chunks = chain("a", 8)
    put(store, chunks)
    restore = begin(store, ids_of(chunks))
    store.reset()
    assert stored(store, chunks) == 0
    assert store.begin_save(chunks[0], SIZES) is None, "all memory is still pinned"
    assert intact(store, restore)
    restore.release()
    put(store, chunks)
    assert stored(store, chunks) == 8


def test_reset_during_a_save(store: ArtifactStore) -> None:
    chunks = chain("a", 2)
    saves = [store.begin_save(c, SIZES) for c in chunks]
    store.reset()
    put(store, chunks)  # the same ids again, while the old saves still write to their slots
    again = begin(store, ids_of(chunks))
    for save in saves:
        assert save is not None
        store.arena.view[save.offsets[DENSE]] ^= 0xFF
    store.complete_save(saves[0])
    store.abandon_save(saves[1])
    assert stored(store, chunks) == 2
    assert intact(store, again)
    again.release()
    put(store, chain("b", 6))
    assert stored(store, chunks) == 2


def test_tails(store: ArtifactStore) -> None:
    (full,) = chain("a", 1)
    tail = ChunkRange(ChunkKey(b"t" * 16), full.key, CHUNK, CHUNK + 48)
    put(store, [full, tail])
    assert store.tails(full.key) == (48,)
    assert store.tails(ROOT) == ()
    assert [x.chunk for x in store.match([tail])] == [tail]


def test_asking_twice_for_one_artifact_is_harmless(store: ArtifactStore) -> None:
    chunks = chain("a", 1)
    put(store, chunks)
    restore = begin(store, ids_of(chunks) * 2)
    assert restore.poll()
    restore.release()
    store.reset()
    put(store, chain("b", 8))


def test_verify_all_finds_what_changed_in_dram(bench: Bench) -> None:
    chunks = chain("a", 2)
    for verify in ("ssd", "all"):
        store = bench.open(verify=verify)
        put(store, chunks)
        wait(first := begin(store, ids_of(chunks)))
        assert intact(store, first)
        at = first.offsets[ArtifactId(chunks[1].key, DENSE)]
        first.release()
        store.arena.view[at + 5] ^= 1
        wait(second := begin(store, ids_of(chunks)))
        if verify == "ssd":
            assert not second.failed
            assert not intact(store, second), "the flip shows when nothing verifies"
        else:
            assert second.failed[ArtifactId(chunks[1].key, DENSE)] is Failure.CHECKSUM
            assert {key.chunk for key in second.failed} == {chunks[1].key}
            assert intact(store, second)
            assert stored(store, chunks) == 1, "its checkpoint is of no use either"
        second.release()
        store.check_integrity()
        store.close()
    assert bench.counts("heterocache_failures") == {"cause=checksum,tier=dram": 1}


def test_metrics(store: ArtifactStore, bench: Bench) -> None:
    put(store, chain("a", 8))
    put(store, chain("b", 1))
    begin(store, ids_of(chain("b", 1))).release()
    store.publish_gauges()
    payload = bench.recorder.drain()
    assert payload is not None
    counters, gauges = payload["counters"], payload["gauges"]
    assert counters["heterocache_saved_bytes{state_type=dense_kv}"] == 9 * SIZES[DENSE]
    assert counters["heterocache_read_bytes{state_type=window_swa,tier=dram}"] == SIZES[WINDOW]
    assert counters["heterocache_evictions{state_type=dense_kv,tier=dram}"] == 1
    assert gauges["heterocache_bytes{state_type=dense_kv,tier=dram}"] == 8 * SIZES[DENSE]
    assert gauges["heterocache_artifacts{state_type=window_swa,tier=dram}"] == 8
    assert gauges["heterocache_capacity_bytes{tier=dram}"] == 8 * CHUNK_BYTES


def test_only_what_was_copied_counts_as_used(store: ArtifactStore, bench: Bench) -> None:
    chunks = chain("a", 2)
    put(store, chunks)
    nodes = store.catalog.tiers.index.nodes
    artifacts = [nodes[c.key].artifacts[DENSE] for c in chunks]
    before = [artifact.uses for artifact in artifacts]
    abandoned = begin(store, ids_of(chunks))
    assert abandoned.poll()
    abandoned.abandon()
    abandoned.release()  # it has ended already
    assert [artifact.uses for artifact in artifacts] == before
    assert "heterocache_read_bytes" not in str(bench.recorder.drain())
    assert snapshot(store.catalog).pinned == 0
    begin(store, ids_of(chunks)).release()
    assert [artifact.uses for artifact in artifacts] == [n + 1 for n in before]


def test_no_thread_without_ssd_or_verification(store: ArtifactStore) -> None:
    assert store.io_thread is None
    assert store.flush(0.0)


def test_the_arena_is_found_through_its_handle(store: ArtifactStore) -> None:
    (chunk,) = chain("a", 1)
    worker = Arena.attach(store.arena.handle)
    save = store.begin_save(chunk, SIZES)
    assert save is not None
    fill(store, save)
    at = save.offsets[WINDOW]
    expected = contents(ArtifactId(chunk.key, WINDOW), SIZES[WINDOW])
    assert np.array_equal(worker.view[at : at + SIZES[WINDOW]], expected)
    worker.close()


def test_used_after_close() -> None:
    store = Bench(None).open()
    chunks = chain("a", 2)
    put(store, chunks[:1])
    restore = begin(store, ids_of(chunks[:1]))
    save = store.begin_save(chunks[1], SIZES)
    assert save is not None
    store.close()
    store.close()
    restore.release()
    store.complete_save(save)
    for call in (
        lambda: store.match(chunks),
        lambda: begin(store, []),
        lambda: store.begin_save(chunks[0], SIZES),
        lambda: store.reset(),
        lambda: store.flush(1.0),
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_a_tier_too_small_for_one_chunk_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"dram_gib.*do not hold one chunk"):
        ArtifactStore.open(
            SIZES,
            StoreConfig(CHUNK_BYTES - 1),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
        )


def test_many_stores_leave_no_threads_or_descriptors(bench: Bench) -> None:
    import os

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    for _ in range(5):
        store = bench.open(verify="all")
        put(store, chain("a", 3))
        store.close()
    assert descriptors() <= before
    until(lambda: "heterocache-io" not in {t.name for t in threading.enumerate()})
