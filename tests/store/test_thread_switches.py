"""Threads may switch between any two bytecodes: no answer without the lock is wrong there."""

import math
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from unittest.mock import MagicMock

import pytest

from benchmarks.known_peers import KnownPeers
from hetero_connector.artifacts.record import ArtifactId, ChunkKey, ChunkRange
from hetero_connector.metrics import Recorder
from hetero_connector.spec.state_types import StateType
from hetero_connector.store import batch_runner, checksums, io_thread
from hetero_connector.store.artifact_store import ArtifactStore
from hetero_connector.store.base import Failure, StoreConfig, Wanted
from hetero_connector.store.catalog import (
    artifact_queue,
    catalog,
    exports,
    index,
    lifetimes,
    loads,
    prefetch,
    restore,
    tiers,
    writes,
)
from hetero_connector.store.catalog.catalog import Catalog
from hetero_connector.store.catalog.exports import ExportFeed
from hetero_connector.store.catalog.nodes import Artifact, Node
from hetero_connector.store.catalog.prefetch_schedule import ExpectedReturn
from hetero_connector.store.catalog.restore import Restore
from hetero_connector.store.catalog.writes import Writes
from hetero_connector.store.peers.ports import PeerAccess
from hetero_connector.store.ssd import journal_rows, reader, writer
from tests.clock import Clock
from tests.faults.life import MEMORY
from tests.faults.oracle import Oracle
from tests.interleaving import at_each_step, random_switches, try_every_switch
from tests.store.filling import (
    CHUNK,
    CHUNK_BYTES,
    FINGERPRINT,
    SIZES,
    WINDOW,
    Bench,
    Disk,
    begin,
    chain,
    fill,
    forget_all,
    ids_of,
    intact,
    put,
    slab_offset,
)
from tests.store.under_way import snapshot
from tests.transfer.memory_peers import MemoryNetwork, MemoryPeers
from tests.waiting import until

CHUNKS, OTHERS = chain("a", 6), chain("b", 2)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory, where a sync takes no time."""
    with tempfile.TemporaryDirectory(prefix="switches-", dir=MEMORY) as name:
        yield Path(name)


@pytest.fixture
def store(folder: Path, disk: Disk, clock: Clock) -> ArtifactStore:
    """A store whose I/O thread's rounds are done by hand."""
    return Bench(folder / "ssd", disk, clock).open(run_io=False)


def rounds(store: ArtifactStore, count: int = 40) -> None:
    """Do so many rounds of the I/O thread: a few are enough for anything."""
    for _ in range(count):
        store.run_io_round()


@pytest.mark.parametrize("is_spoiled", [False, True], ids=["intact", "spoiled"])
def test_a_restore_is_done_only_when_its_outcome_can_be_read(
    store: ArtifactStore, disk: Disk, is_spoiled: bool
) -> None:
    put(store, CHUNKS[:1])
    rounds(store)
    store.leave_to_ssd()
    disk.slab[slab_offset(store, ArtifactId(CHUNKS[0].key, WINDOW)) + 100] ^= is_spoiled
    begun = begin(store, ids_of(CHUNKS[:1]))
    outcomes: list[int] = []

    def ask() -> None:
        if begun.poll():
            outcomes.append(len(begun.offsets) + len(begun.failed))

    with at_each_step(ask, catalog, restore, loads, tiers, index, reader):
        rounds(store)
    assert set(begun.failed.values()) == ({Failure.CHECKSUM} if is_spoiled else set())
    assert set(outcomes) == {len(SIZES)}
    begun.release()


def test_what_is_stored_is_found_while_it_moves_between_tiers(store: ArtifactStore) -> None:
    found: list[int] = []

    def ask() -> None:
        found.append(len(store.match(CHUNKS[:1])))
        assert store.match(CHUNKS[:1]) == store.holdings(CHUNKS[:1])

    put(store, CHUNKS[:1])
    with at_each_step(ask, index):
        rounds(store)  # a copy on SSD
        store.leave_to_ssd()
        begin(store, ids_of(CHUNKS[:1])).release()
        rounds(store)
    assert set(found) == {1}


