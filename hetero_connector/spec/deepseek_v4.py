"""DeepSeek-V4's cache layers: windows in all layers, CSA or HCA in compressed layers.

Every layer keeps a sliding window. A layer of ratio 4 (CSA) adds compressed entries, an indexer
key per entry and two compressor states. A layer of ratio 128 (HCA) adds compressed entries and one
compressor state. All of this is the same on every rank.

Sources (vLLM 0.32.0): vllm/models/deepseek_v4/attention.py (`get_kv_cache_spec` of the
attention and of the indexer cache), compressor.py (`CompressorStateCache`), and
vllm/v1/attention/backends/mla/sparse_swa.py (`DeepseekV4SWACache`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hetero_connector.spec.hf_config import HfConfig
from hetero_connector.spec.model_spec import LayerSpec
from hetero_connector.spec.state_types import RestoreRule, StateType

CSA_RATIO = 4
HCA_RATIO = 128
DEFAULT_BLOCK_TOKENS = 256
_SWA_BLOCK_TOKENS = 64
_COMPRESSOR_BLOCK_TOKENS = {CSA_RATIO: 4, HCA_RATIO: 8}
_PACKED_ENTRY_BYTES = 584  # fp8_ds_mla: 448 NoPE + 64 x 2 RoPE + 8 of scales
_PACKED_ALIGNMENT = 576
_PLAIN_ALIGNMENT = 512
_INDEX_SCALE_EVERY = 128  # one fp32 scale per 128 fp8 values of an indexer key
_FLOAT32_BYTES = 4
_BFLOAT16_BYTES = 2
_TYPES_TO_RATIOS = {
    "sliding_attention": 0,
    "compressed_sparse_attention": CSA_RATIO,
    "heavily_compressed_attention": HCA_RATIO,
}


@dataclass(frozen=True)
class _Format:
    """The format of states in a page."""

    dtype: str
    state_bytes: int
    page_alignment: int


def deepseek_v4_layers(
    config: HfConfig, kv_dtype: str, block_tokens: int | None
) -> Iterator[LayerSpec]:
    """Yield the cache layers of the main model, without its MTP layer, which only drafts."""
    entry = _entry_format(config, kv_dtype)
    block = block_tokens or DEFAULT_BLOCK_TOKENS
    window = config.number("sliding_window")
    for index, ratio in enumerate(_ratios(config)):
        if ratio and block % ratio:
            raise config.error(f"blocks of {block} tokens are not a multiple of ratio {ratio}")
        name = f"model.layers.{index}.attn"
        yield _window(f"{name}.swa_cache", entry, window)
        if ratio > 1:
            csa = ratio == CSA_RATIO
            kind = StateType.COMPRESSED_CSA_MAIN if csa else StateType.COMPRESSED_HCA
            yield _page(name, kind, entry, ratio, block)
            yield _compressor(f"{name}.compressor", config.number("head_dim"), ratio, entry)
        if ratio == CSA_RATIO:
            index_dim = config.number("index_head_dim")
            key_bytes = index_dim + index_dim // _INDEX_SCALE_EVERY * _FLOAT32_BYTES
            key = _Format("uint8", key_bytes, entry.page_alignment)
            name += ".indexer"
            yield _page(f"{name}.k_cache", StateType.COMPRESSED_CSA_INDEX, key, ratio, block)
            yield _compressor(f"{name}.compressor", index_dim, ratio, entry)


def _entry_format(config: HfConfig, kv_dtype: str) -> _Format:
    """The format of an entry: packed fp8_ds_mla rows for `auto` and fp8, plain rows of bfloat16."""
    if kv_dtype in ("auto", "fp8", "fp8_ds_mla"):
        return _Format("uint8", _PACKED_ENTRY_BYTES, _PACKED_ALIGNMENT)
    if kv_dtype != "bfloat16":
        raise config.error(f"KV dtype {kv_dtype!r} is not supported: use fp8 or bfloat16")
    return _Format(kv_dtype, config.number("head_dim") * _BFLOAT16_BYTES, _PLAIN_ALIGNMENT)


def _ratios(config: HfConfig) -> list[int]:
    """The compression ratio of each layer, 0 for none; from `layer_types` if none are given."""
    if not config.has("compress_ratios"):
        kinds = config.sequence("layer_types")
        for index, kind in enumerate(kinds):
            if kind not in _TYPES_TO_RATIOS:
                raise config.error(f"layer {index} has unknown type {kind!r}")
        return [_TYPES_TO_RATIOS[kind] for kind in kinds]
    ratios = list(config.sequence("compress_ratios"))
    for index, ratio in enumerate(ratios):
        if ratio not in (0, 1, CSA_RATIO, HCA_RATIO):
            raise config.error(
                f"layer {index} has compression ratio {ratio!r}; known are 0, 4, 128"
            )
    return ratios


def _page(
    layer: str, kind: StateType, state: _Format, tokens_per_state: int, block_tokens: int
) -> LayerSpec:
    page_bytes = block_tokens // tokens_per_state * state.state_bytes
    return LayerSpec(
        layer=layer,
        group=0,
        state_type=kind,
        tokens_per_state=tokens_per_state,
        block_tokens=block_tokens,
        page_bytes=page_bytes,
        page_stride_bytes=math.ceil(page_bytes / state.page_alignment) * state.page_alignment,
        dtype=state.dtype,
        restore_rule=RestoreRule.EVERY_TOKEN,
        runs=(page_bytes,),
    )


def _window(layer: str, entry: _Format, window: int) -> LayerSpec:
    page = _page(layer, StateType.WINDOW_SWA, entry, 1, _SWA_BLOCK_TOKENS)
    return _bounded(page, window, window - 1)


def _compressor(layer: str, head_dim: int, ratio: int, entry: _Format) -> LayerSpec:
    """The uncompressed key and score rows of the open compression block, in float32.

    CSA's blocks overlap, so its state is twice as wide and includes the previous block. At a
    boundary that is a multiple of the ratio, only those `window - ratio` rows are read.
    """
    overlap = 2 if ratio == CSA_RATIO else 1
    row = _Format("float32", 2 * overlap * head_dim * _FLOAT32_BYTES, entry.page_alignment)
    block = _COMPRESSOR_BLOCK_TOKENS[ratio]
    page = _page(f"{layer}.state_cache", StateType.TAIL_STATE, row, 1, block)
    return _bounded(page, overlap * ratio, (overlap - 1) * ratio)


def _bounded(page: LayerSpec, window: int, boundary_tokens: int) -> LayerSpec:
    return replace(
        page,
        restore_rule=RestoreRule.WINDOW,
        window=window,
        boundary_tokens=boundary_tokens,
    )
