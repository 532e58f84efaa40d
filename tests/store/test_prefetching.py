"""Staging ahead of a session's return: when, what it may displace, and that restores come first.

The I/O thread is not started unless a test says so: `Stage.rounds` takes its place.
"""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange, Tier
from hetero_connector.metrics import COUNTERS
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.catalog import prefetch as prefetching
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn, PrefetchCosts
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.seconds_saved import SecondsSaved
from tests.store.filling import (
    DENSE,
    SIZES,
    WINDOW,
    Bench,
    Disk,
    begin,
    chain,
    ids_of,
    intact,
    put,
    room_for,
    slab_offset,
    wait,
)
from tests.waiting import until

A, B = chain("a", 4), chain("b", 4)
CHAIN_BYTES = 4 * SIZES[DENSE] + SIZES[WINDOW]
"""A restore of four chunks needs all prefix state, and the window at the end."""


class Stage:
    """A store with an SSD in memory and a clock of its own."""

    def __init__(self, root: Path) -> None:
        self.now_s = 0.0
        self.disk = Disk()
        self.bench = Bench(root / "ssd", self.disk, lambda: self.now_s)
        self.counted: dict[str, float] = {}
        self.used_within: Callable[[float, float], float] = lambda idle_s, within_s: 0.0
        self.store: ArtifactStore

    def open(self, dram_chunks: float = 8, **config: object) -> "Stage":
        costs = PrefetchCosts(
            used_within=lambda idle_s, within_s: self.used_within(idle_s, within_s)
        )
        self.store = self.bench.open(dram_chunks, 16, prefetch_costs=costs, run_io=False, **config)
        return self

    def close(self) -> None:
        assert self.store.io_thread is not None
        self.disk.files.resume()
        self.store.io_thread.start()
        self.store.check_integrity()
        self.store.close()

    def rounds(self) -> None:
        """Run the I/O thread's rounds until nothing moves."""
        while self.store.run_io_round():
            self.store.check_integrity()

    def on_ssd_only(self, *chains: list[ChunkRange]) -> None:
        for chunks in chains:
            for at in range(0, len(chunks), 2):  # as many as the smallest DRAM tier here holds
                put(self.store, chunks[at : at + 2])
                self.write_out()
            self.store.leave_to_ssd()

    def write_out(self) -> None:
        """Everything sealed goes to SSD."""
        writes = self.store.catalog.writes
        self.now_s += self.store.catalog.config.spill_delay_s

        def written() -> bool:
            self.rounds()
            return not (len(writes) or writes.num_writing)

        until(written)

    def expect(
        self, chunks: list[ChunkRange], at_s: float, latest_s: float, probability: float = 0.8
    ) -> None:
        name = chunks[0].key
        leaves = (chunks[-1].key,)
        self.store.expect(ExpectedReturn(name, leaves, at_s, latest_s, probability))

    def restore(self, chunks: list[ChunkRange]) -> Restore:
        """All dense state, and the last window, as a planner asks for them."""
        return begin(self.store, [*ids_of(chunks, [DENSE]), *ids_of(chunks[-1:], [WINDOW])])

    def tiers(self, chunks: list[ChunkRange]) -> list[Tier]:
        return [stored.tiers[DENSE] for stored in self.store.match(chunks)]

    def counts(self) -> dict[str, float]:
        """All counters so far."""
        for key, value in (self.bench.recorder.drain() or {}).get(COUNTERS, {}).items():
            self.counted[key] = self.counted.get(key, 0) + value
        return self.counted

    def total(self, name: str) -> float:
        return sum(v for k, v in self.counts().items() if k.startswith(f"heterocache_{name}{{"))

    def outcomes(self) -> dict[str, float]:
        name = "heterocache_prefetches{outcome="
        return {k[len(name) : -1]: v for k, v in self.counts().items() if k.startswith(name)}


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path)
    yield stage.open()
    stage.close()


