"""Translate vLLM's KV cache specs, one per layer, into a `ModelSpec`.

They come from the worker's `KVCacheConfig`: the scheduler's copy has only the first layer's spec of
each group.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vllm.v1 import kv_cache_interface as kvi

from hetero_connector.engine.startup.heads import ModelHeads
from hetero_connector.errors import UnsupportedModelError
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_UNKNOWN_HEADS = ModelHeads()
_HCA_RATIO = 128
_INDEXER_SUFFIX = ".indexer.k_cache"


@dataclass(frozen=True)
class _Role:
    """The state type of a cache layer, and the rule by which it is restored."""

    state_type: StateType
    rule: RestoreRule
    window: int | None = None
    boundary_tokens: int = 0
    prompt_only: bool = False


def model_spec(
    config: KVCacheConfig, tp_size: int = 1, heads: ModelHeads = _UNKNOWN_HEADS
) -> ModelSpec:
    """Return the geometry of every cache layer of this rank.

    `heads`: the model's heads as far as known, so that one that several ranks have is stored once.
    Raises UnsupportedModelError, which names the layer, for an unknown class of spec.
    """
    ratios = {
        name: int(spec.tokens_per_state)
        for _, name, spec in _layer_specs(config)
        if isinstance(spec, kvi.MLAAttentionSpec)
    }
    layers = tuple(
        _layer(group, name, spec, _role(name, spec, transferred, ratios), tp_size, heads)
        for (group, name, spec), transferred in zip(
            _layer_specs(config), _transferred(config), strict=True
        )
    )
    return ModelSpec(layers=layers, alignment=_alignment(config, layers), tp_size=tp_size)


def merge_stages(stages: Sequence[ModelSpec]) -> ModelSpec:
    """Return the geometry of the whole model from those of its pipeline stages.

    Layers are in the order of a single stage: by KV cache group, then by stage. Raises
    UnsupportedModelError for a stage without stored layers, whose worker would have no copies to
    report.
    """
    layers = sorted((x for stage in stages for x in stage.layers), key=lambda x: x.group)
    alignment = math.lcm(*(stage.alignment for stage in stages))
    whole = replace(stages[0], layers=tuple(layers), alignment=alignment)
    for number, stage in enumerate(stages):
        if whole.stored_layers and not stage.stored_layers:
            raise UnsupportedModelError(
                f"pipeline stage {number} has no layer whose state is stored, and HeteroConnector "
                "needs one in every stage: lower --pipeline-parallel-size, or divide the layers "
                "otherwise by VLLM_PP_LAYER_PARTITION"
            )
    return whole


def _layer_specs(config: KVCacheConfig) -> Iterator[tuple[int, str, KVCacheSpec]]:
    for index, group in enumerate(config.kv_cache_groups):
        spec = group.kv_cache_spec
        for name in group.layer_names:
            if isinstance(spec, kvi.UniformTypeKVCacheSpecs):
                yield index, name, spec.kv_cache_specs[name]
            else:
                yield index, name, spec


def _transferred(config: KVCacheConfig) -> Iterator[bool]:
    for group in config.kv_cache_groups:
        for _ in group.layer_names:
            yield group.enable_kv_transfer


def _alignment(config: KVCacheConfig, layers: tuple[LayerSpec, ...]) -> int:
    blocks = {x.block_tokens for x in layers if x.restore_rule is not RestoreRule.NOTHING}
    return math.lcm(config.cache_hit_alignment_tokens or 1, *blocks)


def _role(name: str, spec: KVCacheSpec, transferred: bool, ratios: dict[str, int]) -> _Role:
    if not transferred or not spec.prefix_cacheable:
        # Scratch memory of a request (ring buffers, replayed windows): the engine rebuilds it.
        return _Role(StateType.TAIL_STATE, RestoreRule.NOTHING)
    if getattr(spec, "kv_quant_mode", kvi.KVQuantMode.NONE).is_per_token_head:
        raise UnsupportedModelError(
            f"layer {name!r} keeps a scale for each token and head, which vLLM sets again when the "
            "layer first runs, also after a restore: set --kv-cache-dtype to auto or fp8"
        )
    if isinstance(spec, kvi.HiddenStateCacheSpec | kvi.SinkFullAttentionSpec):
        raise _unsupported(name, spec)
    if getattr(spec, "non_causal", False):
        raise UnsupportedModelError(
            f"layer {name!r} attends to later tokens of a prompt too, so the state of a prefix "
            "depends on what follows it. Serve this model without the connector (drop "
            "--kv-transfer-config)"
        )
    if isinstance(spec, kvi.MLAAttentionSpec):
        return _Role(_mla_type(name, spec), RestoreRule.EVERY_TOKEN)
    if isinstance(spec, kvi.RSWASpec):
        # Prompt tokens attend to everything before them, decoded tokens only to a window. So the
        # state of decoded tokens cannot be reused when they are part of the next prompt.
        window = spec.rswa_window
        return _Role(StateType.DENSE_KV, RestoreRule.EVERY_TOKEN, window, prompt_only=True)
    if isinstance(spec, kvi.FullAttentionSpec):
        return _Role(StateType.DENSE_KV, RestoreRule.EVERY_TOKEN, spec.sliding_window)
    if isinstance(spec, kvi.SlidingWindowMLASpec) and "compressor" in name:
        return _compressor_state(name, spec, ratios)
    if isinstance(spec, kvi.SlidingWindowSpec):
        window = spec.sliding_window
        # The token at the boundary itself is still to be computed, hence W - 1.
        needed = window - 1 + spec.extra_retained_tokens
        return _Role(StateType.WINDOW_SWA, RestoreRule.WINDOW, window, needed)
    if isinstance(spec, kvi.ChunkedLocalAttentionSpec):
        chunk = spec.attention_chunk_size
        return _Role(StateType.CHUNKED_LOCAL, RestoreRule.CHUNK_START, chunk)
    if isinstance(spec, kvi.MambaSpec):
        return _Role(StateType.RECURRENT, RestoreRule.AT_BOUNDARY)
    if isinstance(spec, kvi.EncoderOnlyAttentionSpec):
        return _Role(StateType.DENSE_KV, RestoreRule.NOTHING)
    raise _unsupported(name, spec)


def _mla_type(name: str, spec: kvi.MLAAttentionSpec) -> StateType:
    """Return dense MLA or one of DeepSeek-V4's compressed states, by role and ratio."""
    ratio = int(spec.tokens_per_state)
    if ratio == 1:
        return StateType.MLA_LATENT
    if spec.cache_role is kvi.SparseCacheRole.INDEXER or name.endswith(_INDEXER_SUFFIX):
        return StateType.COMPRESSED_CSA_INDEX
    return StateType.COMPRESSED_HCA if ratio >= _HCA_RATIO else StateType.COMPRESSED_CSA_MAIN