def pause_and_save(store: ArtifactStore) -> None:
    """Save some chunks while nothing is written."""
    store.catalog.pause_writing(math.inf)
    put(store, CHUNKS[:3])
    while store.run_io_round():
        pass


def test_all_is_written_that_is_saved_while_writing_resumes(store: ArtifactStore) -> None:
    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        rounds(store, 10)
        assert all(a.ssd is not None for a in store.catalog.tiers.index.artifacts())
        forget_all(store)
        pause_and_save(store)
        return store.catalog.resume_writing, lambda: put(store, CHUNKS[3:4])

    assert try_every_switch(prepare, catalog, writes, every=5) > 20


def test_a_flush_does_not_end_before_what_was_not_written_is_queued(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catalog, "_OFFERED_AT_ONCE", 2)
    pause_and_save(store)
    drained: list[bool] = []
    with at_each_step(lambda: drained.append(store.catalog.writes.is_drained), catalog, writes):
        store.catalog.resume_writing()
    assert len(drained) > 100
    assert not any(drained)
    assert len(store.catalog.writes) == 3 * len(SIZES)


def test_what_was_not_written_is_searched_without_the_lock(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_and_save(store)
    search, offer_all, offered = Writes.unwritten, Writes.offer_all, list[int]()

    def search_while_another_thread_looks(asked: Writes) -> list[Artifact]:
        thread = threading.Thread(target=store.occupancy, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waits for the lock"
        return search(asked)

    def offer(asked: Writes, artifacts: Sequence[Artifact]) -> None:
        offered.append(len(artifacts))
        offer_all(asked, artifacts)

    monkeypatch.setattr(catalog, "_OFFERED_AT_ONCE", 4)
    monkeypatch.setattr(Writes, "unwritten", search_while_another_thread_looks)
    monkeypatch.setattr(Writes, "offer_all", offer)
    store.catalog.resume_writing()
    assert offered == [4, 2]


class Watched(MagicMock):
    """An artifact; while it is looked at another thread gets the catalog's lock."""

    store: ArtifactStore
    is_seen = False

    @property
    def sealed(self) -> bool:
        thread = threading.Thread(target=self.store.occupancy, daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), "it waits for the lock"
        self.is_seen = True
        return False

    @property
    def ssd(self) -> bool:
        return self.sealed


@pytest.mark.parametrize("look", [Catalog.take_used, Catalog.queue_used_writes])
def test_what_restores_used_is_sorted_without_the_lock(
    store: ArtifactStore, look: Callable[[Catalog], object]
) -> None:
    store.catalog.set_write_budget(MagicMock())
    used = Watched()
    used.store = store
    store.catalog._used[used] = None
    look(store.catalog)
    assert used.is_seen


def test_no_use_is_lost_while_they_are_taken(store: ArtifactStore) -> None:
    put(store, CHUNKS[:2])
    rounds(store)
    taken = [0]
    use = partial(_use, store, CHUNKS[1:2])

    def take() -> None:
        taken[0] += len(store.catalog.take_used())

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        take()
        _use(store, CHUNKS[:1])
        return take, use

    tries = try_every_switch(prepare, catalog)
    assert tries > 5
    take()
    assert taken[0] == (2 * tries - 1) * len(SIZES), "the last try has no second use"


def _use(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> None:
    begin(store, ids_of(chunks)).release()


def test_a_round_that_finds_nothing_takes_no_lock(
    store: ArtifactStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, CHUNKS)
    rounds(store)
    lock = MagicMock()
    with monkeypatch.context() as patch:
        patch.setattr(store.catalog, "_lock", lock)
        assert not store.run_io_round()
        assert not store.catalog.has_overdue_write()
    assert lock.__enter__.call_count == 0
    store.check_integrity()


def test_a_request_sees_a_limit_at_each_moment_until_it_is_lifted(
    store: ArtifactStore, clock: Clock
) -> None:
    put(store, CHUNKS[:1])
    store.retention.limit_life([CHUNKS[0].key], 1.0, is_forgotten=False)
    clock.passes(1.0)
    seen, limits = list[bool](), store.retention._lifetimes
    with at_each_step(lambda: seen.append(bool(limits)), lifetimes):
        store.expire_due()
    assert len(seen) > 100
    assert all(seen)
    store.retention.lift_limits((CHUNKS[0].key,))
    assert not limits


def test_tails_can_be_asked_for_while_one_is_added(store: ArtifactStore) -> None:
    parent = CHUNKS[0]
    tail, other = (
        ChunkRange(ChunkKey(bytes([n]) * 16), parent.key, parent.end, parent.end + n)
        for n in (64, 128)
    )

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        forget_all(store)
        put(store, [parent, tail])
        return ask, lambda: put(store, [other])

    def ask() -> None:
        assert 64 in store.tails(parent.key)

    assert try_every_switch(prepare, index) > 5
    forget_all(store)
    put(store, [parent, tail])
    with at_each_step(ask, index):
        put(store, [replace(tail, key=other.key)])  # of the same length


def test_the_io_thread_asks_for_an_overdue_write_while_it_is_forgotten(
    store: ArtifactStore, disk: Disk, clock: Clock
) -> None:
    put(store, CHUNKS[:1])
    rounds(store)
    store.leave_to_ssd()
    disk.files.hang_next()
    begun = begin(store, ids_of(CHUNKS[:1]))
    rounds(store, 1)  # a read is under way, to which writes yield
    assert store.io_thread is not None
    assert store.io_thread.ssd is not None
    device = store.io_thread.ssd.write_device

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        put(store, chain("b", 1))
        clock.passes(0.01)
        return lambda: device.may_begin([], []), lambda: forget_all(store)

    assert try_every_switch(prepare, catalog, writes, artifact_queue) > 5
    begun.release()


def test_a_loss_of_exports_is_always_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exports, "_MAX_CHANGES", 1)
    artifact = Artifact(Node(CHUNKS[0], None), StateType.DENSE_KV, 1)
    artifact.checksum = b"x"
    noticed: list[bool] = []
    feed = ExportFeed()

    def prepare() -> tuple[Callable[[], object], Callable[[], object]]:
        nonlocal feed
        if noticed:
            assert noticed[-1] or feed.take_loss()
        feed = ExportFeed()
        feed.on_forgotten(artifact)
        return lambda: noticed.append(feed.take_loss()), lambda: feed.on_forgotten(artifact)

    assert try_every_switch(prepare, exports) > 3


def _save(store: ArtifactStore, chunks: Sequence[ChunkRange]) -> None:
    """Save what is missing, as far as there is room."""
    for chunk in chunks:
        missing = store.missing(chunk, list(SIZES))
        save = store.begin_save(chunk, {t: SIZES[t] for t in missing}) if missing else None
        if save is not None:
            fill(store, save)
            store.complete_save(save)


def _reset(store: ArtifactStore, restores: list[Restore]) -> None:
    store.reset()


def _restore_again(store: ArtifactStore, restores: list[Restore]) -> None:
    restores.append(begin(store, ids_of([*OTHERS, *CHUNKS[:3]])))


def _release(store: ArtifactStore, restores: list[Restore]) -> None:
    while restores:
        restores.pop().release()


def _forget_and_save_again(store: ArtifactStore, restores: list[Restore]) -> None:
    forget_all(store)
    _save(store, [CHUNKS[0], *OTHERS])


def _return(store: ArtifactStore, restores: list[Restore]) -> None:
    store.session_returned("session")
    restores.append(begin(store, ids_of(CHUNKS[:3])))


_ACTS = [_reset, _restore_again, _release, _forget_and_save_again, _return]
_IO = (batch_runner, checksums, io_thread, catalog, prefetch, journal_rows, reader, writer)


class _Rounds:
    """Rounds of the I/O thread that read, prefetch and write, in which the scheduler acts once."""

    def __init__(self, folder: Path, act: Callable[[ArtifactStore, list[Restore]], None]) -> None:
        self._act = act
        self._folder = folder
        self._num_tries = 0
        self._store: ArtifactStore | None = None
        self._bench: Bench
        self._restores: list[Restore] = []
        self._has_acted = False

    def prepare(self) -> tuple[Callable[[], object], Callable[[], object]]:
        """Judge the last try and open a store for the next."""
        self.judge()
        self._num_tries += 1
        self._bench = Bench(self._folder / str(self._num_tries), Disk(), Clock())
        store = self._store = self._open()
        put(store, CHUNKS[:3])
        until(lambda: not (store.run_io_round() or snapshot(store.catalog).writing))
        store.leave_to_ssd()
        put(store, OTHERS)
        store.expect(ExpectedReturn("session", (CHUNKS[2].key,), 0.0, math.inf, 0.9))
        if self._act is not _return:
            self._restores = [begin(store, ids_of(CHUNKS[:3]))]
        self._has_acted = False
        return lambda: rounds(store, 14), self._act_now

    def judge(self) -> None:
        """Every restore has an outcome and its own bytes, also after a restart."""
        if self._store is None:
            return
        for _ in range(2):
            store = self._store
            self._restores.append(begin(store, ids_of(CHUNKS[:3])))
            until(self._is_settled)
            for restored in self._restores:
                assert intact(store, restored)
                restored.release()
            self._restores = []
            store.check_integrity()
            assert store.io_thread is not None
            assert store.catalog.io_alive
            if self._act is _reset and self._has_acted:
                assert not store.match(CHUNKS)
            store.io_thread.start()
            store.close()
            self._store = self._open()
        self._store.io_thread.start()
        self._store.close()

    def _act_now(self) -> None:
        assert self._store is not None
        self._has_acted = True
        self._act(self._store, self._restores)

    def _is_settled(self) -> bool:
        assert self._store is not None
        return not self._store.run_io_round() and all(x.poll() for x in self._restores)

    def _open(self) -> ArtifactStore:
        return self._bench.open(run_io=False, dram_chunks=6, ssd_chunks=8)


@pytest.mark.parametrize("act", _ACTS)
@pytest.mark.parametrize(
    "every",
    [pytest.param(4001, marks=pytest.mark.long), pytest.param(61, marks=pytest.mark.slow)],
)
def test_the_scheduler_may_act_at_any_moment_of_the_io_threads_rounds(
    folder: Path, act: Callable[[ArtifactStore, list[Restore]], None], every: int
) -> None:
    tries = _Rounds(folder, act)
    assert try_every_switch(tries.prepare, *_IO, every=every) > 3
    tries.judge()


class _Engine:
    """The scheduler's and the fleet's thread of a small store, with an oracle of bytes."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.wrong: list[str] = []
        self._num_restored = 0
        self._rng = Random(seed)
        self._oracle = Oracle()
        self._restores: list[tuple[Restore, int, int]] = []
        """Each with the number of its artifacts, and the weights when it began."""
        self._is_over = False
        self._tag = b""
        self._store = ArtifactStore.open(
            SIZES,
            StoreConfig(
                6 * CHUNK_BYTES,
                ssd_dir=folder,
                ssd_bytes=14 * CHUNK_BYTES,
                spill_delay_s=0.0,
                load_deadline_s=60.0,
                verify=self._rng.choice(("ssd", "sample", "all")),
                eviction=self._rng.choice(("leaf_lru", "value")),
            ),
            Recorder(),
            chunk_tokens=CHUNK,
            fingerprint=FINGERPRINT,
            description={},
            open_transfer=Disk(),
            peers=PeerAccess(KnownPeers(), lambda regions: MemoryPeers(MemoryNetwork(), regions)),
        )

    def run(self, restores: int) -> None:
        """Use the store until so many artifacts were restored, then close it."""
        fleet = threading.Thread(target=self._guard, args=(self._use_as_fleet,), name="fleet")
        fleet.start()
        acts = (self._save, self._restore, self._restore, self._release, self._release, self._hint)
        while self._num_restored < restores and not self.wrong:
            if self._rng.random() < 0.02:
                self._store.reset()
            self._adopt_generation()
            self._guard(self._rng.choice(acts))
            self._guard(self._look)
        self._is_over = True
        fleet.join()
        for begun, _, _ in self._restores:
            begun.release()
        if not self._store.catalog.io_alive:
            self.wrong.append("the I/O thread has ended")
        self._store.close()
        self._store.check_integrity()

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:
            self.wrong.append(traceback.format_exc())

    def _trunk(self) -> list[ChunkRange]:
        name = self._rng.choice("abcdef")
        trunk = chain(f"{self._tag.hex()}{name}", 4)
        end = trunk[-1].end
        tail = ChunkRange(ChunkKey(trunk[0].key[::-1]), trunk[-1].key, end, end + CHUNK // 2)
        return [*trunk, tail]

    def _save(self) -> None:
        for chunk in self._trunk():
            missing = self._store.missing(chunk, list(SIZES))
            if not missing:
                continue
            save = self._store.begin_save(chunk, {t: SIZES[t] for t in missing})
            if save is None:
                return
            for kind, at in save.offsets.items():
                bytes_ = self._oracle.contents(ArtifactId(chunk.key, kind))
                self._store.arena.view[at : at + len(bytes_)] = bytes_
            self._store.complete_save(save)

    def _restore(self) -> None:
        found = self._store.match(self._trunk())
        if not found or len(self._restores) >= 3:
            return
        if self._rng.random() < 0.7:
            self._store.leave_to_ssd()
        wanted = [
            Wanted(kind, chunks)
            for kind in SIZES
            if (chunks := [x for x in found if kind in x.tiers])
        ]
        count = sum(len(x.chunks) for x in wanted)
        begun = self._store.begin_restore(wanted)
        self._restores.append((begun, count, self._oracle.weights))

    def _look(self) -> None:
        """Ask until there is nothing to wait for, or for long enough."""
        until_s = time.monotonic() + 0.05
        waiting = list(self._restores)
        while waiting and time.monotonic() < until_s:
            for begun in [x for x in waiting if x[0].poll()]:
                waiting.remove(begun)
                answer, count, _ = begun
                if len(answer.offsets) + len(answer.failed) != count:
                    self.wrong.append(f"of {count}: {answer.offsets}, {answer.failed}")

    def _release(self) -> None:
        if self._restores and self._restores[0][0].poll():
            ended, _, weights = self._restores.pop(0)
            self.wrong += self._oracle.judge(self._store, ended, weights)
            self._num_restored += len(ended.offsets)
            ended.release()

    def _hint(self) -> None:
        trunk, now_s = self._trunk(), time.monotonic()
        leaves = [chunk.key for chunk in reversed(trunk)]
        self._store.tails(trunk[3].key)
        self._store.decline(self._store.holdings(trunk)[2:])
        self._store.retention.protect_chain(trunk[0].key, leaves, now_s + 1.0)
        self._store.expect(ExpectedReturn(trunk[0].key, tuple(leaves), now_s, now_s + 1.0, 0.9))
        self._store.take_timings()

    def _adopt_generation(self) -> None:
        """After a reset, of this engine or of the fleet, other bytes are right."""
        latest = self._store.catch_up().tag
        if latest != self._tag:
            self._oracle.on_reset(self._tag, is_kept=True)
            self._tag = latest

    def _use_as_fleet(self) -> None:
        sharing, rng = self._store.sharing, Random(0)
        assert sharing is not None
        sharing.serve_under(1)
        number = 0
        while not self._is_over:
            number += rng.random() < 0.02
            sharing.note_fleet_generation(number, sharing.generation)
            sharing.take_export_loss()
            changes = [x for x in sharing.take_exports() if x.copy is not None]
            ids = [ArtifactId(x.chunk.key, x.state_type) for x in changes]
            owned = {artifact: 1 for artifact in ids if rng.random() < 0.8}
            sharing.resolve_claims(owned, set(ids).difference(owned))
            known = [change for batch in sharing.inventory() for change in batch]
            sharing.find_gone([ArtifactId(x.chunk.key, x.state_type) for x in known])
            sharing.set_foreign_users(
                {key: rng.random() < 0.5 for key in sharing.next_victims(4)}, 1
            )
            sharing.take_changed_users()
            time.sleep(0.002)


def play(folder: Path, seed: int, restores: int) -> None:
    with random_switches(seed, "hetero_connector/store/"):
        engine = _Engine(folder, seed)
        engine.run(restores)
    assert not engine.wrong, "\n".join(engine.wrong)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_no_answer_is_wrong_however_threads_switch(folder: Path, seed: int) -> None:
    play(folder / "ssd", seed, restores=50)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_no_answer_is_wrong_however_threads_switch_in_many_rounds(folder: Path, seed: int) -> None:
    play(folder / "ssd", seed, restores=300)
