"""Through a bounce buffer the same bytes move as by plain indexing, and no others."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from heterocache_cuda import reference
from heterocache_cuda.bounce import BounceBuffer
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import Job, Mode, Part, alignment_of
from hypothesis import given, settings
from hypothesis import strategies as st

from .test_mover import NUM_BLOCKS, make_mover, page_views


def make_part(jobs: list[Job], ids: np.ndarray, addresses: np.ndarray) -> Part:
    return Part(
        np.array([job.row() for job in jobs], np.int64),
        [job.tile(alignment_of(addresses)) for job in jobs],
        np.zeros(len(jobs), np.int64),
        [ids],
        addresses,
        np.arange(len(jobs)) % 2,
    )


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_bytes_move_as_by_plain_indexing(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    views = data.draw(st.lists(page_views(), min_size=1, max_size=2))
    ranks, pages = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    num_artifacts = data.draw(st.integers(1, 4))
    jobs, offset = [], data.draw(st.sampled_from([0, 3]))
    for view in views:
        layout = PageLayout.of(view)
        jobs.append(Job(layout, offset, layout.page_bytes * ranks, pages))
        offset += pages * layout.page_bytes * ranks
    artifact_bytes = offset + 5
    arena = rng.integers(1, 256, num_artifacts * artifact_bytes, np.uint8)
    addresses = arena.ctypes.data + rng.permutation(num_artifacts) * artifact_bytes
    ids = rng.permutation(NUM_BLOCKS * 2)[: num_artifacts * pages].reshape(num_artifacts, -1)
    ids[ids >= NUM_BLOCKS] = 0
    part = make_part(jobs, ids, addresses)
    fits = data.draw(st.integers(1, 3)) * (artifact_bytes + 32)
    finished: list[None] = []
    buffer = BounceBuffer(
        make_mover(), arena, torch.zeros(fits, dtype=torch.uint8), lambda: finished.append(None)
    )
    memories = [arena, *(torch.as_tensor(v.untyped_storage()).numpy() for v in views)]
    for mode in Mode:
        for memory in memories:
            memory[:] = rng.integers(1, 256, memory.shape, np.uint8)
        before = [memory.copy() for memory in memories]
        buffer.move(mode, part)
        moved = [memory.copy() for memory in memories]
        for memory, old in zip(memories, before, strict=True):
            memory[:] = old
        for job in jobs:
            reference.move(mode, job, ids, addresses.tolist())
        for memory, found in zip(memories, moved, strict=True):
            assert np.array_equal(found, memory)
    assert finished


def test_an_artifact_larger_than_the_buffer_is_refused() -> None:
    view, arena = torch.zeros(2, 64, dtype=torch.uint8), np.zeros(64, np.uint8)
    part = make_part(
        [Job(PageLayout.of(view), 0, 64, 1)], np.ones((1, 1), int), np.array([arena.ctypes.data])
    )
    buffer = BounceBuffer(make_mover(), arena, torch.zeros(48, dtype=torch.uint8), lambda: None)
    with pytest.raises(ValueError, match="64 bytes of an artifact"):
        buffer.move(Mode.LOAD, part)
