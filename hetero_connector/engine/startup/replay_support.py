"""Decide if a window replay is exact on this engine, or why it is refused.

A replay computes tokens whose prefix-proportional state is loaded and protected. That is exact only
if attention reads every key and value of the prompt from its page. A backend that takes those of
this step from the layer's fresh output would read values that the replay computes inexactly.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hetero_connector.spec import Family, LayerSpec, ModelSpec, RestoreRule, StateType

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FRESH = "attends to this step's fresh keys and values, not to the loaded ones"
_UNTRIED = "has not been shown to skip masked slots and to read the prompt from its pages only"

BACKENDS: Mapping[str, str | None] = {
    "CPU_ATTN": None,
    "CPU_V4_MLA_SPARSE": None,
    "CPU_V4_INDEXER": None,
    "DEEPSEEK_SPARSE_SWA": None,
    "CompressorBackend": None,
    "CPU_MLA": _FRESH,
    "FLASH_ATTN_MLA": _FRESH,
    "FLASHINFER_MLA": _FRESH,
    "FLASHMLA": _FRESH,
    "CUTLASS_MLA": _FRESH,
    "TRITON_MLA": _FRESH,
    "ROCM_AITER_MLA": _FRESH,
    "ROCM_AITER_FA": _FRESH,
}
"""Attention backends by vLLM's name: None if a replay is exact, else why it is not.

DeepSeek-V4's windows and compressors have the same backends everywhere, so the backend of its
compressed layers decides.
"""

_PREFIX_TYPES = frozenset(
    {
        StateType.DENSE_KV,
        StateType.COMPRESSED_CSA_MAIN,
        StateType.COMPRESSED_CSA_INDEX,
        StateType.COMPRESSED_HCA,
    }
)


def refusal(
    model: ModelSpec, backends: Collection[str], *, shares_kv: bool, config: VllmConfig
) -> str | None:
    """Return why this engine does not rebuild windows by a replay; None if it can.

    `backends`: of all attention layers; `shares_kv`: some layers read another layer's keys and
    values.
    """
    if (reason := _model_refusal(model)) is not None:
        return reason
    if shares_kv:
        return "layers share keys and values, so errors in a window reach other layers"
    for backend in backends:
        if (reason := BACKENDS.get(backend, _UNTRIED)) is not None:
            return f"the attention backend {backend} {reason}"
    if config.speculative_config is not None:
        return "with speculative decoding the draft's state would be replayed from inexact input"
    if config.parallel_config.use_ubatching:
        return "microbatches have slot mappings of their own"
    return None


def _model_refusal(model: ModelSpec) -> str | None:
    for layer in model.layers:
        if (reason := _layer_refusal(layer, model.alignment)) is not None:
            return f"layer {layer.layer!r} {reason}"
    windows = [x for x in model.layers if x.state_type is StateType.WINDOW_SWA]
    if not windows or not model.prefix_types:
        return "a replay is for models with windows and state of the whole prefix"
    narrowest = min(x.boundary_tokens for x in windows)
    if any(x.boundary_tokens > narrowest for x in model.layers_of(StateType.TAIL_STATE)):
        return "compressor state reaches back further than a window"
    groups = {
        family: {x.group for x in model.layers if x.state_type.family is family}
        for family in Family
    }
    if groups[Family.PREFIX] & groups[Family.BOUNDARY]:
        return "windows share a KV cache group with state of the whole prefix"
    return None


def _layer_refusal(layer: LayerSpec, alignment: int) -> str | None:
    if layer.state_type is StateType.WINDOW_SWA:
        if layer.window is None or layer.boundary_tokens != layer.window - 1:
            return "keeps more than its window"
        return None
    if layer.state_type is StateType.TAIL_STATE and layer.restore_rule is RestoreRule.WINDOW:
        return None
    if layer.state_type not in _PREFIX_TYPES:
        return f"keeps {layer.state_type.value}, which a replay does not rebuild"
    if layer.restore_rule is not RestoreRule.EVERY_TOKEN or layer.window is not None:
        return "is not plain full attention"
    if alignment % layer.tokens_per_state:
        return "has compression blocks that a boundary may cut"
    return None
