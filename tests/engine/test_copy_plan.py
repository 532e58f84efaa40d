"""Copies from pages to the arena and back have every useful byte, and no padding or other page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.engine.messages import (
    ArtifactCopy,
    ArtifactSpan,
    Blocks,
    Load,
    PageCopy,
)
from hetero_connector.engine.worker.copy_plan import CopyPlanner
from hetero_connector.engine.worker.host_device import _evenly_spaced
from hetero_connector.engine.worker.pages import page_view
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from tests.engine.ranks import DEVICES, copy_pages

CHUNK, NUM_BLOCKS = 64, 96
KV, SWA = StateType.DENSE_KV, StateType.WINDOW_SWA


def spec(
    name: str, group: int, block: int, page: int, stride: int, window: int | None
) -> LayerSpec:
    return LayerSpec(
        layer=name,
        group=group,
        state_type=SWA if window else KV,
        tokens_per_state=1,
        block_tokens=block,
        page_bytes=page,
        page_stride_bytes=stride,
        dtype="uint8",
        restore_rule=RestoreRule.WINDOW if window else RestoreRule.EVERY_TOKEN,
        window=window,
        boundary_tokens=window - 1 if window else 0,
        parts=2,
    )


MODEL = ModelSpec(
    (
        spec("full.a", 0, 16, 96, 128, None),
        spec("full.b", 0, 16, 40, 128, None),
        spec("swa", 1, 32, 56, 64, 48),
    ),
    alignment=32,
    tp_size=2,
)
LAYOUT = ArtifactLayout(MODEL, CHUNK)
NAMES = {x.layer for x in MODEL.layers}


def strided_cache(layer: LayerSpec, fill: int) -> torch.Tensor:
    """`[NUM_BLOCKS, 2, n] uint8` over a padded buffer, as the engine lays pages out."""
    raw = torch.full((NUM_BLOCKS, layer.page_stride_bytes), fill, dtype=torch.uint8)
    half = layer.page_bytes // 2
    return raw.as_strided((NUM_BLOCKS, 2, half), (layer.page_stride_bytes, half, 1))


def chunk_copies(num_chunks: int, offsets: list[int]) -> list[ArtifactCopy]:
    return [ArtifactCopy(KV, i * CHUNK, (i + 1) * CHUNK, offsets[i]) for i in range(num_chunks)]


def run(
    kind: str,
    rank: int,
    copy: PageCopy,
    caches: dict[str, torch.Tensor],
    arena: np.ndarray,
    *,
    save: bool,
    layout: ArtifactLayout = LAYOUT,
) -> None:
    with DEVICES[kind]() as device:
        for layer in layout.model.layers:
            view = page_view(layer, caches[layer.layer], NUM_BLOCKS)
            device.add_layer(layer, view, layout.page_runs(layer, rank))
        device.attach(arena, 0)
        copy_pages(device, layout, rank, copy, save=save)


def random_caches(rng: np.random.Generator) -> dict[str, torch.Tensor]:
    caches = {x.layer: strided_cache(x, 0) for x in MODEL.layers}
    for cache in caches.values():
        cache.copy_(torch.from_numpy(rng.integers(0, 256, tuple(cache.shape), dtype=np.uint8)))
    return caches


@pytest.mark.parametrize("kind", DEVICES)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_saved_and_loaded_pages_are_equal_for_both_ranks(kind: str, data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    chunks = data.draw(st.integers(1, 4))
    slot = LAYOUT.max_bytes[KV] + data.draw(st.sampled_from([0, 64]))
    slots = data.draw(st.permutations(range(6)))[:chunks]
    offsets = [s * slot for s in slots]
    swa_offset = 6 * slot
    contiguous = data.draw(st.booleans())
    full_ids = (
        list(range(5, 5 + 4 * chunks))
        if contiguous
        else rng.permutation(np.arange(1, NUM_BLOCKS))[: 4 * chunks].tolist()
    )
    swa_ids = rng.permutation(np.arange(1, NUM_BLOCKS))[:2].tolist()
    end = chunks * CHUNK
    copy = PageCopy(
        [*chunk_copies(chunks, offsets), ArtifactCopy(SWA, end - CHUNK, end, swa_offset)],
        {(KV, 0): Blocks(0, full_ids), (SWA, 1): Blocks(end // 32 - 2, swa_ids)},
    )
    arena = np.zeros(7 * slot + 4096, np.uint8)
    sources = [random_caches(rng) for _ in range(2)]
    targets = [{x.layer: strided_cache(x, 7) for x in MODEL.layers} for _ in range(2)]
    for rank in range(2):
        run(kind, rank, copy, sources[rank], arena, save=True)
    for rank in range(2):
        run(kind, rank, copy, targets[rank], arena, save=False)
        for layer in MODEL.layers:
            ids = full_ids if layer.group == 0 else swa_ids
            others = sorted(set(range(NUM_BLOCKS)) - set(ids))
            source, target = sources[rank][layer.layer], targets[rank][layer.layer]
            assert torch.equal(source[ids], target[ids])
            assert bool((target[others] == 7).all()), "a page that was not asked for was written"


@pytest.mark.parametrize("kind", DEVICES)
def test_saving_writes_exactly_the_artifact_s_bytes(kind: str) -> None:
    arena = np.full(1 << 16, 0xEE, np.uint8)
    caches = {x.layer: strided_cache(x, 1) for x in MODEL.layers}
    copy = PageCopy(chunk_copies(1, [4096]), {(KV, 0): Blocks(0, [1, 2, 3, 4])})
    for rank in range(2):
        run(kind, rank, copy, caches, arena, save=True)
    size = LAYOUT.artifact_bytes(KV, 0, CHUNK)
    assert size == 2 * 4 * (96 + 40)
    assert bool((arena[4096 : 4096 + size] == 1).all())
    assert bool((arena[:4096] == 0xEE).all())
    assert bool((arena[4096 + size :] == 0xEE).all())


@pytest.mark.parametrize("kind", DEVICES)
def test_state_that_all_ranks_share_is_saved_by_turns_and_read_by_all(kind: str) -> None:
    model = replace(MODEL, layers=tuple(replace(x, parts=1) for x in MODEL.layers))
    layout = ArtifactLayout(model, CHUNK)
    size = layout.artifact_bytes(KV, 0, CHUNK)
    assert size == 4 * (96 + 40)
    copy = PageCopy(chunk_copies(2, [0, 4096]), {(KV, 0): Blocks(0, list(range(1, 9)))})
    arena = np.zeros(1 << 16, np.uint8)
    source = [{x.layer: strided_cache(x, 5 + rank) for x in MODEL.layers} for rank in range(2)]
    target = [{x.layer: strided_cache(x, 0) for x in MODEL.layers} for rank in range(2)]
    for rank in (0, 1):
        run(kind, rank, copy, source[rank], arena, save=True, layout=layout)
    assert bool((arena[:size] == 5).all()), "rank 1 wrote what is rank 0's to write"
    assert bool((arena[4096 : 4096 + size] == 6).all()), "the second chunk is rank 1's to write"
    for rank in (0, 1):
        run(kind, rank, copy, target[rank], arena, save=False, layout=layout)
        assert bool((target[rank]["full.b"][1:5] == 5).all())
        assert bool((target[rank]["full.b"][5:9] == 6).all())


@pytest.mark.parametrize("kind", DEVICES)
def test_null_pages_and_pages_outside_the_table_are_left_alone(kind: str) -> None:
    arena = np.full(1 << 16, 9, np.uint8)
    caches = {x.layer: strided_cache(x, 7) for x in MODEL.layers}
    # Pages 0 and 1 belong to the local hit (outside), page 3 is null.
    copy = PageCopy(chunk_copies(2, [0, 8192]), {(KV, 0): Blocks(2, [11, 0, 13, 14, 15, 16])})
    run(kind, 0, copy, caches, arena, save=False)
    written = {b for b in range(NUM_BLOCKS) if bool((caches["full.a"][b] == 9).all())}
    assert written == {11, 13, 14, 15, 16}


def test_all_whole_chunks_of_a_prompt_are_one_plan() -> None:
    slot = LAYOUT.max_bytes[KV]
    span = ArtifactSpan(KV, 0, 3 * CHUNK, CHUNK, [0, slot, 2 * slot])
    load = Load("a", [span], {(KV, 0): Blocks(0, list(range(1, 13)))}, False, span.end)
    (plan,) = CopyPlanner(LAYOUT, 0, NAMES).plan_loads([load])
    assert [x.layer.layer for x in plan.segments] == ["full.a", "full.b"]
    assert plan.offsets.tolist() == [0, slot, 2 * slot]
    (ids,) = plan.block_ids
    assert ids.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]


def test_loads_of_one_shape_are_one_plan() -> None:
    def load(name: str, offset: int, blocks: list[int]) -> Load:
        span = ArtifactSpan(KV, 0, CHUNK, CHUNK, [offset])
        return Load(name, [span], {(KV, 0): Blocks(0, blocks)}, False, span.end)

    (plan,) = CopyPlanner(LAYOUT, 0, NAMES).plan_loads(
        [load("a", 4096, [1, 2, 3, 4]), load("b", 0, [8, 7, 6, 5])]
    )
    assert plan.offsets.tolist() == [4096, 0]
    assert plan.block_ids[0].tolist() == [[1, 2, 3, 4], [8, 7, 6, 5]]


def test_neighbouring_slots_are_copied_at_a_time() -> None:
    offsets = np.array([0, 96, 192, 500, 400, 300, 400, 500])
    assert list(_evenly_spaced(offsets)) == [(0, 3, 96), (3, 4, 0), (4, 5, 0), (5, 8, 100)]


def test_a_page_of_another_size_than_the_spec_says_is_refused() -> None:
    layer = MODEL.layers[0]
    with pytest.raises(UnsupportedModelError, match=r"full\.a"):
        page_view(layer, torch.zeros(NUM_BLOCKS, 2, 40, dtype=torch.uint8), NUM_BLOCKS)


def test_kernel_blocks_are_grouped_into_the_manager_s_pages() -> None:
    layer = MODEL.layers[0]
    cache = torch.arange(NUM_BLOCKS * 96, dtype=torch.int64).to(torch.uint8).view(-1, 1, 48)
    view = page_view(layer, cache, NUM_BLOCKS)
    assert view.shape[0] == NUM_BLOCKS
    assert torch.equal(view[3].flatten(), cache[6:8].flatten())
