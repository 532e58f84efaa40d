from typing import Any

import pytest

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from hetero_connector.spec.from_config import model_spec_from_config

# The small DeepSeek-V4 of examples/checkpoints, by the fields that shape its cache.
TINY_V4 = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "compress_ratios": [0, 128, 4, 128, 4],
    "sliding_window": 128,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}
GEMMA = LLAMA | {
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "head_dim": 16,
    "sliding_window": 40,
}
QWEN3_NEXT = {
    "model_type": "qwen3_next",
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "torch_dtype": "bfloat16",
}
GRANITE = {
    "model_type": "granitemoehybrid",
    "num_hidden_layers": 3,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_n_groups": 1,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "torch_dtype": "bfloat16",
}


def geometry(layer: LayerSpec) -> tuple[Any, ...]:
    return (
        *(layer.state_type, layer.block_tokens, layer.tokens_per_state, layer.page_bytes),
        *(layer.page_stride_bytes, layer.dtype, layer.window, layer.boundary_tokens),
    )


def by_name(model: ModelSpec) -> dict[str, LayerSpec]:
    return {layer.layer: layer for layer in model.layers}


def test_tiny_deepseek_v4_has_the_geometry_the_engine_reported() -> None:
    """Blocks, padded pages, types and windows as vLLM 0.32's KVCacheConfig gave them."""
    model = model_spec_from_config(TINY_V4)
    layers = by_name(model)
    attn = "model.layers.{}.attn".format
    swa = (StateType.WINDOW_SWA, 64, 1, 64 * 584, 37440, "uint8", 128, 127)
    hca = (StateType.COMPRESSED_HCA, 256, 128, 2 * 584, 1728, "uint8", None, 0)
    csa = (StateType.COMPRESSED_CSA_MAIN, 256, 4, 64 * 584, 37440, "uint8", None, 0)
    index = (StateType.COMPRESSED_CSA_INDEX, 256, 4, 64 * 132, 8640, "uint8", None, 0)
    c128 = (StateType.TAIL_STATE, 8, 1, 32768, 32832, "float32", 128, 0)
    c4 = (StateType.TAIL_STATE, 4, 1, 32768, 32832, "float32", 8, 4)
    c4_index = (StateType.TAIL_STATE, 4, 1, 8192, 8640, "float32", 8, 4)
    expected = {f"{attn(i)}.swa_cache": swa for i in range(5)}
    for i in (1, 3):
        expected |= {attn(i): hca, f"{attn(i)}.compressor.state_cache": c128}
    for i in (2, 4):
        expected |= {attn(i): csa, f"{attn(i)}.compressor.state_cache": c4}
        expected[f"{attn(i)}.indexer.k_cache"] = index
        expected[f"{attn(i)}.indexer.compressor.state_cache"] = c4_index
    assert {name: geometry(layer) for name, layer in layers.items()} == expected
    assert model.alignment == 256
    assert all(layer.parts == 1 for layer in model.layers)
    rules = {layer.restore_rule for layer in model.layers if layer.window}
    assert rules == {RestoreRule.WINDOW}


def test_deepseek_v4_layer_types_stand_in_for_ratios() -> None:
    kinds = ["sliding", "heavily_compressed", "compressed_sparse"]
    config = {k: v for k, v in TINY_V4.items() if k != "compress_ratios"}
    config |= {"num_hidden_layers": 3, "layer_types": [f"{kind}_attention" for kind in kinds]}
    ratios = TINY_V4 | {"num_hidden_layers": 3, "compress_ratios": [0, 128, 4]}
    assert model_spec_from_config(config) == model_spec_from_config(ratios)


def test_deepseek_v4_in_bfloat16_has_plain_rows() -> None:
    layers = by_name(model_spec_from_config(TINY_V4, kv_dtype="bfloat16"))
    assert geometry(layers["model.layers.2.attn"])[3:6] == (64 * 1024, 64 * 1024, "bfloat16")
    assert geometry(layers["model.layers.2.attn.indexer.k_cache"])[3:6] == (8448, 8704, "uint8")


