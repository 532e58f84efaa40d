"""vLLM's specs are cut over ranks as the spec and the config say, and only if that is certain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1 import kv_cache_interface as kvi
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from hetero_connector.engine.startup.heads import Cut, DeltaNetHeads, ModelHeads

UNKNOWN = ModelHeads()


def attention(kv_heads: int, **more: Any) -> kvi.FullAttentionSpec:
    return kvi.FullAttentionSpec(
        block_size=16, num_kv_heads=kv_heads, head_size=64, dtype=torch.bfloat16, **more
    )


def cut(spec: kvi.KVCacheSpec, tp_size: int, heads: ModelHeads = UNKNOWN) -> Cut:
    return heads.cut(spec, spec.real_page_size_bytes, tp_size)


def test_ranks_with_several_heads_each_have_others() -> None:
    size = 2 * 16 * 128 * 2
    assert cut(attention(2), 4) == Cut(4, (size,))
    assert cut(attention(2), 1) == Cut(1, (size,))
    window = kvi.SlidingWindowSpec(
        block_size=16, sliding_window=64, num_kv_heads=2, head_size=64, dtype=torch.bfloat16
    )
    assert cut(window, 2) == Cut(2, (size,))


@pytest.mark.parametrize(
    ("total", "parts"), [(None, None), (8, 8), (4, 4), (1, 1), (16, None), (3, None)]
)
def test_ranks_with_one_head_each_may_have_the_same(total: int | None, parts: int | None) -> None:
    runs = () if parts is None else (16 * 128 * 2,)
    assert cut(attention(1), 8, ModelHeads(total)) == Cut(parts or 8, runs)


def test_a_packing_other_than_head_by_head_is_not_cut() -> None:
    packed = attention(4, num_head_slots=2, state_content_bytes=512)
    assert cut(packed, 2) == Cut(2, ())


def test_a_latent_is_on_every_rank_if_vllm_says_so() -> None:
    fields = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16}
    assert cut(kvi.MLAAttentionSpec(**fields, max_tp_shards=1), 4) == Cut(1, (64 * 576 * 2,))
    assert cut(kvi.MLAAttentionSpec(**fields), 4) == Cut(4, ())


def delta_net(rows: int, width: int, state: tuple[int, ...], **more: Any) -> kvi.MambaSpec:
    return kvi.MambaSpec(
        block_size=64,
        shapes=((rows, width), state),
        dtypes=(torch.bfloat16, torch.float32),
        **{"mamba_type": MambaAttentionBackendEnum.GDN_ATTN, **more},
    )


HEADS = ModelHeads(2, DeltaNetHeads(keys=2, values=4, key_dim=8, value_dim=16))


def test_a_delta_net_is_cut_section_by_section() -> None:
    keys, values, state = 8 * 2, 2 * 16 * 2, 2 * 16 * 8 * 4
    spec = delta_net(3, 8 + 8 + 32, (2, 16, 8))
    assert cut(spec, 2, HEADS) == Cut(2, (keys, keys, values) * 3 + (state,))


@pytest.mark.parametrize(
    ("spec", "heads"),
    [
        (delta_net(3, 48, (2, 16, 8)), UNKNOWN),
        (delta_net(3, 40, (2, 16, 8)), HEADS),
        (delta_net(3, 48, (2, 8, 16)), HEADS),
        (delta_net(3, 48, (2, 16, 8), mamba_type=MambaAttentionBackendEnum.MAMBA2), HEADS),
    ],
    ids=["no heads in the config", "another width", "another state", "another kind"],
)
def test_a_recurrent_state_that_is_not_what_its_heads_say_is_not_cut(
    spec: kvi.MambaSpec, heads: ModelHeads
) -> None:
    assert cut(spec, 2, heads) == Cut(2, ())


def test_a_state_that_every_rank_has_is_stored_once() -> None:
    spec = delta_net(3, 48, (2, 16, 8), tp_replicated=True)
    assert cut(spec, 2) == Cut(1, (spec.real_page_size_bytes,))


def config(text: dict[str, Any], total: int = 4, **more: Any) -> Any:
    arch = SimpleNamespace(per_layer_overrides=more.pop("per_layer_overrides", None))
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(to_dict=lambda: text),
        get_total_num_kv_heads=lambda: total,
        model_arch_config=arch,
    )
    return SimpleNamespace(model_config=model, **{"speculative_config": None, **more})


def test_a_config_with_one_count_of_kv_heads_is_used() -> None:
    assert ModelHeads.of(config({"num_key_value_heads": 4})) == ModelHeads(4)


@pytest.mark.parametrize(
    "config",
    [
        config({"num_key_value_heads": 4, "num_global_key_value_heads": 2}),
        config({"num_key_value_heads": 8}),
        config({"num_kv_heads": [4, 4]}),
        config({"multi_query": True}, total=1),
        config({"num_key_value_heads": 4}, per_layer_overrides=[{}, {"total_num_kv_heads": 2}]),
        config({"num_key_value_heads": 4}, speculative_config=object()),
    ],
    ids=["two kinds", "vLLM says otherwise", "a list", "none", "by layer", "a draft model"],
)
def test_if_layers_may_differ_no_count_is_used(config: Any) -> None:
    assert ModelHeads.of(config) == ModelHeads()


def test_the_heads_of_a_delta_net_are_read_from_the_config() -> None:
    text = {
        "num_key_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    }
    assert ModelHeads.of(config(text)) == ModelHeads(4, DeltaNetHeads(2, 4, 8, 16))
    assert ModelHeads.of(config(text | {"linear_key_head_dim": None})).delta_net is None