def _compressor_state(name: str, spec: kvi.SlidingWindowMLASpec, ratios: dict[str, int]) -> _Role:
    """Return the role of the rows of an unfinished compression block.

    A window of one ratio has only the open block, which is empty at an aligned boundary. A window
    of two ratios (CSA) also has the previous block, which overlaps with the next one. So
    `window - ratio` tokens are read after a boundary.
    """
    stem = name.split(".compressor")[0]
    ratio = ratios.get(stem) or ratios.get(stem + ".k_cache")
    if ratio is None:
        raise UnsupportedModelError(
            f"compressor state {name!r} belongs to no compressed layer this package knows "
            f"(looked for {stem!r}); please report the model"
        )
    needed = spec.sliding_window - ratio
    return _Role(StateType.TAIL_STATE, RestoreRule.WINDOW, spec.sliding_window, needed)


def _layer(
    group: int, name: str, spec: KVCacheSpec, role: _Role, tp_size: int, heads: ModelHeads
) -> LayerSpec:
    page_bytes = spec.page_size_bytes
    useful = getattr(spec, "real_page_size_bytes", page_bytes)
    tokens_per_state = getattr(spec, "tokens_per_state", 1)
    dtype = getattr(spec, "dtype", None)
    cut = heads.cut(spec, useful, tp_size)
    return LayerSpec(
        layer=name,
        group=group,
        state_type=role.state_type,
        tokens_per_state=max(1, int(tokens_per_state)),
        block_tokens=spec.block_size,
        page_bytes=useful,
        page_stride_bytes=page_bytes,
        dtype=str(dtype).removeprefix("torch.") if dtype is not None else "uint8",
        restore_rule=role.rule,
        window=role.window,
        boundary_tokens=role.boundary_tokens,
        parts=cut.parts,
        runs=cut.runs,
        prompt_only=role.prompt_only,
    )


def _unsupported(name: str, spec: KVCacheSpec) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"layer {name!r} keeps its state as {type(spec).__name__}, which HeteroConnector cannot "
        "store and restore exactly. Serve this model without the connector (drop "
        "--kv-transfer-config), or report the model so that the kind can be added to "
        "hetero_connector/engine/startup/geometry.py"
    )
