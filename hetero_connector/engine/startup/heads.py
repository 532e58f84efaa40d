"""Find how tensor parallelism cuts the pages of a vLLM layer, as far as vLLM and the config say.

vLLM's cache specs have the number of heads of one rank. If it is more than one, ranks have
different heads. If it is one, the model may have one head per rank, or fewer, each on several
ranks: only the model's config knows. The same is true of the sections of a recurrent state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.utils.torch_utils import get_dtype_size
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hetero_connector.spec.attention_layers import delta_net_runs

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec


@dataclass(frozen=True)
class Cut:
    """The values of `LayerSpec.parts` and `LayerSpec.runs`."""

    parts: int
    runs: tuple[int, ...]


@dataclass(frozen=True)
class DeltaNetHeads:
    """Heads and their dimensions in all gated delta net layers, over all ranks."""

    keys: int
    values: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True)
class ModelHeads:
    """Heads over all ranks; None if they are unknown or differ between layers."""

    kv: int | None = None
    delta_net: DeltaNetHeads | None = None

    @classmethod
    def of(cls, config: VllmConfig) -> ModelHeads:
        """Read the model's config. With a draft model, which has other heads, none are known."""
        if config.speculative_config is not None:
            return cls()
        model, text = config.model_config, config.model_config.hf_text_config.to_dict()
        total, arch = model.get_total_num_kv_heads(), model.model_arch_config
        counts = _kv_head_counts(text)
        alike = (
            arch.per_layer_overrides is None and bool(counts) and counts == [total] * len(counts)
        )
        return cls(total if alike else None, _delta_net(text))

    def cut(self, spec: KVCacheSpec, page_bytes: int, tp_size: int) -> Cut:
        """Return how the pages of a layer are cut; without runs if that is not certain."""
        if _replicated(spec):
            return Cut(1, (page_bytes,))
        if isinstance(spec, kvi.MambaSpec):
            return Cut(tp_size, self._recurrent_runs(spec, tp_size))
        if isinstance(spec, kvi.MLAAttentionSpec | kvi.SlidingWindowMLASpec):
            return Cut(tp_size, ())  # would be replicated
        if not isinstance(spec, kvi.AttentionSpec) or spec.num_head_slots is not None:
            return Cut(tp_size, ())  # not packed head by head
        if tp_size == 1 or spec.num_kv_heads > 1:
            return Cut(tp_size, (page_bytes,))
        if self.kv is None or max(self.kv, tp_size) % min(self.kv, tp_size) or self.kv > tp_size:
            return Cut(tp_size, ())
        return Cut(self.kv, (page_bytes,))

    def _recurrent_runs(self, spec: kvi.MambaSpec, tp_size: int) -> tuple[int, ...]:
        """Return the runs of a gated delta net: `gated_delta_net_state_shape` in mamba_utils.py."""
        heads = self.delta_net
        if heads is None or spec.mamba_type is not MambaAttentionBackendEnum.GDN_ATTN:
            return ()
        if len(spec.shapes) != 2 or is_conv_state_dim_first():
            return ()
        (rows, width), state = spec.shapes[0], spec.shapes[1]
        keys, values = heads.keys // tp_size, heads.values // tp_size
        sections = keys * heads.key_dim, values * heads.value_dim
        if width != 2 * sections[0] + sections[1]:
            return ()
        if tuple(state) != (values, heads.value_dim, heads.key_dim):
            return ()
        item_bytes, state_item_bytes = (get_dtype_size(dtype) for dtype in spec.dtypes)
        return delta_net_runs(
            rows, sections[0] * item_bytes, sections[1] * item_bytes, prod(state) * state_item_bytes
        )


def equal_on_all_ranks(config: VllmConfig, platform: str) -> bool:
    """Return True if all ranks that have a KV head compute the same bits for it.

    Their input is the same if the all-reduce adds up in the same order on every rank: NCCL and
    vLLM's own on CUDA do (csrc/custom_all_reduce.cuh), those of the CPU build do not. Their weights
    are the same unless a rank quantises them itself, also only those that a quantised checkpoint
    has left out (`--quantization-config`): the scale then depends on its other heads.
    """
    model = config.model_config
    is_read = model.is_quantized and model.quantization_config is None
    return platform == "cuda" and (model.quantization is None or is_read)


def preferred_layout(config: VllmConfig) -> str | None:
    """Return vLLM's layout in which a page has its KV heads outermost; None for no preference.

    Such a page is one piece of the whole page. vLLM takes it where all attention backends can and
    `VLLM_KV_CACHE_LAYOUT` is not set. MLA has one head, and of the connectors in a MultiConnector
    all that prefer a layout must agree, so there is none with one that needs another: HiSparse, and
    the extraction of hidden states.
    """
    model, speculative = config.model_config, config.speculative_config
    if model is None or model.use_mla or config.attention_config.hisparse_config is not None:
        return None
    if speculative is not None and speculative.method == "extract_hidden_states":
        return None
    return "LBHNC"


def _replicated(spec: KVCacheSpec) -> bool:
    return getattr(spec, "max_tp_shards", None) == 1 or getattr(spec, "tp_replicated", False)


def _kv_head_counts(config: Mapping[str, Any]) -> list[object]:
    """Return every number of KV heads in a config: some models have several kinds of layers."""
    return [n for key, n in config.items() if "key_value_heads" in key or "kv_heads" in key]


def _delta_net(config: Mapping[str, Any]) -> DeltaNetHeads | None:
    names = (
        "linear_num_key_heads",
        "linear_num_value_heads",
        "linear_key_head_dim",
        "linear_value_head_dim",
    )
    values = (config.get(name) for name in names)
    numbers = [number for number in values if isinstance(number, int) and number > 0]
    return DeltaNetHeads(*numbers) if len(numbers) == len(names) else None
