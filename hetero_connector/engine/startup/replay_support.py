"""Decide if this engine rebuilds windows by a replay, and why not if it does not.

A replay computes tokens whose prefix-proportional state is loaded and protected. That is exact only
if attention reads every key and value of the prompt from its page, and if no kernel writes a token
whose slot is masked. vLLM's source says so of some backends; only a run of the tests shows it
(docs/decisions/0048-replays-by-backend.md).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from hetero_connector.spec import Family, LayerSpec, ModelSpec, RestoreRule, StateType

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_FRESH = "attends to this step's fresh keys and values, not to the loaded ones"
_DECODER = "decoder"
"""vLLM's `AttentionType.DECODER`."""
_UNREAD = "is not known to skip masked slots and to read the prompt from its pages only"


_ON_CPU = "2026-11-23, AMD EPYC with AVX-512, vLLM 0.32.0"

BACKENDS: Mapping[str, Mapping[str, str | None]] = {
    "cpu": {
        "CPU_ATTN": _ON_CPU,
        "CPU_V4_MLA_SPARSE": _ON_CPU,
        "CPU_V4_INDEXER": _ON_CPU,
        "DEEPSEEK_SPARSE_SWA": _ON_CPU,
        "CompressorBackend": _ON_CPU,
    },
    "cuda": {
        "FLASH_ATTN": None,
        "FLASHINFER": None,
        "TRITON_ATTN": None,
        "FLASHMLA_SPARSE_DSV4": None,
        "FLASHINFER_MLA_SPARSE_DSV4": None,
        "DEEPSEEK_SPARSE_SWA": None,
        "DEEPSEEK_V4_INDEXER": None,
        "CompressorBackend": None,
    },
}
"""Platforms and attention backends, by vLLM's names, on which vLLM's source says that a replay is
exact. The value is the newest run of `tests/engine/test_replay.py` there; None if there was none.

A name may stand for other kernels on another platform: on ROCm AITER's, which attend to fresh
keys, are `FLASH_ATTN` too.
"""

_PREFIX_TYPES = frozenset(
    {
        StateType.DENSE_KV,
        StateType.COMPRESSED_CSA_MAIN,
        StateType.COMPRESSED_CSA_INDEX,
        StateType.COMPRESSED_HCA,
    }
)


def engine_refusal(
    replay: str, platform: str, backends: Collection[str], config: VllmConfig
) -> str | None:
    """Return why this rank does not rebuild windows by a replay; None if it does.

    `replay`: the configuration's; `platform`, `backends`: vLLM's name of the platform and those of
    the backends of all attention layers.
    """
    if replay == "off":
        return "replay is 'off'"
    if (reason := _config_refusal(config)) is not None:
        return reason
    known = BACKENDS.get(platform, {})
    for name in sorted(backends):
        if name not in known:
            return f"the attention backend {name} on {platform} {_UNREAD}"
    untested = [name for name in sorted(backends) if known[name] is None]
    if untested and replay != "on":
        return (
            f"no test has run on {', '.join(untested)} on {platform}, although vLLM's source says "
            "that a replay is exact there; replay='on' enables it"
        )
    return None


def _config_refusal(config: VllmConfig) -> str | None:
    layers = config.compilation_config.static_forward_context.values()
    if any(getattr(layer, "kv_sharing_target_layer_name", None) for layer in layers):
        return "layers share keys and values, so errors in a window reach other layers"
    if any(getattr(layer, "attn_type", _DECODER) != _DECODER for layer in layers):
        return f"encoder attention {_FRESH}"
    if config.speculative_config is not None:
        return "with speculative decoding the draft's state would be replayed from inexact input"
    parallel = config.parallel_config
    if parallel.use_ubatching:
        return "microbatches have slot mappings of their own"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return f"context-parallel attention {_FRESH}"
    if config.cache_config.cache_dtype.startswith("nvfp4"):
        return "the kernel that writes nvfp4 pages is not known to skip masked slots"
    return None


def model_refusal(model: ModelSpec) -> str | None:
    """Return why windows of this model are not rebuilt by a replay; None if they are.

    `model`: of all pipeline stages.
    """
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
