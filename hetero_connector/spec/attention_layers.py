"""`LayerSpec`s from shapes: the page arithmetic of vLLM's cache specs, without vLLM.

Sources: `AttentionSpec`, `MLAAttentionSpec`, `SlidingWindowSpec` and `MambaSpec` in
vllm/v1/kv_cache_interface.py; layer names from the model classes in vllm/model_executor/models
(0.32.0).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from hetero_connector.spec.hf_config import Precision
from hetero_connector.spec.model_spec import LayerSpec, ModelSpec
from hetero_connector.spec.state_types import RestoreRule, StateType


def dense_layer(
    layer: str, num_kv_heads: int, head_dim: int, kv: Precision, block_tokens: int, parts: int = 1
) -> LayerSpec:
    """Full attention: keys and values of every token, `num_kv_heads` on each rank."""
    page_bytes = 2 * num_kv_heads * head_dim * kv.item_bytes * block_tokens
    return LayerSpec(
        layer=layer,
        group=0,
        state_type=StateType.DENSE_KV,
        tokens_per_state=1,
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        page_stride_bytes=page_bytes,
        dtype=kv.dtype,
        restore_rule=RestoreRule.EVERY_TOKEN,
        parts=parts,
        runs=(page_bytes,),
    )


def sliding_layer(dense: LayerSpec, window: int) -> LayerSpec:
    """Sliding-window attention: the pages of `dense`, but only the last `window` tokens are read.

    The token at the boundary is yet to be computed, so a boundary needs `window - 1` tokens.
    """
    return replace(
        dense,
        state_type=StateType.WINDOW_SWA,
        restore_rule=RestoreRule.WINDOW,
        window=window,
        boundary_tokens=window - 1,
    )


def mla_layer(layer: str, latent_dim: int, kv: Precision, block_tokens: int) -> LayerSpec:
    """Multi-head latent attention: one vector per token, the same on every rank."""
    page_bytes = latent_dim * kv.item_bytes * block_tokens
    return LayerSpec(
        layer=layer,
        group=0,
        state_type=StateType.MLA_LATENT,
        tokens_per_state=1,
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        page_stride_bytes=page_bytes,
        dtype=kv.dtype,
        restore_rule=RestoreRule.EVERY_TOKEN,
        runs=(page_bytes,),
    )


def recurrent_layer(
    layer: str,
    state_bytes: int,
    block_tokens: int,
    stride: int,
    parts: int = 1,
    runs: tuple[int, ...] = (),
) -> LayerSpec:
    """Mamba or gated delta net: one state per page, that of the page's end."""
    return LayerSpec(
        layer=layer,
        group=0,
        state_type=StateType.RECURRENT,
        tokens_per_state=1,
        block_tokens=block_tokens,
        page_bytes=state_bytes,
        page_stride_bytes=stride,
        dtype="uint8",
        restore_rule=RestoreRule.AT_BOUNDARY,
        parts=parts,
        runs=runs,
    )


def delta_net_runs(
    conv_rows: int, key_bytes: int, value_bytes: int, state_bytes: int
) -> tuple[int, ...]:
    """The runs of a gated delta net's page on one rank (`LayerSpec.runs`).

    First come the convolution's last inputs, row by row: queries, keys and values of the rank's
    heads. Then comes the delta-rule state of its value heads. Source:
    vllm/model_executor/layers/mamba, the shapes in mamba_utils.py, the sections in the loading of
    conv1d by `gdn/qwen_gdn_linear_attn.py`.
    """
    return (key_bytes, key_bytes, value_bytes) * conv_rows + (state_bytes,)


def hybrid_block_tokens(token_bytes: int, state_bytes: int, block_tokens: int) -> int:
    """The fewest tokens per block for which an attention page is as large as a recurrent state.

    vllm/platforms/interface.py, `_align_hybrid_block_size`: a multiple of `block_tokens`.
    """
    return block_tokens * math.ceil(state_bytes / (block_tokens * token_bytes))


def assemble(layers: Iterable[LayerSpec], tp_size: int) -> ModelSpec:
    """Make a `ModelSpec`: number the groups (one per geometry, in order) and find the alignment.

    The engine may split a geometry into several groups. That changes no size and no boundary.
    """
    groups: dict[LayerSpec, int] = {}
    numbered = []
    for layer in layers:
        geometry = replace(layer, layer="")
        numbered.append(replace(layer, group=groups.setdefault(geometry, len(groups))))
    alignment = math.lcm(*(layer.block_tokens for layer in numbered))
    return ModelSpec(tuple(numbered), alignment=alignment, tp_size=tp_size)
