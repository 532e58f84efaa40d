"""The kernel moves exactly the bytes that plain indexing on the host moves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from heterocache_cuda import reference
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import Job, Mode, Moves, Part, alignment_of, plan_moves

from benchmarks.gpu_check.setting import Result, Setting, random_bytes, verdict
from benchmarks.measure import table

ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
"""vLLM's six orders of layer, block, head, token and content, the outermost first."""
CONTENTS = {"bf16, 128 wide": 512, "fp8_ds_mla": 656, "DeepSeek-V4": 584, "odd": 6, "bytes": 3}
"""Bytes of the content of one token of one head."""


@dataclass(frozen=True)
class Cache:
    """The memory of some layers, and a view of each as `[blocks, heads, tokens, content]`."""

    raw: torch.Tensor
    layers: list[torch.Tensor]

    @classmethod
    def of(cls, raw: torch.Tensor, order: tuple[int, ...], shape: tuple[int, ...]) -> Cache:
        """View memory in an order of the five dimensions of `shape`."""
        strides, stride = [0] * len(shape), 1
        for dim in reversed(order):
            strides[dim], stride = stride, stride * shape[dim]
        return cls(raw, list(raw[:stride].as_strided(shape, strides)))


def moves_of(
    layers: list[torch.Tensor], ids: np.ndarray, addresses: np.ndarray
) -> tuple[Moves, list[Job]]:
    """Plan to move the pages of all layers: each artifact has those of a layer together."""
    jobs, offset = [], 0
    for layer in layers:
        pages = PageLayout.of(layer)
        jobs.append(Job(pages, offset, pages.page_bytes, ids.shape[1]))
        offset += pages.page_bytes * ids.shape[1]
    none = np.zeros(len(jobs), np.int64)
    tiles = [job.tile(alignment_of(addresses)) for job in jobs]
    rows = np.array([job.row() for job in jobs], np.int64)
    return plan_moves([Part(rows, tiles, none, [ids], addresses, none)]), jobs


def check_layouts(setting: Setting) -> Result:
    """Compare saves, clears and loads with the reference: six layouts, five contents."""
    rows, wrong = [], 0
    for name, order in ORDERS.items():
        results = [_is_exact(setting, order, content) for content in CONTENTS.values()]
        wrong += results.count(False)
        rows.append([name, *("exact" if x else "WRONG" for x in results)])
    return Result(
        verdict(not wrong),
        f"{len(ORDERS)} layouts, {len(CONTENTS)} contents: {wrong or 'none'} wrong",
        [table(["layout", *CONTENTS], rows)],
        {"layouts_wrong": wrong},
    )


def _is_exact(setting: Setting, order: tuple[int, ...], content: int) -> bool:
    num_layers, num_blocks, heads, tokens = setting.sizes.page
    shape = (num_layers, num_blocks, heads, tokens, content)
    size = int(np.prod(shape)) + 64
    on_device = Cache.of(setting.random_bytes(size, content), order, shape)
    on_host = Cache.of(on_device.raw.to("cpu", copy=True), order, shape)
    artifact = num_layers * 2 * heads * tokens * content
    count = (num_blocks - 1) // 2
    rng = np.random.default_rng(content)
    ids = rng.permutation(np.arange(1, 2 * count + 1)).reshape(count, 2)
    ids[0, 0] = 0  # a page that is left alone
    stride = -(-artifact // 16) * 16
    slots = rng.permutation(count).astype(np.int64) * stride
    size_bytes = count * stride
    arena = setting.arena.view[:size_bytes]
    arena[:] = random_bytes(size_bytes, content + 1)
    expected = arena.copy()
    moves, _ = moves_of(on_device.layers, ids, slots + setting.arena.address)
    addresses = slots + expected.ctypes.data
    _, jobs = moves_of(on_host.layers, ids, addresses)
    mover = setting.mover()
    for mode in (Mode.SAVE, Mode.CLEAR, Mode.LOAD):
        if mode is Mode.LOAD:  # other bytes than were saved
            arena[:] = expected[:] = random_bytes(size_bytes, content + 2)
        mover.launch(mode, moves, mover.upload(moves))
        torch.cuda.synchronize()
        for job in jobs:
            reference.move(mode, job, ids, addresses.tolist())
        if not np.array_equal(arena, expected):
            return False
        if not torch.equal(on_device.raw.cpu(), on_host.raw):
            return False
    return True
