"""The presets equal the pages that a real engine lays out for the same config.json."""

import dataclasses
import json
from typing import Any

import pytest

from hetero_connector.engine.startup.geometry import model_spec
from hetero_connector.engine.startup.heads import ModelHeads
from hetero_connector.spec import ModelSpec
from hetero_connector.spec.from_config import model_spec_from_config
from tests.engine.harness import CHECKPOINTS, MODELS

pytestmark = pytest.mark.engine


def differences(preset: ModelSpec, live: ModelSpec) -> dict[str, object]:
    """Return the differences by layer, except the number of the KV cache group."""
    ours = {layer.layer: dataclasses.asdict(layer) for layer in preset.layers}
    theirs = {layer.layer: dataclasses.asdict(layer) for layer in live.layers}
    found: dict[str, object] = dict.fromkeys(ours.keys() ^ theirs.keys(), "not in both")
    for name in ours.keys() & theirs.keys():
        pairs = {k: (v, theirs[name][k]) for k, v in ours[name].items() if k != "group"}
        if wrong := {k: pair for k, pair in pairs.items() if pair[0] != pair[1]}:
            found[name] = wrong
    return found


IN_MAKE_TEST = ("gemma3", "deepseek_v4", "qwen3_next")
OTHERS = sorted(set(MODELS) - set(IN_MAKE_TEST))


@pytest.mark.parametrize(
    "model", [*IN_MAKE_TEST, *(pytest.param(name, marks=pytest.mark.slow) for name in OTHERS)]
)
def test_preset_equals_the_engines_geometry(stock_llm: Any) -> None:
    core = stock_llm.llm_engine.engine_core.engine_core
    worker = core.model_executor.driver_worker.worker
    engine_config = stock_llm.llm_engine.vllm_config
    heads = ModelHeads.of(engine_config)
    live = model_spec(worker.model_runner.kv_cache_config, heads=heads)
    path = engine_config.model_config.model
    kv_dtype = engine_config.cache_config.cache_dtype
    ssm_dtype = engine_config.cache_config.mamba_ssm_cache_dtype
    own_dtype = str(engine_config.model_config.dtype)
    config = json.loads((CHECKPOINTS / path / "config.json").read_text())
    preset = model_spec_from_config(
        config | {"torch_dtype": own_dtype, "dtype": own_dtype},
        kv_dtype="fp8" if kv_dtype == "fp8_ds_mla" else kv_dtype,
        ssm_dtype=ssm_dtype,
        # The CPU build's own default differs from a GPU's; what follows from it is compared.
        block_tokens=max(layer.block_tokens for layer in live.layers),
    )
    assert differences(preset, live) == {}
    assert preset.alignment == live.alignment
