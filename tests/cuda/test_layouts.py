"""Every page that vLLM can allocate is described and moved as its logical bytes.

vLLM allocates on the CPU. Triton interprets the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from heterocache_cuda import kernels, reference
from heterocache_cuda.layout import PageLayout
from heterocache_cuda.mover import (
    Job,
    LaunchSizes,
    Mode,
    PageMover,
    Part,
    alignment_of,
    plan_moves,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpretedFunction
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from hetero_connector.engine.worker.pages import page_view
from hetero_connector.spec import LayerSpec, RestoreRule, StateType
from tests.cuda.memory import memory_of

NUM_BLOCKS = 6
MOVER = PageMover(
    torch.device("cpu"),
    InterpretedFunction(kernels.move_pages.fn),
    LaunchSizes(programs=2, most_programs_per_job=2),
)
LAYOUTS = list(KVCacheLayout)
DENSE = {"block_size": 8, "num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16}
LATENT = {"block_size": 4, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
PACKED = LATENT | {"dtype": torch.uint8, "cache_dtype_str": "fp8_ds_mla"}
V4 = PACKED | {"state_content_bytes": 584, "alignment": 576, "model_version": "deepseek_v4"}

SPECS: dict[str, kvi.KVCacheSpec] = {
    "full": kvi.FullAttentionSpec(**DENSE),
    "other value size": kvi.FullAttentionSpec(**DENSE, head_size_v=6),
    "fp8": kvi.FullAttentionSpec(**DENSE | {"dtype": torch.uint8, "head_size": 3}),
    "scales by token and head": kvi.FullAttentionSpec(
        **DENSE | {"dtype": torch.uint8}, state_content_bytes=12
    ),
    "other head slots": kvi.FullAttentionSpec(**DENSE, num_head_slots=3, state_content_bytes=32),
    "latents": kvi.MLAAttentionSpec(**LATENT),
    "fp8_ds_mla": kvi.MLAAttentionSpec(**PACKED, state_content_bytes=656),
    "V4 compressed": kvi.MLAAttentionSpec(**V4 | {"block_size": 16}, tokens_per_state=4),
    "V4 window": kvi.SlidingWindowMLASpec(**V4, sliding_window=4),
    "V4 compressor": kvi.SlidingWindowMLASpec(**LATENT, sliding_window=4),
    "window": kvi.SlidingWindowSpec(**DENSE, sliding_window=8),
    "chunked local": kvi.ChunkedLocalAttentionSpec(**DENSE, attention_chunk_size=8),
    "reference window": kvi.RSWASpec(**DENSE, rswa_window=8),
    "ring": kvi.CircularBufferSpec(**DENSE),
    "hidden states": kvi.HiddenStateCacheSpec(**LATENT),
    "sink": kvi.SinkFullAttentionSpec(**DENSE, sink_len=2),
    "encoder": kvi.EncoderOnlyAttentionSpec(**DENSE),
    "cross": kvi.CrossAttentionSpec(**DENSE, tokens_per_state=Fraction(1, 2)),
    "recurrent": kvi.MambaSpec(
        block_size=8, shapes=((3, 5), (2, 4, 4)), dtypes=(torch.bfloat16, torch.float32)
    ),
}
NOT_ALLOCATED = {
    kvi.AttentionSpec: "a base class",
    kvi.UniformTypeKVCacheSpecs: "a group of layers, each with a spec",
    kvi.HiSparseHotSpec: "it has no view of a layer",
    kvi.HiSparseResidentSpec: "it has no view of a layer",
}


def all_spec_classes(of: type = kvi.KVCacheSpec) -> Iterator[type]:
    for child in of.__subclasses__():
        if child.__module__ == kvi.__name__:
            yield child
            yield from all_spec_classes(child)


def test_every_class_of_spec_is_tested() -> None:
    assert {type(spec) for spec in SPECS.values()} | set(NOT_ALLOCATED) == set(all_spec_classes())


def padded(spec: Any, padding: int) -> Any:
    return kvi.replace(spec, page_size_padded=spec.unpadded_page_size_bytes + padding)


def allocate(
    groups: Sequence[Sequence[kvi.KVCacheSpec]],
    layout: KVCacheLayout,
    kernel_block: int | None = None,
) -> list[list[torch.Tensor]]:
    """Return the pages of each layer, by group, as vLLM allocates them: layers by their specs."""
    made = []
    for number, specs in enumerate(groups):
        names = [f"{number}.{i}" for i in range(len(specs))]
        spec = specs[0]
        if any(x != spec for x in specs):
            by_name = dict(zip(names, specs, strict=True))
            spec = kvi.UniformTypeKVCacheSpecs(block_size=spec.block_size, kv_cache_specs=by_name)
        made.append(kvi.KVCacheGroupSpec(names, spec))
    cache_config = SimpleNamespace(
        get_resolved_kv_cache_layout=lambda: layout,
        num_gpu_blocks_override=NUM_BLOCKS,
        prefix_cache_retention_interval=None,
    )
    config: Any = SimpleNamespace(
        cache_config=cache_config, attention_config=SimpleNamespace(hisparse_config=None)
    )
    kv_cache = get_kv_cache_config_from_groups(config, made, 1 << 24)
    kernel_blocks = [kernel_block] * len(made) if kernel_block else None
    caches = allocate_kv_cache(kv_cache, torch.device("cpu"), layout, kernel_blocks)
    return [
        [
            page_view(layer_spec(name, spec), caches[name], NUM_BLOCKS)
            for name, spec in zip(group.layer_names, specs, strict=True)
        ]
        for group, specs in zip(made, groups, strict=True)
    ]


def layer_spec(name: str, spec: Any) -> LayerSpec:
    return LayerSpec(
        layer=name,
        group=0,
        state_type=StateType.DENSE_KV,
        tokens_per_state=1,
        block_tokens=spec.block_size,
        page_bytes=spec.real_page_size_bytes,
        page_stride_bytes=spec.page_size_bytes,
        dtype="uint8",
        restore_rule=RestoreRule.EVERY_TOKEN,
    )


def assert_described(view: torch.Tensor) -> None:
    """The rows of the description are the page's logical bytes."""
    pages = PageLayout.of(view)
    assert pages.page_bytes == view[0].numel()
    for block in range(NUM_BLOCKS):
        rows = [reference.memory(x, pages.row_bytes) for x in reference.row_addresses(pages, block)]
        assert np.array_equal(np.concatenate(rows), view[block].reshape(-1).numpy())