def test_dense_attention() -> None:
    model = model_spec_from_config(LLAMA)
    assert [layer.layer for layer in model.layers] == [
        f"model.layers.{i}.self_attn.attn" for i in range(2)
    ]
    assert geometry(model.layers[0]) == (
        *(StateType.DENSE_KV, 16, 1, 2 * 2 * 16 * 2 * 16, 2048, "bfloat16", None, 0),
    )
    assert model.bytes_per_token == 2 * 2 * 2 * 16 * 2
    assert (model.alignment, model.tp_size) == (16, 1)


@pytest.mark.parametrize(
    ("kv_dtype", "item_bytes", "dtype"),
    [
        ("auto", 2, "bfloat16"),
        ("float32", 4, "float32"),
        ("fp8", 1, "uint8"),
        ("half", 2, "float16"),
    ],
)
def test_kv_dtype_sets_the_element(kv_dtype: str, item_bytes: int, dtype: str) -> None:
    model = model_spec_from_config(LLAMA, kv_dtype=kv_dtype)
    assert model.layers[0].dtype == dtype
    assert model.bytes_per_token == 2 * 2 * 2 * 16 * item_bytes


def test_the_models_own_type_is_the_default() -> None:
    assert model_spec_from_config(LLAMA | {"torch_dtype": "float32"}).layers[0].dtype == "float32"
    assert model_spec_from_config(LLAMA | {"dtype": "float16"}).layers[0].dtype == "float16"


@pytest.mark.parametrize(("tp_size", "heads"), [(1, 2), (2, 1), (4, 1)])
def test_tensor_parallel_divides_kv_heads_and_never_below_one(tp_size: int, heads: int) -> None:
    model = model_spec_from_config(LLAMA, tp_size=tp_size)
    assert model.tp_size == tp_size
    assert model.layers[0].page_bytes == 2 * heads * 16 * 2 * 16


def test_sliding_window_pattern_and_rule() -> None:
    model = model_spec_from_config(GEMMA, block_tokens=8)
    kinds = [layer.state_type for layer in model.layers]
    assert [i for i, kind in enumerate(kinds) if kind is StateType.DENSE_KV] == [5]
    window = model.layers[0]
    assert (window.window, window.boundary_tokens) == (40, 39)
    assert window.pages_needed(0, 80) == range(5, 10)
    assert model.bytes_per_token == model.layers[5].page_bytes / 8
    assert [layer.group for layer in model.layers] == [0, 0, 0, 0, 0, 1, 0]


def test_layer_types_win_over_the_pattern_and_text_config_over_the_top() -> None:
    kinds = ["full_attention", *["sliding_attention"] * 6]
    text = GEMMA | {"layer_types": kinds}
    model = model_spec_from_config({"model_type": "gemma3", "text_config": text})
    assert model.layers[0].state_type is StateType.DENSE_KV
    assert model.layers[1].layer == "language_model.model.layers.1.self_attn.attn"


def test_gpt_oss_alternates_from_a_window() -> None:
    config = LLAMA | {"model_type": "gpt_oss", "head_dim": 64}
    window, full = model_spec_from_config(config).layers
    assert window.layer == "model.layers.0.attn.attn"
    assert (window.state_type, window.window) == (StateType.WINDOW_SWA, 128)
    assert full.state_type is StateType.DENSE_KV


def test_latent_attention_is_one_vector_on_every_rank() -> None:
    config = {"model_type": "deepseek_v2", "num_hidden_layers": 3, "kv_lora_rank": 512}
    one, four = (
        model_spec_from_config(config | {"qk_rope_head_dim": 64}, tp_size=tp) for tp in (1, 4)
    )
    assert one.bytes_per_token == four.bytes_per_token == 3 * 576 * 2
    assert all(layer.parts == 1 for layer in four.layers)
    assert one.layers[0].state_type is StateType.MLA_LATENT
    assert one.alignment == 64


