"""Some engines may rebuild windows by a replay; the others log why not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.engine.startup.replay_support import BACKENDS, engine_refusal, model_refusal
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from tests.engine.fakes import DENSE, HYBRID, layer

FULL, SWA = HYBRID.layers


ATTENTION = SimpleNamespace(attn_type="decoder", kv_sharing_target_layer_name=None)


def engine(
    *layers: Any, cache_dtype: str = "auto", speculative: Any = None, **parallel: Any
) -> Any:
    """Return the parts of a `VllmConfig` that decide, with these attention layers."""
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1}
    context = {f"layers.{i}": layer for i, layer in enumerate((ATTENTION, *layers))}
    return SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=context),
        speculative_config=speculative,
        cache_config=SimpleNamespace(cache_dtype=cache_dtype),
        parallel_config=SimpleNamespace(**{"use_ubatching": False} | sizes | parallel),
    )


def refused(
    *layers: LayerSpec,
    replay: str = "auto",
    platform: str = "cpu",
    backends: tuple[str, ...] = ("CPU_ATTN",),
    config: Any = None,
) -> str | None:
    model = ModelSpec(layers or HYBRID.layers, alignment=16)
    of_engine = engine_refusal(replay, platform, backends, config or engine())
    return of_engine or model_refusal(model)


def test_full_attention_and_windows_on_the_cpu_are_replayed() -> None:
    assert refused() is None
    assert refused(FULL, SWA, layer("wide", 2, StateType.WINDOW_SWA, window=512)) is None


def test_a_backend_that_nobody_has_read_is_refused_also_on_request() -> None:
    for replay in ("auto", "on"):
        assert "NEW_ATTN on cpu is not known to skip" in str(
            refused(replay=replay, backends=("CPU_ATTN", "NEW_ATTN"))
        )


def test_off_is_off_where_a_replay_is_exact() -> None:
    assert refused(replay="off") == "replay is 'off'"


ON_CUDA = ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN")
V4_ON_CUDA = ("FLASHMLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV4")
V4_OTHERS = ("DEEPSEEK_SPARSE_SWA", "DEEPSEEK_V4_INDEXER", "CompressorBackend")


@pytest.mark.parametrize("backend", ON_CUDA)
def test_a_backend_that_was_only_read_waits_for_a_request(backend: str) -> None:
    reason = str(refused(platform="cuda", backends=(backend,)))
    assert f"no test has run on {backend} on cuda" in reason
    assert "replay='on' enables it" in reason
    assert refused(platform="cuda", backends=(backend,), replay="on") is None


def test_a_run_on_one_platform_shows_nothing_for_another() -> None:
    """The windows and compressors of DeepSeek-V4 have the same backends' names everywhere."""
    shared = {"DEEPSEEK_SPARSE_SWA", "CompressorBackend"}
    assert shared <= BACKENDS["cpu"].keys() & BACKENDS["cuda"].keys()
    names = tuple(shared)
    assert refused(backends=names) is None
    assert "no test has run on CompressorBackend, DEEPSEEK" in str(
        refused(platform="cuda", backends=names)
    )


def test_a_recorded_run_is_enough_for_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = {**BACKENDS["cuda"], "FLASH_ATTN": "2027-01-02, NVIDIA H200, vLLM 0.33.0"}
    monkeypatch.setitem(BACKENDS, "cuda", ran)  # type: ignore[arg-type]
    assert refused(platform="cuda", backends=("FLASH_ATTN",)) is None
    assert "run on FLASHINFER on" in str(
        refused(platform="cuda", backends=("FLASH_ATTN", "FLASHINFER"))
    )


def test_kernels_of_the_same_name_on_another_platform_are_refused() -> None:
    """AITER's backend on ROCm is called FLASH_ATTN and attends to fresh keys."""
    reason = refused(platform="rocm", backends=("FLASH_ATTN",), replay="on")
    assert "FLASH_ATTN on rocm is not known" in str(reason)


@pytest.mark.parametrize(
    ("odd", "reason"),
    [
        (replace(SWA, boundary_tokens=40), "keeps more than its window"),
        (replace(FULL, window=32), "not plain full attention"),
        (replace(FULL, restore_rule=RestoreRule.NOTHING), "not plain full attention"),
        (
            replace(SWA, state_type=StateType.TAIL_STATE, restore_rule=RestoreRule.NOTHING),
            "keeps tail_state",
        ),
        (replace(SWA, state_type=StateType.TAIL_STATE, boundary_tokens=32), "further than a win"),
        (replace(FULL, state_type=StateType.MLA_LATENT), "keeps mla_latent"),
        (replace(SWA, state_type=StateType.RECURRENT), "keeps recurrent"),
        (replace(SWA, state_type=StateType.CHUNKED_LOCAL), "keeps chunked_local"),
        (
            replace(FULL, state_type=StateType.COMPRESSED_HCA, tokens_per_state=128),
            "compression blocks that a boundary may cut",
        ),
    ],
)
def test_layers_a_replay_does_not_rebuild(odd: LayerSpec, reason: str) -> None:
    assert reason in str(refused(FULL, SWA, replace(odd, layer="odd", group=5)))


def test_deepseek_v4_is_replayed_where_its_compressed_layers_are_known() -> None:
    layers = (
        replace(FULL, state_type=StateType.COMPRESSED_CSA_MAIN, tokens_per_state=4),
        replace(FULL, state_type=StateType.COMPRESSED_CSA_INDEX, tokens_per_state=4),
        SWA,
        replace(SWA, state_type=StateType.TAIL_STATE, group=2, window=8, boundary_tokens=4),
    )
    cpu = ("CPU_V4_MLA_SPARSE", "CPU_V4_INDEXER", "DEEPSEEK_SPARSE_SWA", "CompressorBackend")
    assert refused(*layers, backends=cpu) is None
    for attention in V4_ON_CUDA:
        names = (attention, *V4_OTHERS)
        assert refused(*layers, platform="cuda", backends=names, replay="on") is None
    names = ("FLASHMLA_SPARSE_DSV41", *V4_OTHERS)
    assert "SPARSE_DSV41" in str(refused(*layers, platform="cuda", backends=names, replay="on"))


def test_models_without_both_kinds_have_nothing_to_replay() -> None:
    assert "windows and state of the whole" in str(refused(*DENSE.layers))
    assert "windows and state of the whole" in str(refused(SWA))
    assert "share a KV cache group" in str(refused(FULL, replace(SWA, group=0)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (engine(speculative=SimpleNamespace()), "speculative"),
        (engine(use_ubatching=True), "microbatches"),
        (engine(SimpleNamespace(kv_sharing_target_layer_name="layers.0")), "share keys"),
        (engine(SimpleNamespace(attn_type="encoder_only")), "encoder attention attends to"),
        (engine(SimpleNamespace(attn_type="encoder_decoder")), "encoder attention attends to"),
        (engine(decode_context_parallel_size=2), "context-parallel attention attends to"),
        (engine(prefill_context_parallel_size=2), "context-parallel attention attends to"),
        (engine(cache_dtype="nvfp4"), "nvfp4 pages"),
        (engine(cache_dtype="nvfp4_4over6"), "nvfp4 pages"),
    ],
)
def test_engines_that_refuse_a_replay_also_on_request(config: Any, reason: str) -> None:
    assert reason in str(refused(replay="on", config=config))


def test_quantised_pages_and_layers_without_a_kind_of_attention_are_replayed() -> None:
    assert refused(config=engine(SimpleNamespace(), cache_dtype="fp8_e4m3")) is None
