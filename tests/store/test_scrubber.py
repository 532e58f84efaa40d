"""A scrub finds what is damaged, whoever uses the store meanwhile, and harms nothing else."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from hetero_connector.artifacts.record import ArtifactId, Tier
from hetero_connector.store import scrubber as module
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.scrubber import ScrubProgress
from hetero_connector.store.ssd import slab_reader
from hetero_connector.tools.status import progress_text
from tests.clock import Clock
from tests.interleaving import try_every_switch
from tests.store.filling import (
    DENSE,
    SIZES,
    WINDOW,
    Bench,
    assert_restored,
    begin,
    chain,
    ids_of,
    intact,
    put,
    slab_offset,
    stored,
    wait,
)
from tests.store.under_way import snapshot
from tests.waiting import until

CHUNKS = chain("a", 6)
FAST = 1e12


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path / "ssd")  # real files: the scrubber opens them itself


@pytest.fixture
def store(bench: Bench) -> Iterator[ArtifactStore]:
    store = bench.open()
    put(store, CHUNKS)
    assert store.flush(60)
    yield store
    store.check_integrity()
    assert not store.catalog.tiers.pinned()
    store.close()


def scrub(store: ArtifactStore) -> ScrubProgress:
    assert store.scrubber.start(FAST)
    until(lambda: progress(store).state != "running")
    return progress(store)


def progress(store: ArtifactStore) -> ScrubProgress:
    assert store.scrubber.progress is not None
    return store.scrubber.progress


def damage_ssd(store: ArtifactStore, artifact_id: ArtifactId) -> None:
    """Flip a bit of the artifact's SSD copy."""
    assert store.folder is not None
    with (store.folder / "slots.slab").open("r+b") as slab:
        slab.seek(slab_offset(store, artifact_id) + 100)
        byte = slab.read(1)[0]
        slab.seek(-1, os.SEEK_CUR)
        slab.write(bytes([byte ^ 4]))
        os.fsync(slab.fileno())


def test_all_copies_are_read_and_nothing_changes(store: ArtifactStore, bench: Bench) -> None:
    before = store.occupancy()
    done = scrub(store)
    assert (done.state, done.reason) == ("complete", None)
    assert (done.chunks, done.chunks_checked, done.damaged) == (6, 6, 0)
    assert done.bytes_checked == 2 * 6 * sum(SIZES.values()), "in DRAM and on SSD"
    assert store.occupancy() == before
    assert bench.counts("heterocache_failures") == {}


def test_a_damaged_ssd_copy_is_forgotten_for_good(store: ArtifactStore, bench: Bench) -> None:
    store.leave_to_ssd()
    damage_ssd(store, ArtifactId(CHUNKS[4].key, DENSE))
    done = scrub(store)
    assert (done.state, done.damaged) == ("complete", 1)
    assert bench.counts("heterocache_failures") == {"cause=checksum,tier=ssd": 1}
    assert stored(store, CHUNKS[:4]) == 4
    assert not any(x.chunk == CHUNKS[4] and DENSE in x.tiers for x in store.match(CHUNKS))
    store.close()
    again = bench.open()
    assert not any(x.chunk == CHUNKS[4] and DENSE in x.tiers for x in again.match(CHUNKS))
    assert_restored(again, CHUNKS[:4])
    again.close()


def test_a_damaged_dram_copy_is_forgotten(store: ArtifactStore, bench: Bench) -> None:
    artifact = store.catalog.tiers.index.find(ArtifactId(CHUNKS[5].key, WINDOW))
    assert artifact is not None
    store.arena.view[artifact.dram_offset] ^= 1
    done = scrub(store)
    assert (done.state, done.damaged) == ("complete", 1)
    assert bench.counts("heterocache_failures") == {"cause=checksum,tier=dram": 1}
    assert [WINDOW in x.tiers for x in store.match(CHUNKS)] == [True] * 5 + [False]


