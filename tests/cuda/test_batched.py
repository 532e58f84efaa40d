"""Copy engines move the bytes that plain indexing moves, and are chosen where they are faster."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch
from heterocache_cuda import reference
from heterocache_cuda.batched import (
    _scattered,
    compare,
    copy_pages,
    measure_copy_table,
    plan_copies,
    split,
)
from heterocache_cuda.driver import CudaError, Driver
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import Int64Array, Job, Mode, PageMover, Part, alignment_of, plan_moves
from hypothesis import given, settings
from hypothesis import strategies as st

from .stand_in_driver import DEFAULT_STREAM, INVALID_VALUE, StandInLibrary

NUM_BLOCKS = 7
STREAM = 1
IN_STREAM_ORDER, IN_ANY_ORDER = 1, 3


def make_part(jobs: list[Job], ids: list[Int64Array], addresses: Int64Array) -> Part:
    """Give every second job the second block ids, and every third the second batch."""
    numbers = np.arange(len(jobs))
    tiles = [job.tile(alignment_of(addresses)) for job in jobs]
    rows = np.array([job.row() for job in jobs], np.int64)
    return Part(rows, tiles, numbers % len(ids), ids, addresses, (numbers % 3 == 2).astype(int))


def driver(library: StandInLibrary | None = None) -> Driver:
    return Driver.open(0, library or StandInLibrary())


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_copies_move_bytes_as_by_plain_indexing(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    artifacts = data.draw(st.integers(1, 4))
    ids, jobs, offset, memories = [], [], data.draw(st.integers(0, 3)), []
    for _ in range(2):
        pages = data.draw(st.integers(1, 3))
        drawn = rng.permutation(NUM_BLOCKS * 2)[: artifacts * pages].reshape(artifacts, -1)
        ids.append(np.where(drawn < NUM_BLOCKS, drawn, 0))
    for number in range(data.draw(st.integers(1, 5))):
        size, padding = data.draw(st.integers(1, 50)), data.draw(st.integers(0, 2))
        ranks = data.draw(st.integers(1, 2))
        raw = torch.zeros(NUM_BLOCKS, size + padding, dtype=torch.uint8)
        memories.append(raw.numpy())
        pages = ids[number % 2].shape[1]
        jobs.append(Job(PageLayout.of(raw[:, :size]), offset, size * ranks, pages))
        offset += pages * size * ranks
    arena = np.zeros(artifacts * offset, np.uint8)
    memories.append(arena)
    addresses = arena.ctypes.data + rng.permutation(artifacts) * offset
    part = make_part(jobs, ids, addresses)
    library, cut_bytes = StandInLibrary(), data.draw(st.integers(20, 200))
    calls = driver(library)
    for start in range(0, len(arena), cut_bytes):
        calls.register(arena.ctypes.data + start, min(cut_bytes, len(arena) - start))
    batches = plan_copies([part], arena.ctypes.data, 2, cut_bytes)
    for mode in (Mode.SAVE, Mode.LOAD):
        for memory in memories:
            memory[:] = rng.integers(1, 256, memory.shape, np.uint8)
        before = [memory.copy() for memory in memories]
        for copies in batches:
            copy_pages(calls, mode, copies, STREAM)
        moved = [memory.copy() for memory in memories]
        for memory, old in zip(memories, before, strict=True):
            memory[:] = old
        for number, job in enumerate(jobs):
            reference.move(mode, job, ids[number % 2], addresses.tolist())
        for memory, found in zip(memories, moved, strict=True):
            assert np.array_equal(found, memory)


def pages_part(sizes: list[int]) -> Part:
    views = [torch.zeros(3, size, dtype=torch.uint8) for size in sizes]
    jobs = [Job(PageLayout.of(v), 0, v.shape[1], 1) for v in views]
    return make_part(jobs, [np.ones((2, 1), np.int64)], np.array([0, 1 << 20]))


def test_batches_have_the_copies_of_their_jobs() -> None:
    first, second = plan_copies([pages_part([16, 32, 48]), pages_part([64])], 0, 2)
    assert sorted(first.sizes) == [16, 16, 32, 32, 64, 64]
    assert sorted(second.sizes) == [48, 48]


def test_loads_may_read_early_and_saves_may_not() -> None:
    library = StandInLibrary()
    raw, arena = torch.zeros(2, 8, dtype=torch.uint8), np.zeros(8, np.uint8)
    job = Job(PageLayout.of(raw), 0, 8, 1)
    part = make_part([job], [np.ones((1, 1), np.int64)], np.array([arena.ctypes.data]))
    (copies, nothing) = plan_copies([part], arena.ctypes.data, 2)
    for mode in (Mode.LOAD, Mode.SAVE):
        copy_pages(driver(library), mode, copies, STREAM)
        copy_pages(driver(library), mode, nothing, STREAM)
    assert library.orders == [IN_ANY_ORDER, IN_STREAM_ORDER]
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed with CUDA_ERROR_INVALID_VALUE"):
        copy_pages(driver(library), Mode.LOAD, copies, DEFAULT_STREAM)


def test_a_batch_that_fails_names_the_call() -> None:
    library = StandInLibrary({"cuMemcpyBatchAsync": {0: INVALID_VALUE}})
    (copies,) = plan_copies([pages_part([16])], 0)
    with pytest.raises(CudaError, match="cuMemcpyBatchAsync failed"):
        copy_pages(driver(library), Mode.LOAD, copies, STREAM)


def test_an_older_driver_cannot_copy_batches() -> None:
    library = StandInLibrary()
    assert driver(library).can_copy_batches
    del library.cuMemcpyBatchAsync  # type: ignore[attr-defined]
    old = driver(library)
    assert not old.can_copy_batches
    with patch.object(Driver, "open", lambda _: old), patch.object(torch.cuda, "Stream"):
        assert measure_copy_table(torch.device("cuda", 0)) == {}


def test_strided_pages_are_for_the_kernel() -> None:
    view = torch.zeros(3, 2, 64 << 10, dtype=torch.uint8)[:, :, : 32 << 10]
    job = Job(PageLayout.of(view), 0, 64 << 10, 1)
    part = make_part([job], [np.ones((1, 1), np.int64)], np.array([0]))
    by_kernel, by_copies = split({Mode.SAVE: 4096}, Mode.SAVE, part)
    assert (len(by_kernel.rows), len(by_copies.rows)) == (1, 0)
    with pytest.raises(ValueError, match="contiguous"):
        plan_copies([part], 0)


def test_the_table_splits_jobs_by_size_and_direction() -> None:
    part = pages_part([8 << 10, 28 << 10, 64 << 10])
    table = {Mode.SAVE: 28 << 10}
    for mode, copied in ((Mode.LOAD, []), (Mode.SAVE, [28, 64]), (Mode.CLEAR, [])):
        by_kernel, by_copies = split(table, mode, part)
        assert [row[8] >> 10 for row in by_copies.rows] == copied
        assert len(by_kernel.rows) == len(by_kernel.tiles) == 3 - len(copied)
        assert len(by_copies.tiles) == len(by_copies.ids_of_job) == len(copied)


@pytest.mark.parametrize("page_bytes", [64, 4096])
def test_what_is_measured_is_a_launch_of_eight_layers(page_bytes: int) -> None:
    size_bytes = 64 << 10
    arena = torch.arange(size_bytes // 4, dtype=torch.int32).view(torch.uint8)
    memory = torch.zeros(2 * size_bytes, dtype=torch.uint8)
    part = _scattered(memory, arena, page_bytes)
    ((launch,),) = plan_moves([part]).batches
    assert launch.stop - launch.first == 8
    (copies,) = plan_copies([part], arena.data_ptr())
    assert len(np.unique(copies.in_pages)) == len(copies.sizes) == size_bytes // page_bytes
    copy_pages(driver(), Mode.LOAD, copies, STREAM)
    moved = memory.view(-1, page_bytes)
    moved = moved[moved.bool().any(1)]
    assert sorted(moved.tolist()) == sorted(arena.view(-1, page_bytes).tolist())


class Ways:
    """A mover and a copier whose moves take the seconds that a test says."""

    def __init__(self, copies_win: dict[tuple[Mode, int], bool]) -> None:
        self.now_s = 0.0
        self._copies_win = copies_win
        outer = self

        class Mover(PageMover):
            def launch(self, mode: Mode, moves: object, data: object, batch: int = 0) -> None:
                outer.now_s += 1.0

        self.mover = Mover(torch.device("cpu"))

    def copy_batch(
        self,
        targets: Int64Array,
        sources: Int64Array,
        sizes: Int64Array,
        stream: int,
        *,
        is_source_stable: bool,
    ) -> None:
        mode = Mode.LOAD if is_source_stable else Mode.SAVE
        self.now_s += 0.5 if self._copies_win[mode, int(sizes[0])] else 2.0


@pytest.mark.parametrize(
    ("load_wins", "from_bytes"),
    [
        ([False, False, True, True], 1024),
        ([True, True, True, True], 256),
        ([True, False, True, True], 1024),
        ([False, False, False, False], None),
        ([True, True, True, False], None),
    ],
)
def test_the_table_begins_where_copies_are_faster_from_then_on(
    load_wins: list[bool], from_bytes: int | None
) -> None:
    sizes = [256, 512, 1024, 2048]
    wins = {(Mode.LOAD, size): win for size, win in zip(sizes, load_wins, strict=True)}
    ways = Ways(wins | {(Mode.SAVE, size): size == 2048 for size in sizes})
    table = compare(
        ways.mover,
        ways,
        torch.device("cpu"),
        STREAM,
        lambda: None,
        page_sizes=sizes,
        total_bytes=8192,
        clock=lambda: ways.now_s,
    )
    assert table == ({Mode.LOAD: from_bytes} if from_bytes else {}) | {Mode.SAVE: 2048}
