import dataclasses
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.chain import ChainHasher, RequestChain
from hetero_connector.artifacts.identity import Fingerprint, canonical_config
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType

LAYER = LayerSpec(
    layer="model.layers.0.self_attn.attn",
    group=0,
    state_type=StateType.DENSE_KV,
    tokens_per_state=1,
    block_tokens=16,
    page_bytes=1024,
    page_stride_bytes=2048,
    dtype="bfloat16",
    restore_rule=RestoreRule.EVERY_TOKEN,
)
SPEC = ModelSpec(layers=(LAYER,), alignment=16, tp_size=2)
BASE = Fingerprint(
    architecture="LlamaForCausalLM",
    hf_config=canonical_config({"rope_theta": 1e4}),
    weights=b"w" * 32,
    tokenizer=b"t" * 32,
    quantization=None,
    kv_cache_dtype="auto",
    model_dtype="bfloat16",
    model_spec=SPEC,
    layout="NHD",
    attention_backend="CPU_ATTN",
    engine_version="0.32.0",
    chunk_tokens=256,
)
CHANGES: dict[str, list[Any]] = {
    "architecture": ["Gemma3ForCausalLM"],
    "hf_config": [canonical_config({"rope_theta": 1e5}), "{}"],
    "weights": [b"v" * 32],
    "tokenizer": [b"u" * 32],
    "quantization": ["fp8", ""],
    "kv_cache_dtype": ["fp8"],
    "model_dtype": ["float32"],
    "model_spec": [dataclasses.replace(SPEC, tp_size=4), dataclasses.replace(SPEC, alignment=32)],
    "layout": ["HND"],
    "attention_backend": ["FLASH_ATTN"],
    "engine_version": ["0.33.0"],
    "chunk_tokens": [512],
    "extras": [(("draft", "x"),), (("draft", "y"),)],
    "format_version": [3],
}
LAYER_CHANGES: dict[str, Any] = {
    "layer": "model.layers.1.self_attn.attn",
    "group": 1,
    "state_type": StateType.MLA_LATENT,
    "tokens_per_state": 4,
    "block_tokens": 32,
    "page_bytes": 512,
    "page_stride_bytes": 4096,
    "dtype": "uint8",
    "restore_rule": RestoreRule.WINDOW,
    "window": 128,
    "boundary_tokens": 127,
    "parts": 2,
    "runs": (1000, 24),
}


def test_every_field_of_the_fingerprint_changes_the_digest() -> None:
    identity = {f.name for f in dataclasses.fields(Fingerprint)} - {"model_name"}
    assert set(CHANGES) == identity
    variants = [
        dataclasses.replace(BASE, **{name: value})
        for name, values in CHANGES.items()
        for value in values
    ]
    digests = [f.digest for f in (BASE, *variants)]
    assert len(set(digests)) == len(digests)
    assert all(len(d) == 32 for d in digests)


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(LayerSpec)])
def test_every_field_of_a_layer_changes_the_digest(field: str) -> None:
    value = LAYER_CHANGES[field] if field in LAYER_CHANGES else _another(getattr(LAYER, field))
    layer = dataclasses.replace(LAYER, **{field: value})
    changed = dataclasses.replace(BASE, model_spec=dataclasses.replace(SPEC, layers=(layer,)))
    assert changed.digest != BASE.digest


def _another(value: Any) -> Any:
    return not value if isinstance(value, bool) else 7


def test_number_and_order_of_layers_change_the_digest() -> None:
    other = dataclasses.replace(LAYER, layer="b")
    stacks = [(LAYER,), (LAYER, other), (other, LAYER), ()]
    digests = {
        dataclasses.replace(BASE, model_spec=ModelSpec(layers, alignment=16)).digest
        for layers in stacks
    }
    assert len(digests) == len(stacks)


def test_equal_fingerprints_agree_and_the_name_is_for_people_only() -> None:
    moved = dataclasses.replace(BASE, model_name="/models/elsewhere")
    assert moved.digest == BASE.digest
    assert moved == BASE
    assert moved.hex == BASE.digest.hex()


@pytest.mark.parametrize("seed", ["0", "1"])
def test_the_digest_is_the_same_in_every_process(seed: str) -> None:
    code = f"import runpy; print(runpy.run_path({__file__!r})['BASE'].hex)"
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert ran.stdout.decode().strip() == BASE.hex


def test_chains_of_two_fingerprints_are_disjoint() -> None:
    def first_key(fingerprint: Fingerprint) -> bytes:
        chain = RequestChain(ChainHasher(fingerprint.digest, 4))
        chain.extend(range(4))
        return next(chain.chunks()).key

    assert first_key(BASE) != first_key(dataclasses.replace(BASE, kv_cache_dtype="fp8"))


def test_a_description_survives_json_and_lists_the_fields() -> None:
    shown = json.loads(json.dumps(dataclasses.replace(BASE, model_name="org/m").describe()))
    assert shown["fingerprint"] == BASE.hex
    assert shown["model_name"] == "org/m"
    assert shown["hf_config"] == {"rope_theta": 10000.0}
    assert shown["weights"] == (b"w" * 32).hex()
    assert shown["state_types"] == ["dense_kv"]
    assert shown["bytes_per_token"] == 64
    for field in ("kv_cache_dtype", "attention_backend", "engine_version", "layout"):
        assert shown[field] == getattr(BASE, field)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=3), v, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), JSON, max_size=4))
def test_a_canonical_config_keeps_every_value(config: dict[str, Any]) -> None:
    text = canonical_config(config)
    assert json.loads(text) == config
    assert canonical_config(dict(reversed(config.items()))) == text


class Dtype:
    def __str__(self) -> str:
        return "torch.bfloat16"


def test_a_canonical_config_drops_its_origin_and_converts_other_values() -> None:
    config = {
        "rope_scaling": {"factor": 8, "_name_or_path": "/b"},
        "_name_or_path": "/a",
        "_commit_hash": "c",
        "transformers_version": "5",
        "dtype": Dtype(),
        "id2label": {0: "a"},
        "layers": (1, 2),
        "names": {"b", "a"},
    }
    assert json.loads(canonical_config(config)) == {
        "rope_scaling": {"factor": 8},
        "dtype": "torch.bfloat16",
        "id2label": {"0": "a"},
        "layers": [1, 2],
        "names": ["a", "b"],
    }
