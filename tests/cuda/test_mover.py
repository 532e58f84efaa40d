"""The mover moves exactly the bytes that plain indexing moves. Triton interprets its kernel."""

from __future__ import annotations

import weakref
from collections import Counter
from math import prod
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from heterocache_cuda import kernels, reference
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import (
    UPLOADS,
    Job,
    Launch,
    LaunchSizes,
    Mode,
    PageMover,
    Part,
    Tile,
    _within_a_grid,
    alignment_of,
    plan_moves,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction

from tests.cuda.memory import memory_of

NUM_BLOCKS = 6
CPU = torch.device("cpu")


def make_mover() -> PageMover:
    """Return a mover with few programs: the interpreter takes as long for one without work."""
    kernel = InterpretedFunction(kernels.move_pages.fn)
    return PageMover(CPU, kernel, LaunchSizes(programs=5, most_programs_per_job=3))


@st.composite
def page_views(draw: st.DrawFn) -> torch.Tensor:
    """`[NUM_BLOCKS, ...] uint8` in a random memory order, with padding, at any alignment."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    shape.append(draw(st.sampled_from([1, 4, 6, 8, 16, 24, 32, 584, 2056])))
    order = [*draw(st.permutations(range(len(shape) - 1))), len(shape) - 1]
    padding = draw(st.sampled_from([0, 1, 8, 16]))
    start = draw(st.sampled_from([0, 1, 4, 8]))
    page = prod(shape) + padding
    raw = torch.zeros(start + NUM_BLOCKS * page + 64, dtype=torch.uint8)
    strides, stride = [0] * len(shape), 1
    for dim in reversed(order):
        strides[dim], stride = stride, stride * shape[dim]
    return raw.as_strided((NUM_BLOCKS, *shape), (page, *strides), start)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pages_of_many_layers_move_as_by_plain_indexing(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    views = data.draw(st.lists(page_views(), min_size=1, max_size=3))
    ranks = data.draw(st.integers(1, 2))
    num_artifacts, pages = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    jobs, offset = [], data.draw(st.sampled_from([0, 1, 16]))
    for view in views:
        layout = PageLayout.of(view)
        pitch = layout.page_bytes * ranks
        rank = data.draw(st.integers(0, ranks - 1))
        jobs.append(Job(layout, offset + rank * layout.page_bytes, pitch, pages))
        offset += pages * pitch
    arena = np.zeros(4 * (offset + 32), np.uint8)
    slots = data.draw(st.permutations(range(4)))[:num_artifacts]
    first = data.draw(st.sampled_from([0, 16 - arena.ctypes.data % 16]))
    addresses = np.array([arena.ctypes.data + first + s * (offset + 8) for s in slots], np.int64)
    ids = rng.permutation(NUM_BLOCKS * 2)[: num_artifacts * pages].reshape(num_artifacts, -1)
    ids[ids >= NUM_BLOCKS] = 0
    batches = data.draw(st.lists(st.integers(0, 1), min_size=len(jobs), max_size=len(jobs)))
    part = Part(
        np.array([job.row() for job in jobs], np.int64),
        [job.tile(alignment_of(addresses)) for job in jobs],
        np.zeros(len(jobs), np.int64),
        [ids],
        addresses,
        np.array(batches),
    )
    mover, moves = make_mover(), plan_moves([part], num_batches=2)
    for mode in (Mode.SAVE, Mode.LOAD, Mode.CLEAR):
        memories = [torch.from_numpy(arena), *map(memory_of, views)]
        for memory in memories:
            memory.copy_(torch.from_numpy(rng.integers(1, 256, memory.shape, dtype=np.uint8)))
        before = [memory.clone() for memory in memories]
        for batch in (0, 1):
            mover.launch(mode, moves, mover.upload(moves), batch)
        moved = [memory.clone() for memory in memories]
        for memory, raw in zip(memories, before, strict=True):
            memory.copy_(raw)
        for job in jobs:
            reference.move(mode, job, ids, addresses.tolist())
        for memory, found in zip(memories, moved, strict=True):
            assert torch.equal(found, memory)


def test_one_launch_moves_all_layers_of_a_batch() -> None:
    view = torch.zeros(NUM_BLOCKS, 4096, dtype=torch.uint8)
    job = Job(PageLayout.of(view), 0, 4096, 2)
    ids, addresses = np.ones((3, 2), np.int64), np.arange(3) * 8192
    part = Part(
        np.array([job.row()] * 80),
        [job.tile(alignment_of(addresses))] * 80,
        np.zeros(80, np.int64),
        [ids],
        addresses,
        np.repeat(np.arange(4), 20),
    )
    moves = plan_moves([part], num_batches=4)
    assert [[(x.first, x.stop) for x in b] for b in moves.batches] == [
        [(i, i + 20)] for i in (0, 20, 40, 60)
    ]


def test_a_launch_has_no_more_jobs_than_a_grid() -> None:
    launches = [Launch(Tile(16, 1, 64), 0, 100_000), Launch(Tile(8, 1, 64), 100_000, 100_001)]
    cut = [(x.first, x.stop) for x in _within_a_grid(launches)]
    assert cut == [(0, 65_535), (65_535, 100_000), (100_000, 100_001)]


def test_pages_with_too_many_dimensions_of_rows_are_refused() -> None:
    raw = torch.zeros(2, 2, 2, 2, 2, 3, 8, dtype=torch.uint8)
    with pytest.raises(ValueError, match="4 dimensions of rows"):
        PageLayout.of(raw[:, :, :, :, :, 0].permute(0, 4, 3, 2, 1, 5))


class Tensor:
    pass


class TorchCache:
    """The memory that torch has asked the driver for: it keeps what is released, by size."""

    def __init__(self) -> None:
        self.free: Counter[tuple[int, str]] = Counter()
        self.asked: Counter[tuple[int, str]] = Counter()

    def empty(self, size: int, *, dtype: torch.dtype, **place: Any) -> object:
        assert (dtype, place) in [
            (torch.uint8, {"pin_memory": True}),
            (torch.uint8, {"device": torch.device("cuda", 1)}),
        ]
        key = size, *place
        self.asked[key] += not self.free[key]
        self.free[key] -= self.free[key] > 0
        tensor = Tensor()
        weakref.finalize(tensor, self.release, key)
        return tensor

    def release(self, key: tuple[int, str]) -> None:
        self.free[key] += 1


def test_reserved_uploads_ask_the_driver_for_nothing_later() -> None:
    cache = TorchCache()
    with patch.object(torch, "empty", cache.empty):
        PageMover(torch.device("cuda", 1)).reserve_uploads()
    wanted = {(n, x): count for n, count in UPLOADS.items() for x in ("pin_memory", "device")}
    assert cache.asked == cache.free == wanted
    assert sum(n * count for n, count in UPLOADS.items()) <= 8 << 20
