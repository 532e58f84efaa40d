"""Copies between host pages and the arena, for every order of block ids."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero_connector.engine.worker.pages import ArenaRows, HostPages, as_slice

NUM_BLOCKS, ROWS, PAGES = 40, 3, 4
ORDERS = {
    "ascending": list(range(5, 17)),
    "descending": list(range(16, 4, -1)),
    "down to the first block": list(range(11, -1, -1)),
    "consecutive but for two": [*range(5, 15), 16, 15],
    "scattered": [3, 30, 7, 21, 1, 39, 12, 0, 25, 18, 33, 9],
}


@pytest.mark.parametrize("ids", ORDERS.values(), ids=ORDERS.keys())
@pytest.mark.parametrize("page_bytes", [72, 8192])
@pytest.mark.parametrize("padding", [0, 64])
def test_saved_rows_are_the_pages_and_load_elsewhere(ids, page_bytes, padding) -> None:
    rng = np.random.default_rng(0)
    stride = page_bytes + padding
    cache = torch.from_numpy(rng.integers(0, 256, (NUM_BLOCKS, stride), dtype=np.uint8))
    before = cache.numpy().copy()
    pages = HostPages(cache[:, :page_bytes])
    gap = 128
    rows = ArenaRows(256, PAGES * page_bytes + gap, ROWS, PAGES, pitch=page_bytes)
    arena = np.zeros(256 + ROWS * rows.stride, dtype=np.uint8)

    pages.save(arena, rows, as_slice(np.array(ids)))

    for index, block in enumerate(ids):
        start = rows.offset + index // PAGES * rows.stride + index % PAGES * page_bytes
        assert (arena[start : start + page_bytes] == before[block, :page_bytes]).all()
        end_of_run = rows.offset + index // PAGES * rows.stride + PAGES * page_bytes
        assert not arena[end_of_run : end_of_run + gap].any()

    cache[:, :page_bytes] = 0
    pages.load(arena, rows, as_slice(np.array(ids)))

    assert (cache[ids].numpy() == before[ids]).all()
    others = [block for block in range(NUM_BLOCKS) if block not in ids]
    assert not cache[others, :page_bytes].any()
    assert (cache[:, page_bytes:].numpy() == before[:, page_bytes:]).all()