def reopened(stage: Stage, **config: object) -> Stage:
    stage.close()
    return stage.open(**config)  # type: ignore[arg-type]


def test_what_is_due_is_staged_and_not_before(stage: Stage) -> None:
    stage.on_ssd_only(A)
    stage.expect(A, at_s=10.0, latest_s=20.0)
    stage.now_s = 9.9
    stage.rounds()
    assert stage.tiers(A) == [Tier.SSD] * 4
    stage.now_s = 10.0
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM] * 4
    assert [WINDOW in x.tiers for x in stage.store.match(A)] == [True] * 4
    assert stage.store.match(A)[3].tiers[WINDOW] is Tier.DRAM, "the window at the end"
    assert stage.store.match(A)[2].tiers[WINDOW] is Tier.SSD, "no other is needed"
    assert stage.outcomes() == {"staged": 1}
    assert stage.total("prefetched_bytes") == CHAIN_BYTES
    stage.store.session_returned(A[0].key)
    restore = stage.restore(A)
    assert restore.poll(), "nothing is left to read"
    assert intact(stage.store, restore)
    restore.release()
    assert stage.total("prefetch_used_bytes") == CHAIN_BYTES
    stage.now_s = 100.0
    stage.rounds()
    assert stage.total("prefetch_wasted_bytes") == 0
    assert stage.total("read_bytes") == 2 * CHAIN_BYTES, "once from SSD, once from DRAM"


def test_only_what_is_missing_is_read(stage: Stage) -> None:
    stage.on_ssd_only(A)
    first = stage.restore(A[:2])
    stage.rounds()
    first.release()
    read = stage.total("read_bytes")
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    assert stage.total("read_bytes") - read == 2 * SIZES[DENSE] + SIZES[WINDOW]
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    assert stage.outcomes() == {"staged": 1, "in_dram": 1}


def test_a_shorter_chain_is_staged_where_the_end_is_gone(stage: Stage) -> None:
    stage.on_ssd_only(A[:3])
    leaves = (A[3].key, A[2].key)
    stage.store.expect(ExpectedReturn("a", leaves, 0.0, 10.0, 0.8))
    stage.store.expect(ExpectedReturn("b", (B[3].key,), 0.0, 10.0, 0.8))
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM] * 3
    assert stage.outcomes() == {"staged": 1, "gone": 1}


def test_a_session_that_comes_early_reads_for_itself_and_nothing_twice(stage: Stage) -> None:
    stage.on_ssd_only(A)
    stage.expect(A, 0.0, 10.0)
    stage.disk.files.hang_next()
    with patch.object(prefetching, "BATCH_BYTES", 2 * SIZES[DENSE]):
        stage.rounds()  # two chunks are under way
    stage.store.session_returned(A[0].key)
    restore = stage.restore(A)
    stage.rounds()
    assert not restore.poll()
    assert stage.total("read_bytes") == 2 * SIZES[DENSE] + SIZES[WINDOW], "the rest, at once"
    stage.disk.files.resume()
    stage.rounds()
    assert restore.poll()
    assert intact(stage.store, restore)
    restore.release()
    assert stage.outcomes() == {"early": 1}
    assert stage.counts()["heterocache_read_bytes{state_type=dense_kv,tier=ssd}"] == (
        4 * SIZES[DENSE]
    )
    assert stage.total("prefetch_used_bytes") == stage.total("prefetched_bytes") > 0


def test_a_session_that_is_back_is_not_staged(stage: Stage) -> None:
    stage.on_ssd_only(A)
    stage.expect(A, 10.0, 20.0)
    stage.store.session_returned(A[0].key)
    stage.now_s = 15.0
    stage.rounds()
    assert stage.tiers(A) == [Tier.SSD] * 4
    assert stage.outcomes() == {}


