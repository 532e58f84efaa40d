"""Checkpoints built by `transformers`: dense, SWA hybrids, a GDN hybrid and MLA.

Weights are normal with a standard deviation of `gain / sqrt(fan_in)`. Some gains are above 1, so
that outputs depend on distant tokens: attention must be sharp enough for a single token to matter,
and the output of full attention must not be small against the other layers'.
"""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from examples.checkpoints.tokenizer import EOS_TOKEN_ID, NUM_TOKENS

SLIDING, FULL, LINEAR = "sliding_attention", "full_attention", "linear_attention"
LOCAL = "chunked_attention"


@dataclass(frozen=True)
class Recipe:
    """A `transformers` config and the gains of its random weights."""

    model_type: str
    config: dict[str, Any]
    gains: dict[str, float] = field(default_factory=dict)
    """Factors by regular expression over parameter names; all that match are multiplied."""
    layer_gains: dict[str, float] = field(default_factory=dict)
    """The same for full-attention layers of a hybrid model only."""
    dtype: torch.dtype = torch.float32


_BASE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "tie_word_embeddings": False,
}

_SHARP = {r"[qk]_proj": 1.5}
_FAR = _SHARP | {r"[vo]_proj": 1.5}

_DENSE = Recipe("llama", _BASE | {"num_hidden_layers": 4}, gains=_FAR)

_DENSE_BENCH = Recipe(
    # 6 layers x K and V x 4 heads x 128 elements x 4 bytes = 24,576 B/token.
    "llama",
    _BASE
    | {
        "num_hidden_layers": 6,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    gains=_FAR,
)

_GEMMA3 = Recipe(
    "gemma3_text",
    _BASE
    | {
        "num_hidden_layers": 9,
        "layer_types": [SLIDING, SLIDING, FULL] * 3,
        "sliding_window": 64,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32,
    },
    # Norms around attention cancel gains of v and o, so the norms themselves get the gain.
    layer_gains={r"post_attention_layernorm": 5.0, r"q_norm": 2.0},
)

_GPTOSS = Recipe(
    "gpt_oss",
    _BASE
    | {
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, FULL] * 4,
        "sliding_window": 64,
        "head_dim": 64,
        "hidden_act": "silu",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            "rope_type": "yarn",  # the only type that vLLM's model supports
            "rope_theta": 150000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    },
    gains=_SHARP,
    layer_gains={r"[vo]_proj": 2.0, r"[qk]_proj": 1.3},
)

_QWEN3_NEXT = Recipe(
    # The CPU kernels need linear key and value head dims of 128 and a head_dim of 64.
    "qwen3_next",
    _BASE
    | {
        "num_hidden_layers": 4,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    gains=_SHARP,
    layer_gains={r"[vo]_proj|q_norm": 2.0},
    dtype=torch.bfloat16,  # the only type of the CPU's GDN kernels
)

_QWEN3_NEXT_STAGES = Recipe(
    # Full attention in both halves: vLLM wants the same page layouts of all pipeline stages.
    _QWEN3_NEXT.model_type,
    _QWEN3_NEXT.config | {"layer_types": [LINEAR, FULL] * 2},
    _QWEN3_NEXT.gains,
    _QWEN3_NEXT.layer_gains,
    _QWEN3_NEXT.dtype,
)

_LLAMA4 = Recipe(
    # Local attention in chunks of 512 tokens, and a layer without positions in three. No experts.
    "llama4_text",
    _BASE
    | {
        "num_hidden_layers": 6,
        "no_rope_layers": [1, 1, 0] * 2,
        "layer_types": [LOCAL, LOCAL, FULL] * 2,
        "attention_chunk_size": 512,
        "intermediate_size_mlp": 256,
        "interleave_moe_layer_step": 0,
        "moe_layers": [],
        "use_qk_norm": False,
        "attn_temperature_tuning": False,
    },
    gains=_FAR,
)

_DENSE_WIDE = Recipe(
    # 4 layers x K and V x 16 heads x 64 elements x 4 bytes = 32,768 B/token with little compute: a
    # prefill makes nearly as many bytes per second as on an accelerator.
    "llama",
    _BASE
    | {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": 64,
    },
)

_MLA = Recipe(
    "deepseek_v2",
    _BASE
    | {
        "num_hidden_layers": 3,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 3,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
    },
    gains={r"q_proj|kv_a_proj_": 1.7, r"kv_b_proj|o_proj": 1.5},
)

RECIPES: dict[str, Recipe] = {
    "dense": _DENSE,
    "dense-bench": _DENSE_BENCH,
    "dense-wide": _DENSE_WIDE,
    "gemma3": _GEMMA3,
    "gptoss": _GPTOSS,
    "llama4": _LLAMA4,
    "mla": _MLA,
    "qwen3_next": _QWEN3_NEXT,
    "qwen3_next-stages": _QWEN3_NEXT_STAGES,
}
RECIPES |= {
    f"{name}-bf16": Recipe(r.model_type, r.config, r.gains, r.layer_gains, torch.bfloat16)
    for name, r in RECIPES.items()
    if r.dtype is torch.float32
}


def write_recipe(recipe: Recipe, directory: Path) -> None:
    """Write config.json and model.safetensors into `directory`."""
    disable_progress_bar()
    config = AutoConfig.for_model(recipe.model_type, **recipe.config)
    save_random(AutoModelForCausalLM.from_config(config), recipe, directory)


def save_random(model: Any, recipe: Recipe, directory: Path) -> None:
    """Save `model` with the recipe's random weights."""
    model.float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Seeded by the name, so that one tensor's shape does not change the others' values.
            rng = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(parameter.shape, generator=rng)
            parameter.copy_(_value(recipe, name, noise, parameter))
    model.to(recipe.dtype)
    model.config.dtype = recipe.dtype
    model.save_pretrained(directory)


def _value(recipe: Recipe, name: str, noise: torch.Tensor, initial: torch.Tensor) -> torch.Tensor:
    if "embed_tokens" in name:
        return noise
    if "lm_head" in name:
        noise[NUM_TOKENS:] = 0.0  # ids without a token never have the highest logits
        scale: float = 2.0 / noise.shape[1] ** 0.5
        return noise * scale
    if "norm" in name:
        stored = initial.mean()  # Gemma and Qwen3-Next store the weight minus one
        weight = 2.0 if "q_norm" in name else 1.0  # sharper attention
        return weight * _gain(recipe, name) - 1.0 + stored + 0.1 * noise
    if "sinks" in name:
        return noise
    if "A_log" in name:
        return noise - 3.0  # decay exp(-exp(A_log) * softplus(dt)) over hundreds of tokens
    if "dt_bias" in name:
        return 0.05 * noise - 4.0
    if initial.dim() == 1 or "bias" in name:
        return 0.05 * noise
    fan_in = noise[0].numel() if "conv1d" in name else noise.shape[-1]
    if "experts" in name and recipe.model_type == "gpt_oss":
        fan_in = noise.shape[-2]  # stored transposed
    spread: float = _gain(recipe, name) / fan_in**0.5
    return noise * spread


def _gain(recipe: Recipe, name: str) -> float:
    gains = list(recipe.gains.items())
    if _in_full_layer(recipe, name):
        gains += recipe.layer_gains.items()
    factor = 1.0
    for pattern, gain in gains:
        if re.search(pattern, name):
            factor *= gain
    return factor


def _in_full_layer(recipe: Recipe, name: str) -> bool:
    layer = re.search(r"layers\.(\d+)\.", name)
    kinds = recipe.config.get("layer_types")
    return bool(layer and kinds and kinds[int(layer.group(1))] == FULL)
