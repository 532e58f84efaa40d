"""A model's `ModelSpec` from its `config.json` alone: without engine, weights or vLLM.

For planning and simulation. It follows the engine's arithmetic on a GPU without speculative
decoding, and refuses models for which that is not exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from hetero_connector.errors import UnsupportedModelError
from hetero_connector.spec.attention_layers import (
    assemble,
    delta_net_runs,
    dense_layer,
    hybrid_block_tokens,
    mla_layer,
    recurrent_layer,
    sliding_layer,
)
from hetero_connector.spec.deepseek_v4 import deepseek_v4_layers
from hetero_connector.spec.hf_config import HfConfig, precision
from hetero_connector.spec.model_spec import LayerSpec, ModelSpec

_DENSE_BLOCK_TOKENS = 16  # vLLM's default on CUDA
_MLA_BLOCK_TOKENS = 64  # FlashMLA's block
_SLIDING, _FULL = "sliding_attention", "full_attention"
_LINEAR = ("linear_attention", "mamba")

# Defaults of the transformers config classes that released config.json files depend on.
_GEMMA3_DEFAULTS = {
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
}
_GPT_OSS_DEFAULTS = {"head_dim": 64, "sliding_window": 128, "sliding_window_pattern": 2}
_QWEN3_NEXT_DEFAULTS = {"full_attention_interval": 4, "linear_conv_kernel_dim": 4}


@dataclass(frozen=True)
class _Deployment:
    """Engine settings that the state depends on."""

    kv_dtype: str
    ssm_dtype: str
    block_tokens: int | None
    tp_size: int


class _RecurrentState(NamedTuple):
    """One rank's state of a recurrent layer."""

    size_bytes: int
    runs: tuple[int, ...]
    """See `LayerSpec.runs`."""


_Layers = Iterator[LayerSpec]
_Family = Callable[[HfConfig, _Deployment], _Layers]


def model_spec_from_config(
    config: Mapping[str, Any],
    *,
    kv_dtype: str = "auto",
    ssm_dtype: str = "auto",
    block_tokens: int | None = None,
    tp_size: int = 1,
) -> ModelSpec:
    """Compute the state that one tensor-parallel rank keeps for the model of this `config.json`.

    `kv_dtype` is vLLM's `--kv-cache-dtype`, `ssm_dtype` its `--mamba-ssm-cache-dtype` (the CPU
    build turns `auto` into float32). `block_tokens` is its `--block-size`, None for the engine's
    own choice on a GPU: 16 tokens; 64 for MLA, 256 for DeepSeek-V4; for recurrent hybrids the
    smallest multiple for which an attention page is as large as a state. Raises
    UnsupportedModelError for a model type, shape or precision that is not known.
    """
    if tp_size <= 0 or (block_tokens is not None and block_tokens <= 0):
        raise ValueError(f"tp_size={tp_size} and block_tokens={block_tokens} must be positive")
    model_type = config.get("model_type")
    if model_type not in _FAMILIES:
        raise UnsupportedModelError(
            f"no preset arithmetic for model_type {model_type!r}; known are {', '.join(_FAMILIES)}"
        )
    family, defaults = _FAMILIES[model_type]
    deployment = _Deployment(kv_dtype, ssm_dtype, block_tokens, tp_size)
    return assemble(family(HfConfig(config, defaults), deployment), tp_size)


def _attention(config: HfConfig, deployment: _Deployment) -> _Layers:
    """Grouped-query attention; each layer is full or sliding."""
    prefix = "language_model.model" if config.multimodal else "model"
    attn = "attn.attn" if config.model_type == "gpt_oss" else "self_attn.attn"
    for index, kind in enumerate(_attention_kinds(config)):
        layer = _dense(config, deployment, f"{prefix}.layers.{index}.{attn}", _DENSE_BLOCK_TOKENS)
        if kind == _SLIDING:
            layer = sliding_layer(layer, config.number("sliding_window"))
        elif kind != _FULL:
            raise config.error(f"layer {index} has unknown attention {kind!r}")
        yield layer


def _dense(config: HfConfig, deployment: _Deployment, name: str, default_block: int) -> LayerSpec:
    return dense_layer(
        name,
        config.kv_heads_per_rank(deployment.tp_size),
        config.head_dim,
        precision(deployment.kv_dtype, config.model_dtype),
        deployment.block_tokens or default_block,
        config.kv_parts(deployment.tp_size),
    )


def _attention_kinds(config: HfConfig) -> list[str]:
    """Return `layer_types`, or the family's rule: every n-th layer is full, the others slide."""
    if config.has("layer_types"):
        return [str(kind) for kind in config.sequence("layer_types")]
    if config.get("use_sliding_window"):
        raise config.error("'use_sliding_window' without 'layer_types' is not supported")
    layers = config.number("num_hidden_layers")
    every = config.number("sliding_window_pattern", 1)
    return [_SLIDING if (index + 1) % every else _FULL for index in range(layers)]


def _latent(config: HfConfig, deployment: _Deployment) -> _Layers:
    """DeepSeek-V2 and V3: one latent vector and one RoPE key per token."""
    kv = precision(deployment.kv_dtype, config.model_dtype)
    latent_dim = config.number("kv_lora_rank") + config.number("qk_rope_head_dim")
    block = deployment.block_tokens or _MLA_BLOCK_TOKENS
    for index in range(config.number("num_hidden_layers")):
        yield mla_layer(f"model.layers.{index}.self_attn.attn", latent_dim, kv, block)