def test_delta_net_states_and_the_attention_page_that_covers_them() -> None:
    model = model_spec_from_config(QWEN3_NEXT)
    conv = (2 * 128 * 2 + 128 * 4) * 3
    state_bytes = (conv + 4 * 128 * 128) * 2
    recurrent, full = model.layers[0], model.layers[3]
    assert recurrent.layer == "model.layers.0.linear_attn"
    assert full.layer == "model.layers.3.self_attn.attn"
    assert recurrent.page_bytes == state_bytes == 137216
    assert full.page_bytes == recurrent.page_stride_bytes == 256 * model.alignment
    assert model.alignment == 544
    assert recurrent.block_tokens == full.block_tokens == 544
    assert recurrent.restore_rule is RestoreRule.AT_BOUNDARY
    layout = ArtifactLayout(model, 1088)
    assert layout.artifact_bytes(StateType.RECURRENT, 0, 1088) == 6 * state_bytes
    assert layout.artifact_bytes(StateType.DENSE_KV, 0, 1088) == 2 * 1088 * 256
    wide = model_spec_from_config(QWEN3_NEXT, ssm_dtype="float32")
    assert wide.layers[0].page_bytes == conv * 2 + 4 * 128 * 128 * 4
    halves = model_spec_from_config(QWEN3_NEXT, tp_size=2)
    assert halves.layers[0].page_bytes == state_bytes // 2


def test_mamba2_states() -> None:
    model = model_spec_from_config(GRANITE)
    elements = (512 + 2 * 32) * 3 + 8 * 64 * 32
    assert [layer.layer for layer in model.layers] == [
        "model.layers.0.mixer",
        "model.layers.1.self_attn.attn",
        "model.layers.2.mixer",
    ]
    assert model.layers[0].page_bytes == 2 * elements
    renamed = ["linear_attention", "full_attention", "linear_attention"]
    assert model_spec_from_config(GRANITE | {"layer_types": renamed}) == model
    assert model_spec_from_config(GRANITE | {"mamba_d_head": "auto"}) == model
    # Two ranks share one group's B and C, so each holds a copy.
    two = model_spec_from_config(GRANITE, tp_size=2).layers[0]
    assert two.page_bytes == 2 * ((512 + 2 * 2 * 32) // 2 * 3 + 4 * 64 * 32)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"model_type": "rwkv"}, "no preset arithmetic for model_type 'rwkv'"),
        ({}, "no preset arithmetic for model_type None"),
        (LLAMA | {"num_hidden_layers": None}, "'num_hidden_layers' should be a whole number"),
        (LLAMA | {"num_key_value_heads": 0}, "'num_key_value_heads' .* got 0"),
        (LLAMA | {"hidden_size": "64"}, "'hidden_size' .* got '64'"),
        (LLAMA | {"layer_types": ["full_attention"]}, "'layer_types' should be a list of 2"),
        (LLAMA | {"layer_types": ["chunked_attention"] * 2}, "layer 0 .*'chunked_attention'"),
        (LLAMA | {"use_sliding_window": True}, "'use_sliding_window'"),
        (LLAMA | {"torch_dtype": "int7"}, "KV dtype 'int7'"),
        (TINY_V4 | {"compress_ratios": [0, 128, 4, 2, 4]}, "layer 3 has compression ratio 2"),
        (
            TINY_V4 | {"compress_ratios": None, "layer_types": ["sliding_attention", "conv"] * 3},
            "layer 1 has unknown type 'conv'",
        ),
        (TINY_V4 | {"compress_ratios": [0]}, "'compress_ratios' should be a list of 5"),
        (GRANITE | {"layer_types": ["mamba", "conv", "mamba"]}, "layer 1 has unknown type 'conv'"),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 1}, "'kv_lora_rank'"),
    ],
)
def test_an_unknown_config_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        model_spec_from_config(config)


def test_layouts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="2 KV heads cannot be divided over 3"):
        model_spec_from_config(LLAMA, tp_size=3)
    with pytest.raises(UnsupportedModelError, match="'linear_num_key_heads' = 2"):
        model_spec_from_config(QWEN3_NEXT, tp_size=4)
    with pytest.raises(UnsupportedModelError, match=r"blocks of 64 tokens .* ratio 128"):
        model_spec_from_config(TINY_V4, block_tokens=64)
    with pytest.raises(UnsupportedModelError, match="KV dtype 'float32'"):
        model_spec_from_config(TINY_V4, kv_dtype="float32")
    with pytest.raises(UnsupportedModelError, match="KV dtype 'nvfp4'"):
        model_spec_from_config(LLAMA, kv_dtype="nvfp4")
    with pytest.raises(ValueError, match="tp_size=0"):
        model_spec_from_config(LLAMA, tp_size=0)