def test_no_prefetch_begins_while_a_restore_waits(stage: Stage) -> None:
    stage.on_ssd_only(A, B)
    stage.disk.files.hang_next()
    restore = stage.restore(B)
    stage.rounds()
    stage.expect(A, 0.0, 1e9)
    for _ in range(5):
        stage.rounds()
    assert stage.disk.files.in_flight == 1, "the restore's own"
    assert stage.tiers(A) == [Tier.SSD] * 4
    stage.disk.files.resume()
    stage.rounds()
    assert restore.poll()
    assert stage.tiers(A) == [Tier.DRAM] * 4
    restore.release()


def test_a_restore_does_not_wait_for_a_prefetch_that_hangs(stage: Stage) -> None:
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 1e9)
    stage.disk.files.hang_next()
    with patch.object(prefetching, "BATCH_BYTES", SIZES[DENSE]):
        stage.rounds()
        assert stage.disk.files.in_flight == 1
        assert stage.store.reading_bytes == {Tier.SSD: SIZES[DENSE]}, "one batch, no more"
        restore = stage.restore(B)
        stage.rounds()
    assert restore.poll()
    assert intact(stage.store, restore)
    assert stage.disk.files.in_flight == 1
    restore.release()


def test_what_is_under_way_takes_slots_and_what_waits_does_not(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=4)
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 1e9)
    stage.disk.files.hang_next()
    with patch.object(prefetching, "BATCH_BYTES", SIZES[DENSE]):
        stage.rounds()
    restore = stage.restore(B[:3])
    stage.rounds()
    assert restore.poll()
    assert not restore.failed, "three of four slots are free"
    restore.release()


def test_a_save_takes_the_slots_of_what_was_staged(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=4)
    stage.on_ssd_only(A)
    stage.expect(A, 0.0, 1e9)
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM] * 4
    put(stage.store, B)
    assert stage.tiers(A) == [Tier.SSD] * 4
    assert stage.total("prefetch_wasted_bytes") == CHAIN_BYTES


def in_dram(stage: Stage, chunks: list[ChunkRange]) -> None:
    """Bring them back from SSD, as restores would."""
    restore = stage.restore(chunks)
    stage.rounds()
    assert restore.poll()
    restore.release()


def test_what_is_worth_more_is_not_displaced(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=room_for(4, 1))
    stage.on_ssd_only(A, B)
    in_dram(stage, B)
    stage.used_within = lambda idle_s, within_s: 0.9
    stage.expect(A, 0.0, 10.0, probability=0.8)
    stage.rounds()
    assert stage.tiers(B) == [Tier.DRAM] * 4
    assert stage.tiers(A) == [Tier.SSD] * 4
    assert stage.outcomes() == {"refused": 1}
    stage.used_within = lambda idle_s, within_s: 0.7
    stage.expect(A, 0.0, 10.0, probability=0.8)
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM] * 4
    assert stage.outcomes() == {"refused": 1, "staged": 1}


def test_free_slots_are_taken_whatever_the_rest_is_worth(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=room_for(6, 1))
    stage.used_within = lambda idle_s, within_s: 1.0
    stage.on_ssd_only(A, B)
    in_dram(stage, B)
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.SSD]
    assert stage.tiers(B) == [Tier.DRAM] * 4
    assert stage.outcomes() == {"partly": 1}


def test_idle_and_window_are_what_the_victim_is_judged_by(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=4)
    asked: list[tuple[float, float]] = []

    def used_within(idle_s: float, within_s: float) -> float:
        asked.append((idle_s, within_s))
        return 1.0

    stage.used_within = used_within
    stage.on_ssd_only(A, B)
    stage.now_s = 100.0
    in_dram(stage, B)
    stage.expect(A, 130.0, 150.0)
    stage.now_s = 140.0
    stage.rounds()
    assert asked == [(40.0, 10.0)]


def test_what_only_dram_has_is_worth_its_prefill(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=4, spill_delay_s=1.0)
    stage.on_ssd_only(A)
    put(stage.store, B)  # not to be written for a second
    stage.used_within = lambda idle_s, within_s: 1e-3
    stage.expect(A, 0.0, 100.0, probability=1.0)
    stage.rounds()
    # 256 tokens of prefill, 26 ms by default, against 3 us of reading
    assert stage.tiers(B) == [Tier.DRAM] * 4
    assert stage.outcomes() == {"refused": 1}


