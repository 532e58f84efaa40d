import importlib

import pytest

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.presets import PRESET_CONFIGS, PRESETS

SWA, TAIL = StateType.WINDOW_SWA, StateType.TAIL_STATE


def boundary_bytes(model: ModelSpec, state_type: StateType, boundary: int) -> int:
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    return layout.artifact_bytes(state_type, 0, boundary)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_stored_without_padding(name: str) -> None:
    model = PRESETS[name]()
    layout = ArtifactLayout(model, model.default_chunk_tokens())
    tokens = layout.chunk_tokens
    stored = sum(layout.artifact_bytes(t, 0, tokens) for t in model.prefix_types)
    assert stored == model.bytes_per_token * tokens
    assert all(layer.page_bytes <= layer.page_stride_bytes for layer in model.layers)
    assert len({layer.layer for layer in model.layers}) == len(model.layers)


@pytest.mark.parametrize(
    ("name", "bytes_per_token"),
    [
        ("llama-3.1-8b", 32 * 2 * 8 * 128 * 2),
        ("llama-3.1-70b", 80 * 2 * 8 * 128 * 2),
        ("qwen3-coder-30b-a3b", 48 * 2 * 4 * 128 * 2),
        ("gpt-oss-120b", 18 * 2 * 8 * 64 * 2),
        ("gemma-3-27b", 10 * 2 * 16 * 128 * 2),
        ("qwen3-next-80b-a3b", 12 * 2 * 2 * 256 * 2),
        ("deepseek-v3", 61 * 576 * 2),
        ("deepseek-v4-flash", 21 * (584 + 132) / 4 + 20 * 584 / 128),
        ("deepseek-v4-pro", 30 * (584 + 132) / 4 + 31 * 584 / 128),
    ],
)
def test_bytes_per_token(name: str, bytes_per_token: float) -> None:
    assert PRESETS[name]().bytes_per_token == bytes_per_token


def test_deepseek_v4_flash_has_the_figures_worked_out_by_hand() -> None:
    """3,850 B per token; 3.21 MB of windows; C4 states 1.72 MB whole, of which half is read."""
    model = PRESETS["deepseek-v4-flash"]()
    assert int(model.bytes_per_token) == 3850
    assert model.alignment == 256
    assert boundary_bytes(model, SWA, 4096) == 43 * 128 * 584 == 3_214_336
    whole = sum(
        layer.page_bytes // layer.block_tokens * layer.window
        for layer in model.layers
        if layer.state_type is TAIL and layer.window == 8
    )
    assert whole == 1_720_320
    assert boundary_bytes(model, TAIL, 4096) == whole // 2
    c128 = [layer for layer in model.layers if layer.window == 128 and layer.state_type is TAIL]
    assert sum(layer.page_bytes // 8 * 128 for layer in c128) == 10_485_760
    assert set(c128).isdisjoint(model.stored_layers)


def test_windows_and_states_of_the_other_hybrids() -> None:
    assert boundary_bytes(PRESETS["gemma-3-27b"](), SWA, 4096) == 52 * 1024 * 8192
    assert boundary_bytes(PRESETS["gpt-oss-120b"](), SWA, 4096) == 18 * 128 * 2048
    qwen = PRESETS["qwen3-next-80b-a3b"]()
    state = ((2 * 16 * 128 + 32 * 128) * 3 + 32 * 128 * 128) * 2
    assert qwen.alignment == 544
    assert boundary_bytes(qwen, StateType.RECURRENT, 5440) == 36 * state


def test_presets_take_the_deployment() -> None:
    eight = PRESETS["llama-3.1-70b"](tp_size=8, kv_dtype="fp8", block_tokens=32)
    assert eight.bytes_per_token * 8 == PRESETS["llama-3.1-70b"]().bytes_per_token / 2
    assert eight.alignment == 32


@pytest.mark.parametrize(
    ("name", "module", "cls"),
    [
        ("deepseek-v4-flash", "deepseek_v4", "DeepseekV4Config"),
        ("gpt-oss-120b", "gpt_oss", "GptOssConfig"),
        ("qwen3-next-80b-a3b", "qwen3_next", "Qwen3NextConfig"),
    ],
)
def test_fields_are_the_defaults_of_transformers(name: str, module: str, cls: str) -> None:
    models = importlib.import_module("transformers.models")
    released = vars(getattr(getattr(models, module), cls)())
    skipped = {"model_type", "torch_dtype", "compress_ratios", "full_attention_interval"}
    fields = {k: v for k, v in PRESET_CONFIGS[name].items() if k not in skipped}
    assert {k: released[k] for k in fields} == fields
