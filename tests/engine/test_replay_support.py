"""Some engines may rebuild windows by a replay; the others log why not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_connector.engine.startup.replay_support import BACKENDS, refusal
from hetero_connector.spec import LayerSpec, ModelSpec, RestoreRule, StateType
from tests.engine.fakes import DENSE, HYBRID, layer

FULL, SWA = HYBRID.layers


def engine(*, speculative: Any = None, ubatching: bool = False) -> Any:
    return SimpleNamespace(
        speculative_config=speculative,
        parallel_config=SimpleNamespace(use_ubatching=ubatching),
    )


def refused(
    *layers: LayerSpec, backends: tuple[str, ...] = ("CPU_ATTN",), **config: Any
) -> str | None:
    shares_kv = config.pop("shares_kv", False)
    model = ModelSpec(layers or HYBRID.layers, alignment=16)
    return refusal(model, backends, shares_kv=shares_kv, config=engine(**config))


def test_full_attention_and_windows_on_the_cpu_are_replayed() -> None:
    assert refused() is None
    assert refused(FULL, SWA, layer("wide", 2, StateType.WINDOW_SWA, window=512)) is None


@pytest.mark.parametrize("backend", [b for b, reason in BACKENDS.items() if reason])
def test_backends_that_read_fresh_keys_are_refused(backend: str) -> None:
    reason = refused(backends=("CPU_ATTN", backend))
    assert reason is not None
    assert backend in reason


def test_an_untested_backend_is_refused() -> None:
    assert "has not been shown" in str(refused(backends=("NEW_ATTN",)))


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
    others = ("DEEPSEEK_SPARSE_SWA", "CompressorBackend")
    assert refused(*layers, backends=("CPU_V4_MLA_SPARSE", "CPU_V4_INDEXER", *others)) is None
    assert "FLASHMLA_SPARSE" in str(refused(*layers, backends=("FLASHMLA_SPARSE_DSV4", *others)))


def test_models_without_both_kinds_have_nothing_to_replay() -> None:
    assert "windows and state of the whole" in str(refused(*DENSE.layers))
    assert "windows and state of the whole" in str(refused(SWA))
    assert "share a KV cache group" in str(refused(FULL, replace(SWA, group=0)))


def test_speculation_microbatches_and_shared_kv_refuse_a_replay() -> None:
    assert "speculative" in str(refused(speculative=SimpleNamespace()))
    assert "microbatches" in str(refused(ubatching=True))
    assert "share keys" in str(refused(shares_kv=True))
