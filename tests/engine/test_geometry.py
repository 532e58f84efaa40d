"""Every vLLM cache spec becomes a `LayerSpec`; unknown ones stop the engine at start."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kvi

from hetero_connector.engine.startup.geometry import model_spec
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.spec import LayerSpec, RestoreRule, StateType

HEADS: dict[str, Any] = {"num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}


def config(groups: list[kvi.KVCacheGroupSpec], alignment: int | None = None) -> kvi.KVCacheConfig:
    return kvi.KVCacheConfig(
        num_blocks=8,
        kv_cache_tensors=[],
        kv_cache_groups=groups,
        cache_hit_alignment_tokens=alignment,
    )


def only(name: str, spec: kvi.KVCacheSpec) -> LayerSpec:
    (layer,) = model_spec(config([kvi.KVCacheGroupSpec([name], spec)])).layers
    return layer


def mla(ratio: int, block: int, **more: Any) -> kvi.MLAAttentionSpec:
    return kvi.MLAAttentionSpec(
        block_size=block,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        tokens_per_state=ratio,
        alignment=576,
        **more,
    )


def test_full_attention() -> None:
    layer = only("a", kvi.FullAttentionSpec(block_size=16, **HEADS))
    assert layer.state_type is StateType.DENSE_KV
    assert layer.restore_rule is RestoreRule.EVERY_TOKEN
    assert layer.page_bytes == layer.page_stride_bytes == 16 * 2 * 128 * 2
    assert layer.dtype == "bfloat16"
    assert layer.bytes_per_token == 512


def test_full_attention_that_only_attends_to_a_window_still_keeps_every_token() -> None:
    spec = kvi.FullAttentionSpec(block_size=16, sliding_window=64, **HEADS)
    assert only("a", spec).restore_rule is RestoreRule.EVERY_TOKEN


def test_padding_is_not_stored() -> None:
    spec = kvi.FullAttentionSpec(block_size=16, page_size_padded=9000, **HEADS)
    layer = only("a", spec)
    assert (layer.page_bytes, layer.page_stride_bytes) == (8192, 9000)


@pytest.mark.parametrize(
    ("name", "ratio", "role", "expected"),
    [
        ("layers.1.attn", 1, kvi.SparseCacheRole.SPARSE, StateType.MLA_LATENT),
        ("layers.1.attn", 4, kvi.SparseCacheRole.SPARSE, StateType.COMPRESSED_CSA_MAIN),
        ("layers.1.attn", 4, kvi.SparseCacheRole.INDEXER, StateType.COMPRESSED_CSA_INDEX),
        (
            "layers.1.attn.indexer.k_cache",
            4,
            kvi.SparseCacheRole.SPARSE,
            StateType.COMPRESSED_CSA_INDEX,
        ),
        ("layers.1.attn", 128, kvi.SparseCacheRole.SPARSE, StateType.COMPRESSED_HCA),
    ],
)
def test_mla_by_ratio_and_role(
    name: str, ratio: int, role: kvi.SparseCacheRole, expected: StateType
) -> None:
    layer = only(name, mla(ratio, 256, cache_role=role))
    assert layer.state_type is expected
    assert layer.tokens_per_state == ratio
    assert layer.page_bytes == 256 // ratio * 512
    assert layer.page_bytes <= layer.page_stride_bytes
    assert layer.page_stride_bytes % 576 == 0


def test_sliding_window_needs_one_token_less_than_its_window() -> None:
    layer = only("a", kvi.SlidingWindowSpec(block_size=16, sliding_window=64, **HEADS))
    assert layer.state_type is StateType.WINDOW_SWA
    assert layer.tokens_needed(0, 256) == range(193, 256)
    assert layer.pages_needed(0, 256) == range(12, 16)
    assert layer.pages_needed(0, 32) == range(2)


def test_spec_decoding_s_extra_tokens_are_kept_too() -> None:
    spec = kvi.SlidingWindowSpec(block_size=16, sliding_window=64, extra_retained_tokens=3, **HEADS)
    assert only("a", spec).boundary_tokens == 66


@pytest.mark.parametrize(("ratio", "window", "needed"), [(4, 8, 4), (128, 128, 0)])
def test_compressor_state_keeps_the_overlap_only(ratio: int, window: int, needed: int) -> None:
    state = kvi.SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, head_size=1024, dtype=torch.float32, sliding_window=window
    )
    groups = [
        kvi.KVCacheGroupSpec(["layers.2.attn"], mla(ratio, 256)),
        kvi.KVCacheGroupSpec(["layers.2.attn.compressor.state_cache"], state),
    ]
    model = model_spec(config(groups, alignment=256))
    layer = model.layers[1]
    assert layer.state_type is StateType.TAIL_STATE
    assert layer.boundary_tokens == needed
    assert (layer in model.stored_layers) == (needed > 0)
    assert model.alignment == 256


def test_indexer_compressor_finds_the_indexer_s_ratio() -> None:
    state = kvi.SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, head_size=512, dtype=torch.float32, sliding_window=8
    )
    groups = [
        kvi.KVCacheGroupSpec(["l.2.attn.indexer.k_cache"], mla(4, 256)),
        kvi.KVCacheGroupSpec(["l.2.attn.indexer.compressor.state_cache"], state),
    ]
    assert model_spec(config(groups)).layers[1].boundary_tokens == 4


def test_compressor_of_an_unknown_layer_is_refused() -> None:
    state = kvi.SlidingWindowMLASpec(
        block_size=4, num_kv_heads=1, head_size=512, dtype=torch.float32, sliding_window=8
    )
    with pytest.raises(UnsupportedModelError, match=r"l\.2\.attn\.compressor"):
        only("l.2.attn.compressor.state_cache", state)


def test_chunked_local_state_begins_with_the_chunk() -> None:
    layer = only(
        "a", kvi.ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS)
    )
    assert layer.state_type is StateType.CHUNKED_LOCAL
    assert layer.tokens_needed(0, 96) == range(64, 96)
    assert layer.pages_needed(0, 128) == range(0)


def test_recurrent_state_is_one_page_at_the_boundary() -> None:
    spec = kvi.MambaSpec(
        block_size=640, shapes=((4, 8), (16,)), dtypes=(torch.float32, torch.bfloat16),
        page_size_padded=4096, mamba_cache_mode="align",
    )  # fmt: skip
    layer = only("a", spec)
    assert layer.state_type is StateType.RECURRENT
    assert (layer.page_bytes, layer.page_stride_bytes) == (4 * 8 * 4 + 16 * 2, 4096)
    assert layer.pages_needed(0, 1280) == range(1, 2)


@pytest.mark.parametrize(
    "spec",
    [
        kvi.CircularBufferSpec(block_size=16, **HEADS),
        kvi.SlidingWindowMLASpec(
            block_size=64, num_kv_heads=1, head_size=512, dtype=torch.uint8, sliding_window=128,
            bounded_replay=True,
        ),
        kvi.EncoderOnlyAttentionSpec(block_size=16, **HEADS),
    ],
    ids=lambda spec: type(spec).__name__,
)  # fmt: skip
def test_scratch_memory_is_not_stored(spec: kvi.KVCacheSpec) -> None:
    layer = only("a", spec)
    assert layer.restore_rule is RestoreRule.NOTHING
    assert model_spec(config([kvi.KVCacheGroupSpec(["a"], spec)])).stored_layers == ()


def test_groups_that_vllm_keeps_from_transfer_are_not_stored() -> None:
    group = kvi.KVCacheGroupSpec(
        ["a"], kvi.FullAttentionSpec(block_size=16, **HEADS), enable_kv_transfer=False
    )
    assert model_spec(config([group])).stored_layers == ()


def test_layers_of_a_uniform_group_keep_their_own_sizes() -> None:
    specs = {"l.1.attn": mla(128, 256), "l.2.attn": mla(4, 256)}
    uniform = kvi.UniformTypeKVCacheSpecs(block_size=256, kv_cache_specs=specs)
    layers = model_spec(config([kvi.KVCacheGroupSpec(list(specs), uniform)])).layers
    assert [x.page_bytes for x in layers] == [2 * 512, 64 * 512]
    assert [x.state_type for x in layers] == [
        StateType.COMPRESSED_HCA,
        StateType.COMPRESSED_CSA_MAIN,
    ]


@dataclass(frozen=True, kw_only=True)
class NovelSpec(kvi.AttentionSpec):
    """A spec class of a later vLLM."""


@pytest.mark.parametrize(
    "spec",
    [
        NovelSpec(block_size=16, **HEADS),
        kvi.SinkFullAttentionSpec(block_size=16, sink_len=4, **HEADS),
        kvi.CrossAttentionSpec(block_size=16, **HEADS),
    ],
    ids=lambda spec: type(spec).__name__,
)
def test_what_cannot_be_restored_exactly_stops_the_engine_with_the_layer_s_name(
    spec: kvi.KVCacheSpec,
) -> None:
    with pytest.raises(UnsupportedModelError, match=r"layers\.7\.attn.*without the connector"):
        only("layers.7.attn", spec)


def test_attention_to_later_tokens_stops_the_engine_with_the_layer_s_name() -> None:
    """A prefix language model: vLLM turns its own prefix cache off, but asks a connector."""
    spec = kvi.FullAttentionSpec(block_size=16, non_causal=True, **HEADS)
    with pytest.raises(UnsupportedModelError, match=r"'layers\.7\.attn' attends to later tokens"):
        only("layers.7.attn", spec)


def test_reference_sliding_window_stores_prompt_tokens_only() -> None:
    spec = kvi.RSWASpec(block_size=16, rswa_window=64, **HEADS)
    layer = only("a", spec)
    assert (layer.state_type, layer.prompt_only) == (StateType.DENSE_KV, True)
    assert model_spec(config([kvi.KVCacheGroupSpec(["a"], spec)])).prompt_only


def test_alignment_is_the_common_grid_of_all_blocks() -> None:
    groups = [
        kvi.KVCacheGroupSpec(["a"], kvi.FullAttentionSpec(block_size=48, **HEADS)),
        kvi.KVCacheGroupSpec(
            ["b"], kvi.SlidingWindowSpec(block_size=32, sliding_window=64, **HEADS)
        ),
    ]
    assert model_spec(config(groups)).alignment == 96


@pytest.mark.parametrize("kind", ["INT8", "FP8", "INT4"])
@pytest.mark.parametrize("spec_class", [kvi.FullAttentionSpec, kvi.SlidingWindowSpec])
def test_scales_of_each_token_and_head_are_refused(
    kind: str, spec_class: type[kvi.AttentionSpec]
) -> None:
    """vLLM sets the scales to 1.0 when a layer first runs, also restored ones."""
    window = {"sliding_window": 64} if spec_class is kvi.SlidingWindowSpec else {}
    per_tensor = spec_class(
        block_size=16, kv_quant_mode=kvi.KVQuantMode.FP8_PER_TENSOR, **HEADS, **window
    )
    assert only("a", per_tensor).page_bytes
    per_token = spec_class(
        block_size=16, kv_quant_mode=kvi.KVQuantMode[f"{kind}_PER_TOKEN_HEAD"], **HEADS, **window
    )
    with pytest.raises(UnsupportedModelError, match="layer 'a' keeps a scale for each token"):
        only("a", per_token)
