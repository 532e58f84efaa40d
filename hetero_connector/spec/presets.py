"""Released models by name, with the few fields of their `config.json` that shape the cache.

Nothing is downloaded. A comment at each entry names its source: the defaults of the installed
transformers class (DeepSeek-V4-Flash, gpt-oss-120b, Qwen3-Next), or the model's published
config.json as known to the authors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hetero_connector.spec.from_config import model_spec_from_config
from hetero_connector.spec.model_spec import ModelSpec

__all__ = ["PRESETS", "PRESET_CONFIGS", "model_spec_from_config"]

_DEEPSEEK_V4 = {
    "model_type": "deepseek_v4",
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}

PRESET_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    # deepseek-ai/DeepSeek-V4-Flash: shapes are the defaults of transformers'
    # DeepseekV4Config; ratios as published (43 layers, then one entry for MTP).
    "deepseek-v4-flash": _DEEPSEEK_V4
    | {"num_hidden_layers": 43, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0]},
    # deepseek-ai/DeepSeek-V4-Pro: as published (30 CSA and 31 HCA layers, then MTP);
    # could not be checked against an installed package.
    "deepseek-v4-pro": _DEEPSEEK_V4
    | {"num_hidden_layers": 61, "compress_ratios": [128, 128, *[4, 128] * 29, 4, 0]},
    # google/gemma-3-27b-it, text_config: as published; pattern of 6 from transformers.
    "gemma-3-27b": {
        "model_type": "gemma3",
        "torch_dtype": "bfloat16",
        "text_config": {
            "model_type": "gemma3_text",
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
        },
    },
    # openai/gpt-oss-120b: the defaults of transformers' GptOssConfig.
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "torch_dtype": "bfloat16",
    },
    # Qwen/Qwen3-Coder-30B-A3B-Instruct: as published.
    "qwen3-coder-30b-a3b": {
        "model_type": "qwen3_moe",
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "torch_dtype": "bfloat16",
    },
    # meta-llama/Llama-3.1-8B-Instruct: as published.
    "llama-3.1-8b": {
        "model_type": "llama",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # meta-llama/Llama-3.1-70B-Instruct: as published.
    "llama-3.1-70b": {
        "model_type": "llama",
        "num_hidden_layers": 80,
        "hidden_size": 8192,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
    },
    # Qwen/Qwen3-Next-80B-A3B-Instruct: the defaults of transformers' Qwen3NextConfig.
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "torch_dtype": "bfloat16",
    },
    # deepseek-ai/DeepSeek-V3: as published; 61 layers, latent 512 + RoPE 64.
    "deepseek-v3": {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "torch_dtype": "bfloat16",
    },
}

PRESETS: Mapping[str, Callable[..., ModelSpec]] = {
    name: partial(model_spec_from_config, config) for name, config in PRESET_CONFIGS.items()
}
"""Name -> `ModelSpec`; takes the keywords of `model_spec_from_config`."""