@pytest.mark.parametrize("is_ordered", [False, True])
def test_what_an_operator_orders_takes_the_room_of_what_was_just_used(
    stage: Stage, is_ordered: bool
) -> None:
    stage = reopened(stage, dram_chunks=4)
    stage.on_ssd_only(A)
    put(stage.store, B[:2])
    stage.write_out()
    put(stage.store, B[2:])
    stage.write_out()
    stage.used_within = lambda idle_s, within_s: 1.0
    end_s = stage.now_s + 100
    name, leaves = A[0].key, (A[-1].key,)
    stage.store.expect(ExpectedReturn(name, leaves, 0.0, end_s, 1.0, is_ordered=is_ordered))
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM if is_ordered else Tier.SSD] * 4
    assert set(stage.tiers(B)) == {Tier.SSD if is_ordered else Tier.DRAM}


def test_where_computing_is_cheaper_than_staging_that_is_what_counts(stage: Stage) -> None:
    """At a snail's SSD everything would be worth its slot, did a request wait for the SSD."""
    stage.close()
    costs = PrefetchCosts(lambda artifact: 1e3, lambda idle_s, within_s: 0.5)
    saved = SecondsSaved(lambda new, context: new + context)
    stage.store = stage.bench.open(4, 16, prefetch_costs=costs, seconds_saved=saved, run_io=False)
    stage.on_ssd_only(A)
    put(stage.store, B[:3])
    stage.expect(A, 0.0, 10.0, probability=0.55)
    stage.rounds()
    # A's first chunk takes the free slot; its chunks save 0.55 * 640 s each, B's third 0.5 * 768 s
    assert stage.tiers(A) == [Tier.DRAM, Tier.SSD, Tier.SSD, Tier.SSD]
    assert stage.tiers(B[:3]) == [Tier.DRAM] * 3


def test_the_short_end_of_a_chain_comes_with_the_rest(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=6)
    stage.on_ssd_only(A)
    end = ChunkRange(ChunkKey(bytes(15) + b"e"), A[-1].key, A[-1].end, A[-1].end + 16)
    save = stage.store.begin_save(end, {DENSE: 600, WINDOW: SIZES[WINDOW]})
    assert save is not None
    stage.store.complete_save(save)
    stage.write_out()
    stage.store.leave_to_ssd()
    assert stage.tiers([*A, end]) == [Tier.SSD] * 5
    stage.on_ssd_only(B)
    in_dram(stage, B)
    stage.used_within = lambda idle_s, within_s: 0.5
    stage.store.expect(ExpectedReturn("a", (end.key,), stage.now_s, 1e9, 0.8))
    stage.rounds()
    assert stage.tiers([*A, end]) == [Tier.DRAM] * 5
    assert stage.outcomes() == {"staged": 1}


def test_a_chain_does_not_displace_itself(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=3)
    stage.on_ssd_only(A)
    in_dram(stage, A[:2])
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM, Tier.DRAM, Tier.DRAM, Tier.SSD]
    assert stage.outcomes() == {"partly": 1}


def test_one_staged_session_does_not_displace_a_likelier_one(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=room_for(4, 1))
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 10.0, probability=0.8)
    stage.rounds()
    stage.expect(B, 0.0, 10.0, probability=0.5)
    stage.rounds()
    assert stage.tiers(A) == [Tier.DRAM] * 4
    stage.expect(B, 0.0, 10.0, probability=0.9)
    stage.rounds()
    assert stage.tiers(B) == [Tier.DRAM] * 4
    assert stage.outcomes() == {"staged": 2, "refused": 1}
    assert stage.total("prefetch_wasted_bytes") > 0