def _deepseek_v4(config: HfConfig, deployment: _Deployment) -> _Layers:
    return deepseek_v4_layers(config, deployment.kv_dtype, deployment.block_tokens)


def _qwen3_next(config: HfConfig, deployment: _Deployment) -> _Layers:
    """Gated delta net layers; every n-th layer is full attention."""
    every = config.number("full_attention_interval")
    layers = range(config.number("num_hidden_layers"))
    default = ["linear_attention" if (i + 1) % every else _FULL for i in layers]
    kinds = config.sequence("layer_types") if config.has("layer_types") else default
    return _hybrid(config, deployment, list(kinds), _delta_net_state, "linear_attn")


def _granite_hybrid(config: HfConfig, deployment: _Deployment) -> _Layers:
    """Granite 4: Mamba-2 layers and a few layers of full attention."""
    kinds = ["full_attention" if k == "attention" else k for k in config.sequence("layer_types")]
    return _hybrid(config, deployment, kinds, _mamba2_state, "mixer")


def _hybrid(
    config: HfConfig,
    deployment: _Deployment,
    kinds: list[str],
    state_of: Callable[[HfConfig, _Deployment], _RecurrentState],
    mixer: str,
) -> _Layers:
    """Recurrent layers, with pages padded to the size of the attention layers' pages."""
    state_bytes, runs = state_of(config, deployment)
    token_bytes = _dense(config, deployment, "", 1).bytes_per_token
    step = deployment.block_tokens or _DENSE_BLOCK_TOKENS
    block = hybrid_block_tokens(int(token_bytes), state_bytes, step)
    aligned = replace(deployment, block_tokens=block)
    for index, kind in enumerate(kinds):
        name = f"model.layers.{index}"
        if kind in _LINEAR:
            stride = int(token_bytes) * block
            parts = deployment.tp_size
            yield recurrent_layer(f"{name}.{mixer}", state_bytes, block, stride, parts, runs)
        elif kind == _FULL:
            yield _dense(config, aligned, f"{name}.self_attn.attn", block)
        else:
            raise config.error(f"layer {index} has unknown type {kind!r}")


def _item_bytes(config: HfConfig, deployment: _Deployment) -> tuple[int, int]:
    """Return the item bytes of the convolution's part of a recurrent state, and of the rest."""
    conv = precision("auto", config.model_dtype).item_bytes
    return conv, precision(deployment.ssm_dtype, config.model_dtype).item_bytes


def _delta_net_state(config: HfConfig, deployment: _Deployment) -> _RecurrentState:
    """vllm/model_executor/layers/mamba/mamba_utils.py, `gated_delta_net_state_shape`."""
    key_dim, value_dim = (
        config.number("linear_key_head_dim"),
        config.number("linear_value_head_dim"),
    )
    keys = key_dim * config.divided("linear_num_key_heads", deployment.tp_size)
    values = value_dim * config.divided("linear_num_value_heads", deployment.tp_size)
    conv, ssm = _item_bytes(config, deployment)
    rows = config.number("linear_conv_kernel_dim") - 1
    runs = delta_net_runs(rows, keys * conv, values * conv, values * key_dim * ssm)
    return _RecurrentState(sum(runs), runs)


def _mamba2_state(config: HfConfig, deployment: _Deployment) -> _RecurrentState:
    """vllm/model_executor/layers/mamba/mamba_utils.py, `mamba2_state_shape`.

    Groups are copied if ranks outnumber them, so the ranks' pages cannot be joined (no runs).
    """
    tp_size = deployment.tp_size
    heads = config.divided("mamba_n_heads", tp_size)
    intermediate = config.number("mamba_expand", 2) * config.number("hidden_size")
    head_dim = config.get("mamba_d_head", "auto")
    if head_dim == "auto":
        head_dim = intermediate // config.number("mamba_n_heads")
    groups = config.number("mamba_n_groups", 1)
    groups = groups if groups % tp_size == 0 else tp_size
    state = config.number("mamba_d_state")
    conv_dim = (intermediate + 2 * groups * state) // tp_size
    conv, ssm = _item_bytes(config, deployment)
    conv_bytes = conv_dim * (config.number("mamba_d_conv", 4) - 1) * conv
    return _RecurrentState(conv_bytes + heads * int(head_dim) * state * ssm, ())


_FAMILIES: dict[str, tuple[_Family, dict[str, int]]] = {
    "llama": (_attention, {}),
    "qwen2": (_attention, {}),
    "qwen3": (_attention, {}),
    "qwen3_moe": (_attention, {}),
    "gemma3": (_attention, _GEMMA3_DEFAULTS),
    "gemma3_text": (_attention, _GEMMA3_DEFAULTS),
    "gpt_oss": (_attention, _GPT_OSS_DEFAULTS),
    "deepseek_v2": (_latent, {}),
    "deepseek_v3": (_latent, {}),
    "deepseek_v4": (_deepseek_v4, {}),
    "qwen3_next": (_qwen3_next, _QWEN3_NEXT_DEFAULTS),
    "granitemoehybrid": (_granite_hybrid, {}),
}