def assert_moved(groups: Sequence[Sequence[torch.Tensor]]) -> None:
    """Blocks of each group are saved, cleared and loaded. No other byte changes.

    The groups have different blocks, as groups that share memory do.
    """
    raw = memory_of(groups[0][0])
    raw.copy_(torch.randint(1, 256, raw.shape, dtype=torch.uint8))
    before, cleared = raw.clone(), raw.clone()
    arena = np.zeros(1 << 16, np.uint8)
    first, parts, expected = 16, [], []
    for number, views in enumerate(groups):
        own = np.arange(1, NUM_BLOCKS)[number :: len(groups)]
        ids = np.array([[own[-1]], [own[0]]], np.int64)
        jobs, offset = [], 0
        for view in views:
            assert_described(view)
            layout = PageLayout.of(view)
            jobs.append(Job(layout, offset, layout.page_bytes, 1))
            offset += -(-layout.page_bytes // 16) * 16
        addresses = arena.ctypes.data + np.array([first, first + offset], np.int64)
        for job, view in zip(jobs, views, strict=True):
            like = cleared.as_strided(view.shape, view.stride(), view.storage_offset())
            for artifact, block in enumerate(ids[:, 0].tolist()):
                start = first + artifact * offset + job.offset
                expected.append((start, view[block].reshape(-1).clone().numpy()))
                like[block] = 0
        first += 2 * offset
        none = np.zeros(len(jobs), np.int64)
        rows = np.array([job.row() for job in jobs], np.int64)
        tiles = [job.tile(alignment_of(addresses)) for job in jobs]
        parts.append(Part(rows, tiles, none, [ids], addresses, none))
    moves = plan_moves(parts)
    data = MOVER.upload(moves)
    MOVER.launch(Mode.SAVE, moves, data)
    for start, page in expected:
        assert np.array_equal(arena[start : start + len(page)], page)
    MOVER.launch(Mode.CLEAR, moves, data)
    assert torch.equal(raw, cleared)
    MOVER.launch(Mode.LOAD, moves, data)
    assert torch.equal(raw, before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_pages_of_every_spec_in_every_layout(spec: Any, layout: KVCacheLayout) -> None:
    if spec.page_size_bytes != spec.real_page_size_bytes and not layout.is_block_compact:
        spec = kvi.replace(spec, alignment=None, page_size_padded=None)
    assert_moved(allocate([[spec] * 2], layout))


@settings(max_examples=25)
@given(
    layout=st.sampled_from(LAYOUTS),
    heads=st.integers(1, 4),
    block=st.sampled_from([1, 2, 16]),
    head_bytes=st.sampled_from([1, 2, 8, 12, 16, 40]),
    layers=st.integers(1, 3),
    padding=st.sampled_from([0, 0, 4, 16, 64]),
)
def test_pages_of_any_size(
    layout: KVCacheLayout, heads: int, block: int, head_bytes: int, layers: int, padding: int
) -> None:
    spec = kvi.FullAttentionSpec(
        block_size=block, num_kv_heads=heads, head_size=head_bytes, dtype=torch.uint8
    )
    if layout.is_block_compact:
        spec = padded(spec, padding)
    assert_moved(allocate([[spec] * layers], layout))


@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.LBNHC])
@pytest.mark.parametrize("kernel_block", [1, 2, 4])
def test_kernel_blocks_that_divide_a_block(kernel_block: int, layout: KVCacheLayout) -> None:
    spec = kvi.FullAttentionSpec(**DENSE)
    views = allocate([[spec] * 2], layout, kernel_block)
    assert views[0][0].shape == (NUM_BLOCKS, 8 // kernel_block, 2, kernel_block, 16)
    assert_moved(views)


PACKINGS = {
    "DeepSeek-V4": [
        [SPECS["V4 compressed"], kvi.MLAAttentionSpec(**V4 | {"state_content_bytes": 132})],
        [SPECS["V4 window"]] * 3,
        [SPECS["V4 compressor"]],
    ],
    "attention and recurrent state": [
        [SPECS["full"]] * 2,
        [kvi.replace(SPECS["recurrent"], page_size_padded=SPECS["full"].page_size_bytes)] * 2,
    ],
}


@pytest.mark.parametrize("layout", [KVCacheLayout.BLHNC, KVCacheLayout.BLNHC])
@pytest.mark.parametrize("groups", PACKINGS.values(), ids=PACKINGS)
def test_groups_that_share_memory(groups: Any, layout: KVCacheLayout) -> None:
    assert_moved(allocate(groups, layout))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: x.name)
def test_slices_of_heads(layout: KVCacheLayout) -> None:
    spec = kvi.FullAttentionSpec(**DENSE | {"num_kv_heads": 4})
    (layers,) = allocate([[spec] * 2], layout)
    assert_moved([[view[:, start:stop] for view in layers for start, stop in ((0, 1), (1, 4))]])


ALIGNMENTS = {
    **{"full": 16, "latents": 16, "fp8_ds_mla": 16, "fp8": 2},
    "V4 compressed": 16,  # four rows of 584 bytes are one piece
    "one V4 row": 8,
}


@pytest.mark.parametrize(("name", "alignment"), ALIGNMENTS.items())
def test_accesses_are_as_wide_as_pieces_allow(name: str, alignment: int) -> None:
    one_row = kvi.MLAAttentionSpec(**V4, tokens_per_state=4)
    spec = one_row if name == "one V4 row" else SPECS[name]
    (layers,) = allocate([[spec] * 2], KVCacheLayout.BLNHC)
    assert {PageLayout.of(view).alignment for view in layers} == {alignment}