def test_who_does_not_come_is_counted_and_leaves_first(stage: Stage) -> None:
    stage = reopened(stage, dram_chunks=room_for(8, 4))
    stage.on_ssd_only(A, B)
    in_dram(stage, B)
    stage.expect(A, 0.0, 10.0)
    stage.rounds()  # more recent than B
    stage.now_s = 10.0
    stage.rounds()
    assert stage.total("prefetch_wasted_bytes") == CHAIN_BYTES
    assert stage.tiers(A) == [Tier.DRAM] * 4, "there is room"
    put(stage.store, chain("c", 2))
    assert stage.tiers(A) == [Tier.DRAM, Tier.DRAM, Tier.SSD, Tier.SSD]
    assert stage.tiers(B) == [Tier.DRAM] * 4
    dropped = stage.counts()["heterocache_evicted_first_bytes{state_type=dense_kv,tier=dram}"]
    assert dropped == 2 * SIZES[DENSE]


@pytest.mark.parametrize("is_late", [False, True])
def test_a_first_batch_without_room_for_the_rest_expires_too(stage: Stage, is_late: bool) -> None:
    """The prefetch ends while that is under way; `is_late`: its session is due before it is."""
    stage = reopened(stage, dram_chunks=room_for(6, 1))
    stage.used_within = lambda idle_s, within_s: 1.0
    stage.on_ssd_only(A, B)
    in_dram(stage, B)
    stage.expect(A, 0.0, 1.0)
    stage.disk.files.hang_next()
    stage.rounds()
    assert stage.outcomes() == {"partly": 1}
    if is_late:
        stage.now_s = 1.0
        stage.rounds()
        assert stage.store.catalog.prefetcher.wake_s == math.inf, "nothing to do before the read"
    stage.disk.files.resume()
    stage.rounds()
    stage.now_s = 1.0
    stage.rounds()
    assert stage.total("prefetch_wasted_bytes") == stage.total("prefetched_bytes") > 0
    put(stage.store, chain("c", 2))
    dropped = stage.counts()["heterocache_evicted_first_bytes{state_type=dense_kv,tier=dram}"]
    assert dropped == 2 * SIZES[DENSE]


def test_a_return_after_all_undoes_that(stage: Stage) -> None:
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    stage.now_s = 10.0
    stage.rounds()
    in_dram(stage, B)
    in_dram(stage, A)
    put(stage.store, chain("c", 2))
    assert stage.tiers(A) == [Tier.DRAM] * 4
    assert stage.total("dropped_bytes") == 0


def test_a_restore_that_outlasts_the_expectation_still_counts_as_use(stage: Stage) -> None:
    stage.on_ssd_only(A)
    stage.expect(A, 0.0, 10.0)
    stage.rounds()
    stage.now_s = 9.0
    stage.store.session_returned(A[0].key)
    restore = stage.restore(A)
    stage.rounds()
    stage.now_s = 11.0
    stage.rounds()
    restore.release()
    assert stage.total("prefetch_used_bytes") == CHAIN_BYTES
    assert stage.total("prefetch_wasted_bytes") == 0


def test_a_read_error_is_a_counted_end_of_the_prefetch(stage: Stage) -> None:
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 10.0)
    stage.disk.files.fail_next(9)
    stage.rounds()
    stage.disk.files._failures.clear()
    assert stage.outcomes() == {"failed": 1}
    assert stage.counts()["heterocache_failures{cause=io_error,tier=ssd}"] > 0
    stage.expect(B, 0.0, 10.0)
    stage.rounds()
    assert stage.tiers(B) == [Tier.DRAM] * 4, "others go on"
    assert stage.store.catalog.tiers.pinned() == []


def test_a_corrupt_slot_is_found_before_the_session_is_back(stage: Stage) -> None:
    stage.on_ssd_only(A)
    stage.expect(A, 0.0, 10.0)
    stage.disk.slab[slab_offset(stage.store, ArtifactId(A[2].key, DENSE))] ^= 1
    stage.rounds()
    assert stage.outcomes() == {"failed": 1}
    assert stage.counts()["heterocache_failures{cause=checksum,tier=ssd}"] == 1
    assert DENSE not in stage.store.match(A)[2].tiers
    restore = stage.restore([x.chunk for x in stage.store.match(A) if DENSE in x.tiers])
    stage.rounds()
    assert intact(stage.store, restore)
    restore.release()