def test_a_restore_that_waits_for_the_damaged_artifact_ends(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.leave_to_ssd()
    damaged = ArtifactId(CHUNKS[5].key, DENSE)
    damage_ssd(store, damaged)
    restores = []
    compare = module._compare

    def compare_late(copy: module.ScrubbedCopy, data: object) -> object:
        found = compare(copy, data)  # type: ignore[arg-type]
        if found is not None:
            restores.append(begin(store, [damaged]))
        return found

    monkeypatch.setattr(module, "_compare", compare_late)
    scrub(store)
    restore = wait(restores[0])
    assert set(restore.failed) == {damaged}
    restore.release()


def test_an_artifact_that_left_meanwhile_is_no_damage(
    store: ArtifactStore, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot stays as it is until the check has ended, whatever the check says."""
    store.leave_to_ssd()

    def forget_first(copy: module.ScrubbedCopy, data: object) -> module.Failure:
        store.reset()
        return module.Failure.CHECKSUM

    monkeypatch.setattr(module, "_compare", forget_first)
    done = scrub(store)
    assert (done.state, done.damaged) == ("complete", 0)
    assert (done.chunks_checked, done.chunks_skipped) == (1, 5)
    assert bench.counts("heterocache_failures") == {}
    monkeypatch.undo()
    put(store, CHUNKS)
    assert store.flush(60), "all slots are free again"


@pytest.mark.parametrize("how_often", [1, 2])
def test_a_read_that_fails_once_is_tried_again(
    store: ArtifactStore, bench: Bench, monkeypatch: pytest.MonkeyPatch, how_often: int
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    store.leave_to_ssd()
    bad = slab_offset(store, ArtifactId(CHUNKS[5].key, DENSE))
    fail_reads(monkeypatch, {bad: how_often})
    done = scrub(store)
    assert (done.state, done.damaged) == ("complete", how_often - 1)
    expected = {"cause=io_error,tier=ssd": 1} if how_often == 2 else {}
    assert bench.counts("heterocache_failures") == expected


def test_a_disk_that_cannot_be_read_ends_the_scrub(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_AGAIN_S", 0.0)
    store.leave_to_ssd()
    fail_reads(monkeypatch, None)
    done = scrub(store)
    assert (done.state, done.reason) == ("stopped", "the disk cannot be read")
    assert done.damaged == module._MAX_UNREADABLE - 1, "the rest is kept: the disk may come back"


def fail_reads(monkeypatch: pytest.MonkeyPatch, times: dict[int, int] | None) -> None:
    """Fail reads at these offsets so often; None: all reads."""
    preadv = os.preadv

    def read(fd: int, buffers: list[memoryview], offset: int) -> int:
        if times is None or times.get(offset, 0) > 0:
            if times is not None:
                times[offset] -= 1
            raise OSError(errno.EIO, "Input/output error")
        return preadv(fd, buffers, offset)

    monkeypatch.setattr(slab_reader.os, "preadv", read)


def test_it_keeps_to_its_rate(tmp_path: Path) -> None:
    clock = Clock()
    store = Bench(tmp_path / "ssd", clock=clock).open()
    put(store, CHUNKS)
    assert store.flush(60)
    began_s, total = clock(), 2 * 6 * sum(SIZES.values())
    store.scrubber.run(total / 30, Passing(clock))
    assert clock() - began_s == pytest.approx(30)
    store.close()


class Passing(threading.Event):
    """An event that never comes; to wait for it takes no time but the clock's."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self._clock = clock

    def wait(self, timeout: float | None = None) -> bool:
        self._clock.passes(timeout or 0.0)
        return False


def test_one_at_a_time_and_it_can_be_stopped(store: ArtifactStore) -> None:
    assert store.scrubber.start(1.0)
    assert not store.scrubber.start(FAST)
    store.scrubber.stop()
    assert progress(store).state == "stopped"
    assert 0 < progress(store).chunks_checked < 6
    assert scrub(store).state == "complete"


def test_it_can_be_stopped_at_any_moment_of_its_start(store: ArtifactStore) -> None:
    scrubber = store.scrubber

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        scrubber.stop()
        return lambda: scrubber.start(1.0), scrubber.stop

    assert try_every_switch(prepare, module) > 5
    scrubber.stop()
    assert progress(store).state == "stopped"


def test_a_store_that_closes_ends_it(bench: Bench) -> None:
    store = bench.open()
    put(store, CHUNKS)
    before = threading.active_count()
    assert store.scrubber.start(1.0)
    store.close()
    assert threading.active_count() <= before
    assert not store.scrubber.start(FAST)


def test_a_store_in_dram_alone_is_checked(tmp_path: Path) -> None:
    store = Bench(None).open(verify="all")
    put(store, CHUNKS)
    until(lambda: snapshot(store.catalog).unsummed == 0)
    done = scrub(store)
    assert (done.state, done.chunks_checked) == ("complete", 6)
    assert done.bytes_checked == 6 * sum(SIZES.values())
    assert {x.tier for x in store.occupancy()} == {Tier.DRAM}
    store.close()


def test_what_has_no_checksum_yet_does_not_count_as_checked(bench: Bench) -> None:
    store = bench.open(run_io=False)
    put(store, CHUNKS)
    done = store.scrubber.run(FAST, threading.Event())
    assert (done.chunks, done.chunks_checked, done.chunks_skipped) == (6, 0, 6)
    assert progress_text(asdict(done)).startswith("100% of 0 chunks checked")
    while store.run_io_round():
        pass
    done = store.scrubber.run(FAST, threading.Event())
    assert (done.chunks, done.chunks_checked, done.chunks_skipped) == (6, 6, 0)
    store.scrubber.close()


def test_it_goes_on_while_restores_and_saves_run(bench: Bench) -> None:
    """With little DRAM, so that every save and restore evicts what is being checked."""
    store = bench.open(dram_chunks=4, ssd_chunks=40)
    others = [chain(name, 6) for name in "bcde"]
    put(store, CHUNKS)
    assert store.scrubber.start(FAST)
    for _ in range(3):
        for other in others:
            put(store, [x for x in other if len(store.missing(x, list(SIZES))) == 2])
            restore = wait(begin(store, ids_of(CHUNKS[:3])))
            assert intact(store, restore)
            restore.release()
            store.scrubber.start(FAST)
    until(lambda: progress(store).state != "running")
    assert progress(store).state == "complete"
    assert progress(store).damaged == 0
    assert bench.counts("heterocache_failures").get("cause=checksum,tier=ssd") is None
    store.check_integrity()
    store.close()
