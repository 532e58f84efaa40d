"""The parts of ranks, compared with pages cut by numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_connector.artifacts.layout import ArtifactLayout
from hetero_connector.artifacts.tensor_parallel import is_writer, page_runs, refusal, whole_model
from hetero_connector.spec import ModelSpec, StateType
from hetero_connector.spec.from_config import model_spec_from_config
from hetero_connector.spec.presets import PRESETS
from tests.artifacts.whole_pages import (
    LAYERS,
    TP_SIZES,
    Attention,
    Bytes,
    DeltaNet,
    Layer,
    model_of,
    unknown_cut,
)

powers = st.sampled_from(TP_SIZES)
sizes = st.integers(1, 9)


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    if draw(st.booleans()):
        return Attention("a", draw(st.sampled_from([0, 1, 2, 4, 8, 16])), draw(sizes))
    return DeltaNet(
        "d", 8 * draw(sizes), 8 * draw(sizes), draw(sizes), draw(sizes), draw(sizes), draw(sizes)
    )


def joined(layer: Layer, tp_size: int, parts: list[Bytes], chunk: int = 0) -> Bytes:
    """`[pages, whole bytes]` as the ranks' saves make them; what nobody wrote is 0xEE."""
    spec = layer.spec(tp_size)
    whole = np.full((len(parts[0]), spec.whole_page_bytes), 0xEE, np.uint8)
    written = np.zeros(spec.whole_page_bytes, int)
    for rank, part in enumerate(parts):
        if is_writer(spec, tp_size, rank, chunk):
            for run in page_runs(spec, tp_size, rank):
                end, whole_end = run.start + run.size_bytes, run.whole_start + run.size_bytes
                whole[:, run.whole_start : whole_end] = part[:, run.start : end]
                written[run.whole_start : whole_end] += 1
    assert (written == 1).all(), "a byte that nobody wrote, or two ranks did"
    return whole


def cut(layer: Layer, tp_size: int, rank: int, whole: Bytes) -> Bytes:
    """`[pages, bytes]` as a rank loads them."""
    runs = page_runs(layer.spec(tp_size), tp_size, rank)
    return np.concatenate(
        [whole[:, r.whole_start : r.whole_start + r.size_bytes] for r in runs], axis=1
    )


@given(layers(), powers, powers, st.integers(0, 2**32))
def test_pages_saved_at_one_tp_size_are_loaded_at_any_other(
    layer: Layer, producer: int, consumer: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    page = rng.integers(0, 256, (3, layer.whole_bytes), dtype=np.uint8)
    parts = [layer.part(page, producer, r) for r in range(producer)]
    stored = joined(layer, producer, parts, chunk=seed)
    assert (stored == page).all(), "an artifact's bytes are those of one rank alone"
    loaded = [cut(layer, consumer, rank, stored) for rank in range(consumer)]
    for rank, part in enumerate(loaded):
        assert (part == layer.part(page, consumer, rank)).all()
    assert (joined(layer, consumer, loaded) == page).all(), "and back"


@pytest.mark.parametrize("tp_size", TP_SIZES)
def test_the_whole_model_is_the_same_from_every_tp_size(tp_size: int) -> None:
    assert refusal(model_of(tp_size)) is None
    plain = tuple(replace(x, page_stride_bytes=x.page_bytes) for x in model_of(1).layers)
    assert whole_model(model_of(tp_size)) == replace(model_of(1), layers=plain)


def test_a_models_artifacts_are_as_large_for_every_tp_size() -> None:
    one, *others = (ArtifactLayout(model_of(tp_size), 64) for tp_size in TP_SIZES)
    assert set(one.max_bytes) == {x.state_type for x in LAYERS}
    for layout in others:
        assert layout.max_bytes == one.max_bytes
        for kind in one.max_bytes:
            assert layout.artifact_bytes(kind, 64, 96) == one.artifact_bytes(kind, 64, 96)


def test_a_rank_reads_its_own_heads_and_all_shared_state() -> None:
    layout = ArtifactLayout(model_of(8), 64)
    assert layout.rank_bytes(StateType.DENSE_KV, 0, 64) == 4 * (24 + 40)
    assert layout.artifact_bytes(StateType.DENSE_KV, 0, 64) == 4 * (8 * 24 + 4 * 40)
    whole = layout.artifact_bytes(StateType.MLA_LATENT, 0, 64)
    assert layout.rank_bytes(StateType.MLA_LATENT, 0, 64) == whole == 4 * 56


def test_a_layer_with_an_unknown_cut_is_refused_by_name_at_every_tp_size() -> None:
    for tp_size in TP_SIZES:
        spec = model_of(tp_size)
        known, unknown = spec.layers[:-1], unknown_cut(spec.layers[-1])
        reason = refusal(replace(spec, layers=(*known, unknown)))
        assert reason is not None
        assert "recurrent state of delta" in reason


def test_more_parts_than_ranks_are_refused() -> None:
    layer = replace(LAYERS[0].spec(2), parts=3)
    with pytest.raises(ValueError, match="cannot hold 3 parts"):
        ModelSpec((layer,), alignment=32, tp_size=2)
    with pytest.raises(ValueError, match="add up to a page"):
        replace(layer, runs=(1, 2))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_join_to_the_model_on_one_rank(name: str) -> None:
    one, two = PRESETS[name](), PRESETS[name](tp_size=2)
    assert refusal(one) is None
    assert whole_model(two) == whole_model(one)


def test_more_ranks_than_kv_heads_share_them() -> None:
    eight = PRESETS["qwen3-coder-30b-a3b"](tp_size=8)
    assert {layer.parts for layer in eight.layers} == {4}
    assert whole_model(eight) == whole_model(PRESETS["qwen3-coder-30b-a3b"]())


def test_recurrent_pages_that_decide_the_block_size_make_another_model() -> None:
    """8 ranks have 1 of 2 KV heads each and 4 of 32 value heads: a state is fewer tokens long."""
    one, eight = (PRESETS["qwen3-next-80b-a3b"](tp_size=tp_size) for tp_size in (1, 8))
    assert eight.alignment < one.alignment
    assert whole_model(eight) != whole_model(one)


def test_a_mamba_2_whose_groups_are_copied_is_refused() -> None:
    config = {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layer_types": ["mamba", "attention"],
        "mamba_n_heads": 4,
        "mamba_d_state": 16,
    }
    reason = refusal(model_spec_from_config(config, tp_size=2))
    assert reason is not None
    assert "recurrent state of model.layers.0.mixer" in reason