def test_a_reset_in_the_middle_ends_it(stage: Stage) -> None:
    stage.on_ssd_only(A, B)
    stage.expect(A, 0.0, 10.0)
    stage.expect(B, 5.0, 10.0)
    stage.disk.files.hang_next()
    stage.rounds()
    stage.store.reset()
    stage.disk.files.resume()
    stage.now_s = 6.0
    stage.rounds()
    assert stage.store.match(A) == []
    assert stage.total("prefetch_used_bytes") == 0
    assert stage.total("prefetch_wasted_bytes") == stage.total("prefetched_bytes")
    assert len(stage.store.catalog.tiers.prefetched) == 0


def test_what_the_planner_left_alone_leaves_the_ssd_first(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    stage.open()
    try:
        c = chain("c", 12)
        stage.on_ssd_only(A, c)  # 16 chunks: full
        stage.store.decline(stage.store.match(c)[10:])
        stage.rounds()
        stage.on_ssd_only(B[:2])
        assert len(stage.store.match(A)) == 4, "though it is older"
        assert len(stage.store.match(c)) == 10
        assert stage.counts()["heterocache_evicted_first_bytes{state_type=dense_kv,tier=ssd}"] == (
            2 * SIZES[DENSE]
        )
    finally:
        stage.close()


def test_what_others_rest_on_is_not_dropped(stage: Stage) -> None:
    c = chain("c", 8)
    stage.on_ssd_only(A, c)
    branch = chain("branch", 4, parent=c[3])
    stage.on_ssd_only(branch)  # full
    stage.store.decline(stage.store.match(c)[:4])
    stage.rounds()
    stage.on_ssd_only(B[:2])
    assert len(stage.store.match([*c[:4], *branch])) == 8


def test_it_wakes_by_itself_and_reads_real_files(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "ssd")
    store = bench.open(dram_chunks=8)
    put(store, A)
    assert store.flush(60)
    store.leave_to_ssd()
    assert store.match(A)[0].tiers[DENSE] is Tier.SSD
    soon_s = bench.clock() + 0.05
    store.expect(ExpectedReturn("a", (A[-1].key,), soon_s, soon_s + 60, 0.8))
    until(lambda: [x.tiers[DENSE] for x in store.match(A)] == [Tier.DRAM] * 4)
    assert bench.clock() >= soon_s
    restore = wait(begin(store, ids_of(A, [DENSE])))
    assert intact(store, restore)
    restore.release()
    store.check_integrity()
    store.close()


def test_without_an_ssd_nothing_is_expected() -> None:
    store = Bench(None).open(dram_chunks=2)
    store.expect(ExpectedReturn("a", (A[0].key,), 0.0, 1.0, 1.0))
    store.session_returned("a")
    assert len(store.catalog.prefetcher.schedule) == 0
    assert not store.catalog.prefetcher._returned
    store.close()


def test_while_nothing_is_read_from_ssd_a_due_session_does_not_wake_the_io_thread(
    stage: Stage,
) -> None:
    stage.on_ssd_only(A)
    stage.store.catalog.ssd_readable = False
    stage.expect(A, at_s=stage.now_s, latest_s=stage.now_s + 100.0)
    stage.rounds()
    with patch.object(stage.store.catalog._lock, "wait") as wait:
        stage.store.catalog.wait(1.0, lambda: math.inf)
    wait.assert_called_once_with(1.0)
    stage.store.catalog.ssd_readable = True
    with patch.object(stage.store.catalog._lock, "wait") as wait:
        stage.store.catalog.wait(1.0, lambda: math.inf)
    wait.assert_not_called()
