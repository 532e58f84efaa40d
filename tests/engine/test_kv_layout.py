"""The preferred layout of the KV cache is taken where it can be, and breaks no start."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.envs import disable_envs_cache
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from examples.checkpoints import write_checkpoint
from examples.serving import engine_arguments
from hetero_connector.connector import HeteroConnector
from tests.engine.harness import CHECKPOINTS

pytestmark = pytest.mark.engine

FLASH_ATTENTION = [layout.name for layout in get_supported_kv_cache_layouts([])]
"""The layout of backends that state none, in vLLM's order."""
FLASHINFER_ON_BLACKWELL = ["LBHNC", "BLHNC"]
DEEPSEEK_V4 = ["BLHNC", "BLNHC"]
HETERO = {"kv_connector": "HeteroConnector", "kv_role": "kv_both"}


def engine_config(model: str) -> Any:
    arguments = {"model": str(write_checkpoint(model, CHECKPOINTS)), "skip_tokenizer_init": True}
    return EngineArgs(**arguments | engine_arguments(model)).create_engine_config()


@pytest.fixture(scope="module")
def shared_config() -> Any:
    return engine_config("dense")


@pytest.fixture
def config(shared_config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's configuration with the connector, its layout not chosen yet."""
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)
    monkeypatch.setattr(shared_config.cache_config, "kv_cache_layout", None)
    monkeypatch.setattr(shared_config, "kv_transfer_config", KVTransferConfig(**HETERO))
    return shared_config


def resolved(config: Any, supported: Sequence[str]) -> str:
    return str(resolve_kv_cache_layout(config, [list(supported)]).name)


def test_heads_are_outermost_where_the_backend_takes_any_order(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert resolved(config, FLASH_ATTENTION) == "LBHNC"
    monkeypatch.setattr(config.cache_config, "kv_cache_layout", None)
    monkeypatch.setattr(config, "kv_transfer_config", None)
    assert resolved(config, FLASH_ATTENTION) == "LBNHC"


def test_the_layout_has_each_head_and_each_page_in_one_piece(config: Any) -> None:
    layout = KVCacheLayout[str(HeteroConnector.get_required_kvcache_layout(config))]
    assert layout.is_block_contiguous
    assert layout.is_layer_compact


@pytest.mark.parametrize(
    ("supported", "chosen"),
    [
        (FLASHINFER_ON_BLACKWELL, "LBHNC"),
        (DEEPSEEK_V4, "BLHNC"),
        (["LBNHC"], "LBNHC"),
        ([x.name for x in CPUAttentionBackend.supported_kv_cache_layouts()], "LBHNC"),
    ],
)
def test_a_backend_that_cannot_take_it_keeps_its_own(
    config: Any, supported: list[str], chosen: str
) -> None:
    assert resolved(config, supported) == chosen


def test_the_users_choice_comes_first(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disable_envs_cache()  # an engine of an earlier test has filled it
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "NHD")
    assert resolved(config, FLASH_ATTENTION) == "LBNHC"


@pytest.mark.parametrize("model", ["mla", "deepseek_v4"])
def test_latents_have_no_heads_to_order(model: str) -> None:
    assert HeteroConnector.get_required_kvcache_layout(engine_config(model)) is None


SIBLINGS = ("NixlConnector", "OffloadingConnector", "MooncakeConnector", "LMCacheConnectorV1")


@pytest.mark.parametrize(
    ("sibling", "method", "hisparse", "chosen"),
    [
        *((name, None, None, "LBHNC") for name in SIBLINGS),
        ("ExampleHiddenStatesConnector", "extract_hidden_states", None, "LBNHC"),
        ("HiSparseConnector", None, object(), "BLHNC"),
        ("OffloadingConnector", None, object(), "BLHNC"),
    ],
)
def test_a_multi_connector_with_any_of_vllms_own_starts(
    config: Any,
    monkeypatch: pytest.MonkeyPatch,
    sibling: str,
    method: str | None,
    hisparse: object,
    chosen: str,
) -> None:
    """vLLM refuses to start if two of the connectors in it name different layouts."""
    children = [HETERO, {"kv_connector": sibling, "kv_role": "kv_both"}]
    transfer = KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": children},
    )
    monkeypatch.setattr(config, "kv_transfer_config", transfer)
    monkeypatch.setattr(config.attention_config, "hisparse_config", hisparse)
    speculative = SimpleNamespace(method=method) if method else None
    monkeypatch.setattr(config, "speculative_config", speculative)
    assert resolved(config, FLASH_ATTENTION) == chosen
