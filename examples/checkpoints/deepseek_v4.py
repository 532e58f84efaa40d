"""A DeepSeek-V4-type checkpoint with the released names of tensors, about 46 MiB of bf16.

Five layers: sliding window only, HCA (m' = 128), CSA (m = 4), HCA, CSA. So it has every state type
of the model: CSA main and index entries, HCA entries, windows and the compressors' tail states.
Sizes are the smallest that vLLM's CPU kernels accept: experts in {64, 128, 256, 384}, experts per
token in {6, 8}, index_topk 512, head_dim 512 (448 without RoPE, 64 with), index_head_dim 128.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from examples.checkpoints.tokenizer import EOS_TOKEN_ID, NUM_TOKENS

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "vocab_size": 512,
    "hidden_size": 256,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "head_dim": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "num_experts_per_tok": 6,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 16384,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "compress_ratios": [0, 128, 4, 128, 4],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "num_hash_layers": 1,
    "swiglu_limit": 10.0,
    "sliding_window": 128,
    "o_groups": 2,
    "o_lora_rank": 64,
    "index_n_heads": 8,
    "index_head_dim": 128,
    "index_topk": 512,
    "num_nextn_predict_layers": 0,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "bos_token_id": EOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 1024,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}

_HIDDEN = CONFIG["hidden_size"]
_FEW = 4
"""Compression ratio of CSA, whose blocks overlap: its compressors project twice."""


def write_deepseek_v4(directory: Path) -> None:
    """Write config.json and model.safetensors into `directory`."""
    (directory / "config.json").write_text(json.dumps(CONFIG, indent=1) + "\n")
    weights = _Weights(seed=1234)
    weights.normal("embed.weight", CONFIG["vocab_size"], _HIDDEN, std=1.0)
    head = weights.normal("head.weight", CONFIG["vocab_size"], _HIDDEN, std=3 / _HIDDEN**0.5)
    head[NUM_TOKENS:] = 0.0  # ids without a token never have the highest logits
    weights.normal("norm.weight", _HIDDEN, std=0.1, mean=1.0)
    streams = CONFIG["hc_mult"]
    weights.normal("hc_head_fn", streams, streams * _HIDDEN, dtype=torch.float32)
    weights.normal("hc_head_base", streams, std=0.5, dtype=torch.float32)
    weights.normal("hc_head_scale", 1, std=0.1, mean=1.0, dtype=torch.float32)
    for layer in range(CONFIG["num_hidden_layers"]):
        _hyper_connections(weights, f"layers.{layer}.")
        _attention(weights, f"layers.{layer}.attn.", CONFIG["compress_ratios"][layer])
        _experts(weights, f"layers.{layer}.ffn.", hashed=layer < CONFIG["num_hash_layers"])
    save_file(weights.tensors, directory / "model.safetensors", metadata={"format": "pt"})


class _Weights:
    """Named tensors, drawn from one seeded generator in the order of the calls."""

    def __init__(self, seed: int) -> None:
        self.rng = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def normal(
        self,
        name: str,
        *shape: int,
        std: float | None = None,
        mean: float = 0.0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        """Add N(mean, std); `std` defaults to 1/sqrt(fan in)."""
        deviation = shape[-1] ** -0.5 if std is None else std
        values = torch.randn(*shape, generator=self.rng) * deviation + mean
        self.tensors[name] = values.to(dtype).contiguous()
        return self.tensors[name]


def _hyper_connections(weights: _Weights, prefix: str) -> None:
    streams = CONFIG["hc_mult"]
    mixes = (2 + streams) * streams
    for part in ("attn", "ffn"):
        weights.normal(f"{prefix}hc_{part}_fn", mixes, streams * _HIDDEN, dtype=torch.float32)
        weights.normal(f"{prefix}hc_{part}_base", mixes, std=0.5, dtype=torch.float32)
        weights.normal(f"{prefix}hc_{part}_scale", 3, std=0.1, mean=1.0, dtype=torch.float32)
        weights.normal(f"{prefix}{part}_norm.weight", _HIDDEN, std=0.1, mean=1.0)


def _attention(weights: _Weights, prefix: str, ratio: int) -> None:
    heads, head_dim, rank = (
        CONFIG["num_attention_heads"],
        CONFIG["head_dim"],
        CONFIG["q_lora_rank"],
    )
    groups, out_rank = CONFIG["o_groups"], CONFIG["o_lora_rank"]
    weights.normal(prefix + "attn_sink", heads, std=1.0, dtype=torch.float32)
    weights.normal(prefix + "wq_a.weight", rank, _HIDDEN)
    weights.normal(prefix + "wkv.weight", head_dim, _HIDDEN)
    weights.normal(prefix + "q_norm.weight", rank, std=0.1, mean=1.0)
    weights.normal(prefix + "wq_b.weight", heads * head_dim, rank)
    weights.normal(prefix + "kv_norm.weight", head_dim, std=0.1, mean=2.0)
    weights.normal(prefix + "wo_a.weight", groups * out_rank, heads * head_dim // groups)
    joined = groups * out_rank
    weights.normal(prefix + "wo_b.weight", _HIDDEN, joined, std=2 / joined**0.5)
    if ratio > 1:
        _compressor(weights, prefix + "compressor.", head_dim, ratio)
    if ratio == _FEW:
        index_heads, index_dim = CONFIG["index_n_heads"], CONFIG["index_head_dim"]
        weights.normal(prefix + "indexer.wq_b.weight", index_heads * index_dim, rank)
        weights.normal(prefix + "indexer.weights_proj.weight", index_heads, _HIDDEN)
        _compressor(weights, prefix + "indexer.compressor.", index_dim, ratio)


def _compressor(weights: _Weights, prefix: str, head_dim: int, ratio: int) -> None:
    width = (2 if ratio == _FEW else 1) * head_dim
    weights.normal(prefix + "ape", ratio, width, std=0.5, dtype=torch.float32)
    weights.normal(prefix + "wkv.weight", width, _HIDDEN)
    weights.normal(prefix + "wgate.weight", width, _HIDDEN)
    weights.normal(prefix + "norm.weight", head_dim, std=0.1, mean=2.0)


def _experts(weights: _Weights, prefix: str, *, hashed: bool) -> None:
    experts, width = CONFIG["n_routed_experts"], CONFIG["moe_intermediate_size"]
    weights.normal(prefix + "gate.weight", experts, _HIDDEN)
    if hashed:
        chosen = CONFIG["num_experts_per_tok"]
        weights.tensors[prefix + "gate.tid2eid"] = torch.stack(
            [
                torch.randperm(experts, generator=weights.rng)[:chosen]
                for _ in range(CONFIG["vocab_size"])
            ]
        ).to(torch.int32)
    else:
        weights.normal(prefix + "gate.bias", experts, std=0.05, dtype=torch.float32)
    blocks = [f"experts.{index}." for index in range(experts)] + ["shared_experts."]
    for block in blocks:
        weights.normal(f"{prefix}{block}w1.weight", width, _HIDDEN)
        weights.normal(f"{prefix}{block}w3.weight", width, _HIDDEN)
        weights.normal(f"{prefix}{block}w2.weight", _HIDDEN, width)
